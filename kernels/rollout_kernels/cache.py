"""Where what was made on this machine is kept: compiled kernels, and the tiny model after its warm start."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$COWROLL_CACHE, else ~/.cache/cowroll. RuntimeError if there is no home directory."""
    return Path(os.environ.get("COWROLL_CACHE") or Path.home() / ".cache" / "cowroll")
