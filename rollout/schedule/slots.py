"""Slots: rows of the device's token table, one for each sequence that runs and draws."""

from collections.abc import Iterable

from rollout.schedule.sequence import Sequence


class Slots:
    """Which of `count` slots are free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: list[int] = []
        self.reset()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, sequence: Sequence) -> None:
        """Take a sequence's slot from it, if it has one."""
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise if the slots in use are not exactly those of the running completions."""
        taken = sorted(s.slot for s in running if not s.is_prompt)
        if sorted(taken + self._free) != list(range(self.count)):
            raise RuntimeError(f"slots {taken} in use and {sorted(self._free)} free do not add up")
