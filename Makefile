# make train | test | lint | accept: each makes .venv first if it is not there or the requirements changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test lint accept

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# make train ARGS="steps=50 tracking=none"
train: $(STAMP)
	$(BIN)/python -m trainer $(ARGS)

# one thread: a second one beside another busy process makes small products a hundred times slower
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the long checks: three seeds of the default run, the control, kill and resume, the whole parity grid
accept: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)
