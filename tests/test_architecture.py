"""The shape of the source: imports run one way, planning needs no torch, and one function makes log-probs."""

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"rollout_kernels": ROOT / "kernels" / "rollout_kernels", "rollout": ROOT / "rollout"}
PACKAGES["trainer"] = ROOT / "trainer"
SOURCES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
FLOORS = ("schedule", "model", "forward", "memory", "engine")
"""Of rollout/, from the lowest; each may use those below it, and what lies in no folder."""
ON_TOP = {"rollout.api"}
"""Modules of no folder that use the floors; the others are the ground that every floor may use."""


def _where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it; `from a import b` may mean the module a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_where(path)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _importers(package: str, forbidden: set[str]) -> list[str]:
    """Imports in a package whose first part, or whole name, is forbidden."""
    return [
        f"{_where(path)} imports {name}"
        for path in sorted(PACKAGES[package].rglob("*.py"))
        for name in _imports(path)
        if name.split(".")[0] in forbidden or name in forbidden
    ]


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# -- who imports whom ---------------------------------------------------------------------------------------------


def test_sources_are_where_these_tests_look() -> None:
    assert {_where(path) for path in SOURCES} >= {
        "kernels/rollout_kernels/logprobs.py",
        "rollout/engine/engine.py",
        "trainer/loop.py",
    }
    assert "rollout.types" in set(_imports(ROOT / "rollout" / "engine" / "engine.py"))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("rollout_kernels", {"rollout", "trainer", "transformers", "hydra", "omegaconf"}),
        ("rollout", {"trainer", "hydra", "omegaconf", "wandb", "datasets"}),
        ("trainer", {"kernels"}),
    ],
)
def test_imports_run_one_way(package: str, forbidden: set[str]) -> None:
    assert _importers(package, forbidden) == []


def test_trainer_knows_no_blocks_and_no_launches() -> None:
    planning = {name for name in _modules() if name.startswith("rollout.schedule.")}
    launches = {f"rollout_kernels.{name}" for name in ("attention", "attention_plan", "shapes", "reference")}
    assert _importers("trainer", planning | launches | {"rollout.forward.runner"}) == []
    named = re.compile(r"\b(block_table|BlockTable|BlockPool|ScheduledBatch|slot_mapping)\b")
    assert [_where(path) for path in PACKAGES["trainer"].rglob("*.py") if named.search(path.read_text())] == []


def _modules() -> dict[str, Path]:
    """Every module of ours by its full name."""
    return {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    }


def _height(module: str) -> int:
    """The floor of a module of rollout; -1 for the ground."""
    if module == "rollout" or module in ON_TOP:
        return len(FLOORS)
    floor = module.split(".")[1]
    return FLOORS.index(floor) if floor in FLOORS else -1


def test_floors_use_only_those_below() -> None:
    upwards = [
        f"{module} imports {name}"
        for module, path in _modules().items()
        for name in _imports(path)
        if module.startswith("rollout.") and name.startswith("rollout.") and _height(name) > _height(module)
    ]
    assert upwards == []


def test_imports_have_no_circle() -> None:
    modules = _modules()
    graph = {
        module: {name for name in _imports(path) if name in modules} - {module} for module, path in modules.items()
    }
    graph["rollout"] = set()  # imports names when they are asked for
    graphlib.TopologicalSorter(graph).prepare()


def test_no_folder_is_crowded() -> None:
    folders = {path.parent for path in SOURCES} | {ROOT / "scripts"}
    assert {_where(folder): n for folder in folders if (n := len(list(folder.glob("*.py")))) > 12} == {}


def test_planning_imports_no_torch() -> None:
    names = [name for name in _modules() if name.startswith("rollout.schedule.")]
    blocked = "import sys; sys.modules.update(torch=None, transformers=None, numpy=None)"
    code = f"{blocked}\nimport rollout.schedule, {', '.join(names)}, rollout.config, rollout.types, trainer.config"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(names) >= 6


def test_public_names_are_sorted_complete_and_there() -> None:
    rollout = importlib.import_module("rollout")
    assert sorted(rollout.__all__) == rollout.__all__
    tree = ast.parse((ROOT / "rollout" / "__init__.py").read_text())
    for_types = [node for branch in tree.body if isinstance(branch, ast.If) for node in branch.body]
    homes = {alias.name: node.module for node in for_types if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == rollout.__all__
    assert all(
        getattr(importlib.import_module(str(home)), name) is getattr(rollout, name) for name, home in homes.items()
    )
    assert {"RolloutConfig", "RolloutEngine", "SamplingParams", "generate_rollouts"} <= set(rollout.__all__)
    for name in rollout.__all__:
        assert getattr(rollout, name).__module__.split(".")[0] in ("rollout", "rollout_kernels")


# -- a distribution called `kernels` ------------------------------------------------------------------------------

STAND_IN = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {}) if name[0].isupper() else lambda *a, **k: lambda decorated: decorated
"""
"""As much of the `kernels` distribution as transformers needs to be imported."""


def test_kernels_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "kernels").iterdir() if path.name != "__pycache__"] == ["rollout_kernels"]


def test_our_kernels_folder_does_not_hide_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(STAND_IN)
    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    code = """
import kernels, rollout_kernels.logprobs
from transformers import Qwen3ForCausalLM
from transformers.utils import is_kernels_available
print(kernels.__file__, is_kernels_available(), Qwen3ForCausalLM.__name__)
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "kernels" / "__init__.py"), "True", "Qwen3ForCausalLM"]


# -- the text -----------------------------------------------------------------------------------------------------


def test_one_function_makes_log_probs_of_tokens() -> None:
    words = re.compile(r"\blog_?softmax\b|\blogsumexp\b|\bcross_entropy\b|\bnll_loss\b", re.IGNORECASE)
    users = {_where(path) for path in SOURCES if words.search(path.read_text())}
    # the exactness probe compares with transformers' own forward by other means; the estimate counts what it takes
    assert users == {"kernels/rollout_kernels/logprobs.py", "rollout/engine/exactness.py", "rollout/memory/estimate.py"}
    takers = [
        function.name
        for function in _functions(ROOT / "kernels" / "rollout_kernels" / "logprobs.py")
        if {"logsumexp", "gather"} <= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    ]
    assert takers == ["token_logprobs"]


@pytest.mark.parametrize("path", SOURCES, ids=_where)
def test_module_says_what_it_is_and_stays_short(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
    assert len(path.read_text().splitlines()) <= 300
    ends = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in _functions(path)}
    assert {name: length for name, length in ends.items() if length > 50} == {}


def test_architecture_names_every_file() -> None:
    """In the room of its folder, and none that is not there."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Rooms\n")[2].partition("\n## ")[0]
    named: dict[str, set[str]] = {}
    for room in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        folder, files = room.split("`")[1].rstrip("/"), re.findall(r"`(\w+\.(?:py|cpp|h))`", room)
        named[folder] = set(files)
    there: dict[str, set[str]] = {}
    kernels = [*ROOT.glob("kernels/rollout_kernels/*/*.cpp"), *ROOT.glob("kernels/rollout_kernels/*/*.h")]
    for path in [*SOURCES, *(ROOT / "scripts").glob("*.py"), *kernels]:
        if path.name != "__init__.py":
            there.setdefault(_where(path.parent), set()).add(path.name)
    assert named == there


ASKS_FOR_A_DEVICE = re.compile(r"\bis_(meta|cpu|cuda|mps)\b|(device|named|wanted)\.type\b|\bsupports\(|\btorch\.cuda\b")


def test_one_file_asks_for_devices() -> None:
    """Beside the table of operations: what a device has of memory, and whether it is the one that the user named."""
    asking = {_where(path) for path in SOURCES if ASKS_FOR_A_DEVICE.search(path.read_text())}
    assert asking == {"kernels/rollout_kernels/ops.py", "rollout/memory/device.py", "rollout/model/loading.py"}


# -- what the trainer sees of the engine --------------------------------------------------------------------------

EXPORTING = ("rollout", "rollout.engine", "rollout.forward", "rollout.memory", "rollout.model")


def _exported(package: str) -> set[str]:
    """The package's `__all__`, as written."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    (names,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    return set(ast.literal_eval(names))


def test_the_trainer_imports_only_what_the_engine_exports() -> None:
    exported = {package: _exported(package) for package in EXPORTING}
    private = []
    for path in sorted(PACKAGES["trainer"].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                taken = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                taken = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            ours = [(home, name) for home, name in taken if home.split(".")[0] == "rollout"]
            private += [f"{_where(path)}: {home} {name}" for home, name in ours if name not in exported.get(home, ())]
    assert private == []


@pytest.mark.parametrize("package", EXPORTING)
def test_exported_names_are_there_once(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'nosuch'$"):
        module.nosuch  # noqa: B018
