"""What is shipped: the wheel holds every module and every configuration file, and runs from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- requirements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *(r for rs in EXTRAS.values() for r in rs)])
def test_requirements_are_lower_bounds(requirement: str) -> None:
    specifiers = list(Requirement(requirement).specifier)
    assert [specifier.operator for specifier in specifiers] == [">="]


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *EXTRAS["dev"]])
def test_tested_set_meets_the_requirements(requirement: str) -> None:
    parsed = Requirement(requirement)
    pinned = {_normal(name): version for name, version in PINS.items()}[_normal(parsed.name)]
    assert parsed.specifier.contains(pinned)


def test_project_says_what_it_is() -> None:
    assert (PROJECT["name"], PROJECT["license"], PROJECT["requires-python"]) == ("cowroll", "Apache-2.0", ">=3.11")
    assert PROJECT["scripts"] == {"cowroll-train": "trainer.__main__:main"}
    assert set(EXTRAS) == {"dev", "peft", "tasks"}
    assert "Apache License" in (ROOT / "LICENSE").read_text()


# -- the wheel ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building leaves folders behind in the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("conf", "kernels", "rollout", "trainer"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _below(folder: Path, suffix: str, inside: str) -> set[str]:
    return {f"{inside}/{path.relative_to(folder)}" for path in folder.rglob(f"*{suffix}")}


def test_wheel_holds_every_module_every_kernel_and_every_configuration_file(wheel: Path) -> None:
    expected = _below(ROOT / "conf", ".yaml", "trainer/conf")
    for name, folder in (
        ("rollout", "rollout"),
        ("trainer", "trainer"),
        ("rollout_kernels", "kernels/rollout_kernels"),
    ):
        expected |= _below(ROOT / folder, ".py", name) | {f"{name}/py.typed"}
    for suffix in (".cpp", ".h"):
        expected |= _below(ROOT / "kernels/rollout_kernels", suffix, "rollout_kernels")
    for suffix in (".css", ".js"):
        expected |= _below(ROOT / "trainer", suffix, "trainer")
    assert {
        "trainer/report/page.js",
        "trainer/conf/config.yaml",
        "rollout/engine/engine.py",
        "rollout_kernels/cpu/attention.cpp",
    } < expected
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if ".dist-info/" not in name} == expected
    metadata = f"cowroll-{PROJECT['version']}.dist-info"
    assert {f"{metadata}/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")} < held


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["-m", "trainer"], id="module"),
        pytest.param(["-c", "from trainer.__main__ import main; main()"], id="console script", marks=pytest.mark.slow),
    ],
)
def test_wheel_runs_from_an_empty_folder(unpacked: Path, tmp_path: Path, start: list[str]) -> None:
    # a value that only this copy has shows whose files are used
    shipped = unpacked / "trainer" / "conf" / "config.yaml"
    shipped.write_text(re.sub(r"(?m)^steps: \d+$", "steps: 4321", shipped.read_text()))
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    command = [sys.executable, *start, "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["steps"], shown["model"]["kind"], shown["tracking"]["kind"]) == (4321, "tiny", "wandb")
    assert list(tmp_path.iterdir()) == []
