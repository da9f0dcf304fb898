"""A call of the engine: its requests, and their rollouts as they end, whoever steps."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rollout.engine.handles import BadPrompt, Outcomes, RolloutHandle, failure
from rollout.engine.loop import EngineCore
from rollout.schedule.sequence import Request
from rollout.types import Rollout, RolloutGroup

OnGroup = Callable[[int, RolloutGroup], None]
"""Told (place of the prompt, group) as soon as the last completion of a prompt has ended."""


class Call:
    """One consumer. Its handles share a queue that nobody else reads."""

    def __init__(self, core: EngineCore, requests: Iterable[Request | BadPrompt]) -> None:
        self._core = core
        self._outcomes: Outcomes = deque()
        self.entries = [RolloutHandle(r, core.turns, self._outcomes) if isinstance(r, Request) else r for r in requests]
        """What stands for the prompts, in order."""
        self._places = {entry: place for place, entry in enumerate(self.entries) if isinstance(entry, RolloutHandle)}
        self.num_rollouts = sum(handle.request.n for handle in self._places)

    def rollouts(self, on_group: OnGroup | None = None) -> Iterator[tuple[int, Rollout]]:
        """Submit, and yield (place, rollout) as they end; aborts what is left when it is dropped.

        Steps when nothing is there and nobody else steps. Raises RolloutError if an error in a step of another thread
        has ended the requests, after what had ended before.
        """
        self._core.turns.refuse_nesting()
        num_left, of_prompt = self.num_rollouts, {handle: handle.request.n for handle in self._places}
        try:
            self._core.meter.begin_call(self)
            self._core.submit(self._places)
            for place, entry in enumerate(self.entries):
                if isinstance(entry, BadPrompt):
                    entry.policy_version = self._core.scheduler.policy_version
                    yield place, entry.group().rollouts[0]
            while num_left:
                if not self._outcomes:
                    self._core.step(unless=lambda: bool(self._outcomes))
                while self._outcomes:
                    handle, outcome = self._outcomes.popleft()
                    if not isinstance(outcome, Rollout):
                        raise failure(outcome)
                    num_left -= 1
                    of_prompt[handle] -= 1
                    if on_group is not None and not of_prompt[handle]:
                        on_group(self._places[handle], handle.group())
                    yield self._places[handle], outcome
        finally:
            if not self._core.turns.elsewhere:  # an iterator that was copied with the process
                for handle in self._places:
                    self._core.abort(handle)
            self._core.meter.end_call(self)
