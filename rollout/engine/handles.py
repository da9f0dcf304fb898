"""What a caller holds of a request, and what it is told: events as they happen, and in the end a group."""

from collections import deque
from dataclasses import dataclass

from rollout.engine.turns import Turns
from rollout.errors import RolloutError
from rollout.schedule.sequence import Request, Sequence
from rollout.types import Event, Rollout, RolloutGroup, TokenEvent


class RolloutHandle:
    """A submitted prompt: what has become of it so far, whoever stepped."""

    def __init__(self, request: Request, owner: Turns, outcomes: "Outcomes | None" = None) -> None:
        self.request = request
        self._owner = owner
        self.rollouts: list[Rollout] = []
        """Completions that have ended, in the order in which they did."""
        self.done = False
        """Whether nothing more will come."""
        self.error: BaseException | None = None
        """What ended it before its completions did: an error or an interrupt in a step, whoever took it, or close()."""
        self._outcomes: Outcomes = deque() if outcomes is None else outcomes
        self._num_read: dict[int, int] = {}

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    def group(self) -> RolloutGroup:
        """The completions that have ended so far, in index order. Raises RolloutError if an error ended the request."""
        if self.error is not None:
            raise failure(self.error)
        request = self.request
        ordered = sorted(self.rollouts, key=lambda rollout: rollout.index)
        return RolloutGroup(request.prompt_ids, ordered, request.key, request.seed)

    def events(self) -> list[Event]:
        """What has happened since the last call, each thing once: tokens drawn, then completions that have ended.

        A completion's tokens are in order and come before its Rollout; a fork's begin with its parent's. Neither steps
        nor waits; any thread may read, one at a time. After the last event, raises RolloutError if an error ended the
        request.
        """
        ended: list[Event] = []
        while self._outcomes:
            _, outcome = self._outcomes.popleft()
            if isinstance(outcome, Rollout):
                ended.append(outcome)
        events = [event for sequence in list(self.request.sequences) for event in self._new_tokens(sequence)] + ended
        if self.error is not None and not events:
            raise failure(self.error)
        return events

    def check_owner(self, engine: Turns) -> None:
        """Raise unless the engine with these turns made it: the blocks of another's requests mean nothing there."""
        engine.refuse_elsewhere()
        if self._owner is not engine:
            raise RolloutError("this handle is of another engine: give it to the one that made it")

    def running(self, index: int, wish: str) -> Sequence:
        """The sequence of completion `index`, which has drawn a token and goes on; RolloutError if there is none."""
        for sequence in self.request.sequences:
            if sequence.index == index and sequence.logprobs and sequence.finish_reason is None and not self.done:
                return sequence
        raise RolloutError(f"completion {index} of this request is not running, so it cannot be {wish}")

    def _new_tokens(self, sequence: Sequence) -> list[Event]:
        # raw_logprobs is the last to grow, perhaps at this moment
        start, end = self._num_read.get(sequence.index, 0), len(sequence.raw_logprobs)
        self._num_read[sequence.index] = end
        first = self.request.num_prompt_tokens
        return [
            TokenEvent(
                sequence.index,
                place,
                sequence.token_ids[first + place],
                sequence.logprobs[place],
                sequence.raw_logprobs[place],
                sequence.loss_mask[place],
            )
            for place in range(start, end)
        ]

    def end(self, sequence: Sequence, text: str | None) -> Rollout:
        """The engine says that a completion has ended."""
        rollout = Rollout(
            sequence.index,
            sequence.completion_ids,
            sequence.logprobs,
            sequence.raw_logprobs,
            text,
            sequence.finish_reason or "abort",
            self.request.policy_version,
            sequence.loss_mask,
        )
        self.rollouts.append(rollout)
        self._outcomes.append((self, rollout))
        self.done = len(self.rollouts) == self.request.n
        return rollout

    def fail(self, error: BaseException) -> None:
        """The engine says that an error has ended the request."""
        self._outcomes.append((self, error))
        self.error, self.done = error, True


Outcomes = deque[tuple[RolloutHandle, Rollout | BaseException]]
"""Where completions go as they end, and the error that ended their request; the handles of one call share one."""


def failure(error: BaseException) -> RolloutError:
    """What the owner of a request is told, from the error that ended it."""
    told = RolloutError(f"all requests of this engine have been ended by {type(error).__name__}: {error}".rstrip(": "))
    told.__cause__ = error
    return told


@dataclass
class BadPrompt:
    """Stands in for a request whose prompt cannot be run, for on_error="return"."""

    key: int
    seed: int
    error: str
    policy_version: int = 0

    def group(self) -> RolloutGroup:
        failed = Rollout(0, [], [], [], None, "error", self.policy_version)
        return RolloutGroup([], [failed], self.key, self.seed, self.error)
