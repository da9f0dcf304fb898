"""Rows of a task, and the order in which training sees them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_kernels.philox import uniform53

DATA_PURPOSE, SHUFFLE_PURPOSE, SPLIT_PURPOSE, WARM_START_PURPOSE, STYLE_PURPOSE = range(16, 21)
MINIBATCH_PURPOSE, ADAPTER_PURPOSE, COMPLETIONS_PURPOSE = range(21, 24)
"""Keys of the counter-based generator, apart from those that rollouts draw from."""

_SHOWN = 60
"""Characters of a prompt in a message."""


@dataclass(frozen=True)
class Row:
    """One problem: a prompt (text or chat messages), its answer, and whatever else a reward may want."""

    prompt: str | list[dict[str, Any]]
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False, repr=False)
    """Where it was read, FILE:LINE (or the row's number, where rows have no lines), for messages; empty if made."""
    prompt_ids: Sequence[int] | None = field(default=None, compare=False, repr=False)
    """The prompt as the run rendered it, once."""

    def name(self) -> str:
        """Its source and the beginning of its prompt, for messages."""
        prompt = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)
        shown = repr(prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}...")
        return f"{self.source} ({shown})" if self.source else shown

    @property
    def engine_prompt(self) -> str | list[dict[str, Any]] | list[int]:
        """What the engine is given."""
        return self.prompt if self.prompt_ids is None else list(self.prompt_ids)


def uniforms(n: int, seed: int, purpose: int, epoch: int = 0) -> NDArray[np.float64]:
    """n numbers in [0, 1), a function of the arguments alone: nothing to save, nothing to restore."""
    zero = np.zeros(n, np.uint64)
    counter = (np.arange(n, dtype=np.uint64), zero + np.uint64(epoch), zero, zero)
    return uniform53(counter, (zero + np.uint64(seed), zero + np.uint64(purpose)))


def permutation(n: int, seed: int, purpose: int, epoch: int = 0) -> NDArray[np.int64]:
    """A random order of 0 .. n - 1."""
    return np.argsort(uniforms(n, seed, purpose, epoch), kind="stable")


class RowStream:
    """An endless stream over the rows, reshuffled every epoch; a batch may span two epochs, none is dropped."""

    def __init__(self, rows: Sequence[Row], seed: int, purpose: int = DATA_PURPOSE) -> None:
        self.rows = rows
        self.seed = seed
        self.purpose = purpose
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, start: int, count: int) -> list[Row]:
        """Rows at places start .. start + count - 1 of the stream."""
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Row:
        epoch, offset = divmod(place, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self.rows), self.seed, self.purpose, epoch)
        return self.rows[int(self._order[offset])]
