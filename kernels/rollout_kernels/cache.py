"""Where what was made on this machine is kept: compiled kernels, and the tiny model after its warm start."""

import os
from pathlib import Path

from rollout_kernels.errors import RolloutError


def cache_directory() -> Path:
    """$COWROLL_CACHE, else ~/.cache/cowroll. Raises RolloutError if this user has no home directory."""
    named = os.environ.get("COWROLL_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "cowroll"
    except RuntimeError as error:
        raise RolloutError("there is no home directory to keep a cache in: set COWROLL_CACHE to a folder") from error
