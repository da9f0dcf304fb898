"""The library of compiled kernels, built and bound once per process, and how it is called."""

import ctypes
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rollout_kernels.cpu.bindings import Interface, bind
from rollout_kernels.cpu.build import load_library
from rollout_kernels.errors import BackendUnavailableError

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels and what they say of themselves."""

    library: ctypes.CDLL
    interface: Interface

    @property
    def identity(self) -> str:
        """What was compiled from what, for which vectors."""
        pairs = "-bf16" if self.interface.bf16_pairs else ""
        return f"cpu{32 * self.interface.lanes}{pairs}-{Path(self.library._name).stem.partition('-')[0]}"


@cache
def kernels() -> Kernels:
    """The kernels, compiled now if they are not in the cache directory.

    Raises BackendUnavailableError if they cannot be built, RolloutError if a setting of theirs is at fault.
    """
    try:
        library = load_library()
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", "") or ""
        raise BackendUnavailableError(f"the CPU's kernels could not be built: {error}\n{output}".rstrip()) from error
    return Kernels(library, bind(library))


def identity() -> str:
    """The compiled kernels' identity. Raises as `kernels` does."""
    return kernels().identity


def launch(kernel: str, out: Tensor, *arguments: object) -> None:
    """Call a kernel, by name, that writes `out`; a tensor without values (on the meta device) lies nowhere: no call."""
    if out.data_ptr():
        getattr(kernels().library, kernel)(*arguments)


def check_alike(x: Tensor, other: Tensor) -> None:
    """Both in one dtype that kernels take, and on one device."""
    # once for every operation of a step, so without a loop
    assert x.dtype in DTYPES and x.dtype == other.dtype, (x.dtype, other.dtype)  # noqa: PT018
    assert x.device == other.device, (x.device, other.device)
