# make train | test | lint | accept: each makes .venv first if it is not there or the requirements changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test lint accept targets sanitize lower-bounds

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,tasks]'
	touch $(STAMP)

# make train ARGS="steps=50 tracking=none"
train: $(STAMP)
	$(BIN)/python -m trainer $(ARGS)

# The whole suite holds the floor of coverage, a part of it (ARGS) is not measured.
# a process for each core, with one thread: a second one beside another busy process makes small products a hundred times slower
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal $(if $(ARGS),,--cov) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the kernels' tests with every compiler and target that is at hand
targets: $(STAMP)
	for cxx in g++ clang++; do for march in native x86-64-v3 x86-64-v2; do \
	    echo "$$cxx $$march"; \
	    CXX=$$cxx COWROLL_KERNELS_MARCH=$$march COWROLL_KERNELS=native OMP_NUM_THREADS=1 \
	        $(BIN)/python -m pytest tests/kernels $(ARGS) || exit 1; \
	done; done

# the kernels' tests under the address and undefined-behaviour sanitizers, but for that of their speed
sanitize: $(STAMP)
	CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=all -g" COWROLL_KERNELS=native OMP_NUM_THREADS=1 \
	    ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    $(BIN)/python -m pytest tests/kernels --ignore tests/kernels/test_pace.py -m "not slow" $(ARGS)

# the long checks: three seeds of the default run, the control, kill and resume, the whole parity grid
accept: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# the test suite with the lowest version of everything that pyproject.toml allows, but for torch: its CPU build is tested
LOWER := .venv-lower
lower-bounds:
	$(PYTHON) -m venv --clear $(LOWER)
	grep -oE '"[a-z-]+>=[0-9.]+' pyproject.toml | sed 's/"//; s/>=/==/; /^torch==/d' > $(LOWER)/lowest.txt
	$(LOWER)/bin/python -m pip install --quiet -c $(LOWER)/lowest.txt -e '.[dev]' "$$(grep '^torch==' constraints.txt)"
	OMP_NUM_THREADS=1 $(LOWER)/bin/python -m pytest -m "not slow" -n auto --dist worksteal $(ARGS)
