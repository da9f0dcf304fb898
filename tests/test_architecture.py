"""The shape of the source: imports run one way, planning needs no torch, and one function makes log-probs."""

import ast
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
TORCH_FREE = ("block_pool", "config", "errors", "scheduler", "sequence", "types")


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
    assert "rollout.types" in set(_imports(ROOT / "rollout" / "engine.py"))


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
    engine = {f"rollout.{name}" for name in ("block_pool", "sequence", "scheduler", "model_runner", "kernels")}
    launches = {f"rollout_kernels.{name}" for name in ("attention", "plan", "tiles", "activations")}
    assert _importers("trainer", engine | launches) == []
    named = re.compile(r"\b(block_table|BlockTable|BlockPool|ScheduledBatch|slot_mapping)\b")
    assert [_where(path) for path in PACKAGES["trainer"].glob("*.py") if named.search(path.read_text())] == []


@pytest.mark.parametrize("name", TORCH_FREE)
def test_planning_imports_no_torch(name: str) -> None:
    # a package of the same name whose __init__ does not run, and a torch that cannot be imported
    code = f"""
import importlib, sys, types
package = types.ModuleType("rollout")
package.__path__ = [{str(ROOT / "rollout")!r}]
sys.modules.update(rollout=package, torch=None, transformers=None)
module = importlib.import_module("rollout.{name}")
print(module.__file__)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "rollout" / f"{name}.py")


def test_public_names_are_sorted_complete_and_there() -> None:
    rollout = importlib.import_module("rollout")
    assert sorted(rollout.__all__) == rollout.__all__
    tree = ast.parse((ROOT / "rollout" / "__init__.py").read_text())
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == rollout.__all__
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
    assert len(path.read_text().splitlines()) <= 320
    long = [f.name for f in _functions(path) if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > 60]
    assert long == []


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


def test_a_configuration_is_read_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import trainer.config"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
