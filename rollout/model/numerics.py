"""What the bits of a log-prob depend on besides weights and tokens, said once for generator and trainer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers import PreTrainedModel

from rollout.model.substitutions import fuse, substitute_narrow, substitute_silu
from rollout_kernels.ops import Ops, choose
from rollout_kernels.shapes import ROW_MULTIPLE

Substitution = Callable[[PreTrainedModel, Ops], None]
"""Replaces modules of a view in place."""

EXACT: tuple[Substitution, ...] = (substitute_silu, fuse, substitute_narrow)
INEXACT: tuple[Substitution, ...] = (fuse,)


@dataclass(frozen=True)
class Numerics:
    """Made once for an engine and given to every view, pack and estimate; a run that falls back gets another."""

    ops: Ops
    num_threads: int
    """Torch threads of every forward."""
    row_multiple: int
    """Token and logit rows of a forward are padded to a multiple of it."""
    substitutions: tuple[Substitution, ...]
    """What becomes of a module's copy in every view, in order."""
    exact: bool = False
    """The verdict: whether generator and trainer agree in every bit."""
    reason: str = "not probed"

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, *, exact: bool = True) -> Self:
        """For a model on a device, with torch's present number of threads; exact: whether exactness is aimed at."""
        chosen, threads = choose(device, dtype), torch.get_num_threads()
        return cls(chosen, threads, ROW_MULTIPLE if exact else 1, EXACT if exact else INEXACT)

    def judged(self, exact: bool, reason: str) -> Self:
        """The same computation under another verdict."""
        return replace(self, exact=exact, reason=reason)
