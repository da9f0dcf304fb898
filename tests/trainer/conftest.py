"""The command line in this process."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra._internal import utils as hydra_utils

from caches import cache_with_kernels
from trainer.__main__ import main

Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def no_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes any trace function, that of coverage too, for a debugger's, and then raises what it would report."""
    monkeypatch.setattr(hydra_utils, "is_under_debugger", lambda: False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start from, with a cache of its own beside it."""
    folder = tmp_path / "empty folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COWROLL_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    return folder


@pytest.fixture
def command(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run the command in this process: exit status and standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["python -m trainer", *arguments])
        status: str | int | None = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code
        assert isinstance(status, int)
        return status, capsys.readouterr().err

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
