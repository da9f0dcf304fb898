"""From a caller's prompts to requests: everything that can be known to be wrong is found here, before work starts."""

import secrets
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, TypedDict

from transformers import PreTrainedTokenizerBase

from rollout.config import SamplingParams, is_kind
from rollout.engine.prompts import Prompt, encode_prompt
from rollout.engine.turns import Turns
from rollout.errors import RolloutError
from rollout.forward.sampler import TRAIN
from rollout.schedule.sequence import Request, Sequence
from rollout.types import Event, Rollout, RolloutGroup, TokenEvent

OnError = Literal["raise", "return"]


class RequestOptions(TypedDict, total=False):
    """What a call may say of all its prompts; see RolloutEngine.generate_rollouts."""

    step: int
    keys: Seq[int] | None
    purpose: int
    salt: str | None
    on_error: OnError


@dataclass(frozen=True)
class Limits:
    """What a prompt has to fit."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        if self.max_len < 2:
            raise RolloutError(
                f"max_model_len={self.max_model_len} and a pool of num_blocks={self.num_blocks} with"
                f" block_size={self.block_size} leave no room for a prompt and a completion: allow at least 2 tokens"
            )

    @property
    def max_len(self) -> int:
        """Longest sequence in tokens, by the model and by the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def shortage(self, requests: Iterable[Request]) -> str | None:
        """What is wrong if some request cannot reach its max_new_tokens for want of blocks."""
        longest = max((r.num_prompt_tokens + r.sampling.max_new_tokens for r in requests), default=0)
        needed = -(-min(longest, self.max_model_len) // self.block_size)
        if needed <= self.num_blocks:
            return None
        return (
            f"num_blocks={self.num_blocks} of {self.block_size} tokens cannot hold a prompt and its max_new_tokens, so"
            f' that completions end at the pool\'s length, with "length": set num_blocks to {needed}, or lower'
            " max_new_tokens"
        )

    def check(self, prompt_ids: list[int]) -> None:
        """Raise if the prompt leaves no room for a completion."""
        length = len(prompt_ids)
        if length >= self.max_model_len:
            raise RolloutError(
                f"{length} tokens leave no room for a completion within max_model_len={self.max_model_len}"
            )
        missing = length // self.block_size + 1 - self.num_blocks
        if missing > 0:
            raise RolloutError(
                f"{length} tokens and a completion do not fit a pool of {self.num_blocks} blocks of {self.block_size}:"
                f" {missing} blocks are missing"
            )


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

    def end(self, rollout: Rollout) -> None:
        """The engine says that a completion has ended."""
        self.rollouts.append(rollout)
        self._outcomes.append((self, rollout))
        self.done = len(self.rollouts) == self.request.n

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
    """Stands in the place of a request whose prompt cannot be run, for on_error="return"."""

    key: int
    seed: int
    error: str
    policy_version: int = 0

    def group(self) -> RolloutGroup:
        failed = Rollout(0, [], [], [], None, "error", self.policy_version)
        return RolloutGroup([], [failed], self.key, self.seed, self.error)


def make_requests(
    prompts: Seq[Prompt],
    n: int,
    sampling: SamplingParams | Seq[SamplingParams] | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: Limits,
    step: int = 0,
    keys: Seq[int] | None = None,
    purpose: int = TRAIN,
    salt: str | None = None,
    on_error: OnError = "raise",
) -> list[Request | BadPrompt]:
    """One request per prompt, in order. Raises RolloutError, naming the place of a prompt that is wrong.

    on_error="return" is for what is wrong with a prompt; an option that is wrong is refused all the same.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Seq):
        kind = "single string" if isinstance(prompts, str) else type(prompts).__name__
        raise RolloutError(f"prompts is a {kind}: pass a list of prompts")
    if not is_kind(int, n) or n < 1:
        raise RolloutError(f"n={n!r}: ask for at least one completion per prompt, in whole numbers")
    if on_error not in ("raise", "return"):
        raise RolloutError(f"on_error={on_error!r}: use raise or return")
    per_prompt = _one_per_prompt(SamplingParams() if sampling is None else sampling, len(prompts))
    key_list = list(range(len(prompts))) if keys is None else list(keys)
    if len(key_list) != len(prompts):
        raise RolloutError(f"{len(key_list)} keys for {len(prompts)} prompts: give one per prompt")
    for name, value in [("step", step), ("purpose", purpose), *[("key", key) for key in key_list]]:
        if not is_kind(int, value) or not 0 <= value < 2**32:
            raise RolloutError(f"{name}={value!r} must lie in 0 .. 4294967295, as a whole number")
    if salt is not None and not isinstance(salt, str):
        raise RolloutError(f"salt={salt!r}: use a string or None")
    _check_stop_tokens(per_prompt, limits.vocab_size)
    drawn = secrets.randbits(32)
    requests: list[Request | BadPrompt] = []
    for i, (prompt, params, key) in enumerate(zip(prompts, per_prompt, key_list, strict=True)):
        seed = drawn if params.seed is None else params.seed
        try:
            ids = encode_prompt(prompt, tokenizer, limits.vocab_size)
            limits.check(ids)
        except RolloutError as error:
            if on_error == "raise":
                raise RolloutError(f"prompt {i}: {error}") from error
            requests.append(BadPrompt(key, seed, str(error)))
            continue
        max_len = min(len(ids) + params.max_new_tokens, limits.max_len)
        requests.append(Request(ids, n, params, seed, step, key, purpose, max_len, salt=salt))
    return requests


def _one_per_prompt(sampling: SamplingParams | Seq[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Seq) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise RolloutError(f"sampling={sampling!r}: use SamplingParams, or a list of them with one per prompt")
    if len(sampling) != count:
        raise RolloutError(
            f"{len(sampling)} sampling parameters for {count} prompts: give one for all or one per prompt"
        )
    return list(sampling)


def _check_stop_tokens(sampling: Iterable[SamplingParams], vocab_size: int) -> None:
    outside = {token for params in set(sampling) for token in params.stop_token_ids if token >= vocab_size}
    if outside:
        raise RolloutError(
            f"stop_token_ids: {min(outside)} is outside the model's vocabulary of {vocab_size}, so nothing would stop"
            " there: leave it out"
        )
