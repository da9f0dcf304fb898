"""What every test runs under: no network, a cache of its own, and the thread count it was started with.

The processes of one run share the cache, which the first of them makes and fills with the compiled kernels.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
# threads that wait must not spin: there are more of them than cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# `rollout` and `trainer` are the packages, not the folders of tests beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch

from backends import CPU, choose_anew, has_kernels
from rollout_kernels import ops

_FIRST = "PYTEST_XDIST_WORKER" not in os.environ
if _FIRST:
    os.environ["COWROLL_CACHE"] = tempfile.mkdtemp(prefix="cowroll_tests_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless -m says which tests to take or they are asked for by name."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    if slow:
        config.hook.pytest_deselected(items=slow)


def pytest_configure(config: pytest.Config) -> None:
    if _FIRST and not config.option.collectonly:
        ops.choose(CPU, torch.float32)


def pytest_unconfigure() -> None:
    if _FIRST:
        shutil.rmtree(os.environ["COWROLL_CACHE"], ignore_errors=True)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """For a test that calls torch.set_num_threads itself."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow), 3], ids=lambda count: f"{count}threads")
def threads(request: pytest.FixtureRequest, restore_threads: None) -> int:
    """The test runs under 1, 2 and 3 threads."""
    count: int = request.param
    torch.set_num_threads(count)
    return count


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Called with a value of COWROLL_KERNELS, has the choice made anew under it, until the test has ended."""

    def use(wanted: str) -> None:
        monkeypatch.setenv("COWROLL_KERNELS", wanted)
        choose_anew()

    yield use
    choose_anew()


@pytest.fixture(params=["compiled", "torch"])
def implementation(request: pytest.FixtureRequest, use_kernels: Callable[[str], None]) -> None:
    """The test runs with compiled kernels and with torch operations."""
    if request.param == "torch":
        use_kernels("torch")
    elif not has_kernels():
        pytest.skip("no compiled kernels here")
