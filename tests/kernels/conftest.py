"""Fixtures of tests that build kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import choose_anew, has_kernels
from rollout_kernels.cpu import build


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The library has not been looked for yet, and its cache is empty; returns where the cache keeps libraries."""
    for name in ("COWROLL_KERNELS", "COWROLL_KERNELS_MARCH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COWROLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FLAGS", ["-O0", *build._FLAGS[1:]])  # which is quicker
    choose_anew()
    yield tmp_path / "cache" / "kernels"
    choose_anew()


@pytest.fixture
def compiler() -> None:
    """For a test that needs kernels that can be built."""
    if not has_kernels():
        pytest.skip("no compiled kernels here")
