"""Caches of a test's own, with the kernels in them: to build those takes longer than most tests."""

import shutil
from pathlib import Path

from rollout_kernels.cache import cache_directory

SESSION = cache_directory()
"""The cache that this run of the tests began with (tests/conftest.py)."""


def cache_with_kernels(folder: Path) -> Path:
    """Makes `folder` a cache that holds nothing but the kernels that are compiled; returns it."""
    folder.mkdir()
    if (SESSION / "kernels").exists():
        shutil.copytree(SESSION / "kernels", folder / "kernels")
    return folder
