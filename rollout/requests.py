"""From a caller's prompts to requests: everything that can be known to be wrong is found here, before work starts."""

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, TypedDict

from transformers import PreTrainedTokenizerBase

from rollout.config import SamplingParams, is_kind
from rollout.errors import RolloutError
from rollout.prompts import Prompt, encode_prompt
from rollout.sampler import TRAIN
from rollout.sequence import Request
from rollout.types import Rollout, RolloutGroup

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

    @property
    def max_len(self) -> int:
        """Longest sequence in tokens, by the model and by the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

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
    """A submitted prompt: what has become of it so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rollouts: list[Rollout] = []
        """Completions that have ended, in the order in which they did."""
        self.done = False
        """Whether nothing more will come."""

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    def group(self) -> RolloutGroup:
        """The completions that have ended so far, in index order."""
        request = self.request
        ordered = sorted(self.rollouts, key=lambda rollout: rollout.index)
        return RolloutGroup(request.prompt_ids, ordered, request.key, request.seed)


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
    """One request per prompt, in order. Raises RolloutError naming the prompt's place, unless on_error="return"."""
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
    for name, value in [("step", step), *[("key", key) for key in key_list]]:
        if not is_kind(int, value) or not 0 <= value < 2**32:
            raise RolloutError(f"{name}={value!r} must lie in 0 .. 4294967295, as a whole number")
    drawn = secrets.randbits(32)
    requests: list[Request | BadPrompt] = []
    for i, (prompt, params, key) in enumerate(zip(prompts, per_prompt, key_list, strict=True)):
        seed = drawn if params.seed is None else params.seed
        try:
            ids = encode_prompt(prompt, tokenizer, limits.vocab_size)
            limits.check(ids)
            outside = [i for i in params.stop_token_ids if i >= limits.vocab_size]
            if outside:
                raise RolloutError(f"stop token {outside[0]} is outside the model's vocabulary of {limits.vocab_size}")
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
    if len(sampling) != count:
        raise RolloutError(
            f"{len(sampling)} sampling parameters for {count} prompts: give one for all or one per prompt"
        )
    return list(sampling)
