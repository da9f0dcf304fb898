"""The operations, and which backend runs them: chosen once for each kind of device and dtype.

An operation is a name and a signature. The reference (reference/) has them all, in torch; a backend has those that it
runs better, and the reference lends it the others. COWROLL_KERNELS says which backend: "auto", or nothing, takes the
best that runs here; "torch" the reference; "native" any but the reference; a backend's name that one. The choice holds
for the process, since bits differ by it, and its identity is what logs, checkpoints and warm starts name.

A new backend is a folder beside cpu/, with OPERATIONS and an identity, and an entry of BACKENDS.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rollout_kernels import cpu, reference
from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.errors import BackendUnavailableError, RolloutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ops:
    """The choice for one kind of device and dtype. What the operations compute is said in reference/."""

    identity: str
    """What computes, since bits differ by it."""
    own: frozenset[str]
    """The operations that are the backend's own; the others are the reference's."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    fits_linear: Callable[[Tensor], bool]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    segment_attention: Callable[[Tensor, Tensor, Tensor, AttentionPlan, float, int | None], tuple[Tensor, Tensor]]
    segment_attention_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionPlan, float, int | None],
        tuple[Tensor, Tensor, Tensor],
    ]
    write_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    draw_tokens: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Backend:
    """Some of the operations, for one type of device."""

    name: str
    device: str
    """As torch.device.type has it."""
    dtypes: tuple[torch.dtype, ...]
    identity: Callable[[], str]
    """Makes the backend ready to run; raises BackendUnavailableError where it cannot be."""
    operations: Mapping[str, Callable[..., Any]]

    def serves(self, device_type: str, dtype: torch.dtype) -> bool:
        return self.device == device_type and dtype in self.dtypes


BACKENDS: tuple[Backend, ...] = (Backend("cpu", "cpu", cpu.DTYPES, cpu.identity, cpu.OPERATIONS),)
"""The best first."""

_AUTO, _REFERENCE, _NATIVE = ("", "auto"), ("torch", "reference"), "native"


def choose(device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations for tensors of a kind; the same record at every call.

    Raises RolloutError if COWROLL_KERNELS, or a setting of a backend, has a value that cannot be or cannot be met.
    """
    return _choice(device.type, dtype)


@cache
def _choice(device_type: str, dtype: torch.dtype) -> Ops:
    wanted = os.environ.get("COWROLL_KERNELS", "")
    names = [backend.name for backend in BACKENDS]
    if wanted not in (*_AUTO, *_REFERENCE, _NATIVE, *names):
        known = ", ".join(("auto", _REFERENCE[0], _NATIVE, *names))
        raise RolloutError(f"COWROLL_KERNELS={wanted!r}: set it to one of {known}, or leave it out")
    if wanted not in _REFERENCE:
        meant = [b for b in BACKENDS if wanted in (*_AUTO, _NATIVE, b.name) and b.serves(device_type, dtype)]
        problems = []
        for backend in meant:
            identity, problem = _prepare(backend.name)
            if not problem:
                return _ops(identity, backend.operations)
            problems.append(problem)
        if wanted not in _AUTO:
            kind = f"on {device_type} in {str(dtype).removeprefix('torch.')}"
            nobody = f"no such kernels run {kind}: set it to auto, or leave it out"
            raise RolloutError(f"COWROLL_KERNELS={wanted}, but {'; '.join(problems) or nobody}")
        for problem in problems:
            _warn_once(problem)
    return _ops("torch" if device_type == "cpu" else device_type, {})


@cache
def _prepare(name: str) -> tuple[str, str]:
    """A backend's identity, and what keeps it from running, if anything does."""
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    try:
        return backend.identity(), ""
    except BackendUnavailableError as error:
        return "", str(error)


def _ops(identity: str, own: Mapping[str, Callable[..., Any]]) -> Ops:
    return Ops(identity=identity, own=frozenset(own), **(reference.OPERATIONS | dict(own)))


@cache
def _warn_once(problem: str) -> None:
    logger.warning("the model runs in torch operations, which takes longer, since %s", problem)


def holds_values(tensor: Tensor) -> bool:
    """False on the meta device, where tensors have a shape only."""
    return not tensor.is_meta
