"""From a caller's prompts to requests: everything that can be known to be wrong is found here, before work starts."""

import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rollout.config import SamplingParams, is_kind
from rollout.engine.handles import BadPrompt
from rollout.engine.prompts import Prompt, encode_prompt
from rollout.errors import RolloutError
from rollout.forward.sampler import TRAIN
from rollout.schedule.sequence import Request

OnError = Literal["raise", "return"]


@dataclass(frozen=True)
class RequestOptions:
    """What a call says of all its prompts; see RolloutEngine.generate_rollouts."""

    step: int = 0
    keys: Seq[int] | None = None
    purpose: int = TRAIN
    salt: str | None = None
    on_error: OnError = "raise"
    """"return" is for what is wrong with a prompt; an option that is wrong is refused all the same."""

    def keys_of(self, num_prompts: int) -> list[int]:
        """A key for each prompt. Raises RolloutError if an option is wrong."""
        if self.on_error not in ("raise", "return"):
            raise RolloutError(f"on_error={self.on_error!r}: use raise or return")
        keys = list(range(num_prompts)) if self.keys is None else list(self.keys)
        if len(keys) != num_prompts:
            raise RolloutError(f"{len(keys)} keys for {num_prompts} prompts: give one per prompt")
        for name, value in [("step", self.step), ("purpose", self.purpose), *[("key", key) for key in keys]]:
            if not is_kind(int, value) or not 0 <= value < 2**32:
                raise RolloutError(f"{name}={value!r} must lie in 0 .. 4294967295, as a whole number")
        if self.salt is not None and not isinstance(self.salt, str):
            raise RolloutError(f"salt={self.salt!r}: use a string or None")
        return keys


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

    def shortage(self, requests: Iterable[Request | BadPrompt]) -> str | None:
        """What is wrong if some request cannot reach its max_new_tokens for want of blocks."""
        lengths = [r.num_prompt_tokens + r.sampling.max_new_tokens for r in requests if isinstance(r, Request)]
        longest = max(lengths, default=0)
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


def make_requests(
    prompts: Seq[Prompt],
    n: int,
    sampling: SamplingParams | Seq[SamplingParams] | None,
    options: RequestOptions,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: Limits,
) -> list[Request | BadPrompt]:
    """One request per prompt, in order. Raises RolloutError, naming the place of a prompt that is wrong."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Seq):
        kind = "single string" if isinstance(prompts, str) else type(prompts).__name__
        raise RolloutError(f"prompts is a {kind}: pass a list of prompts")
    if not is_kind(int, n) or n < 1:
        raise RolloutError(f"n={n!r}: ask for at least one completion per prompt, in whole numbers")
    per_prompt = _one_per_prompt(SamplingParams() if sampling is None else sampling, len(prompts))
    keys = options.keys_of(len(prompts))
    _check_stop_tokens(per_prompt, limits.vocab_size)
    drawn = secrets.randbits(32)
    requests: list[Request | BadPrompt] = []
    for i, (prompt, params, key) in enumerate(zip(prompts, per_prompt, keys, strict=True)):
        seed = drawn if params.seed is None else params.seed
        try:
            ids = encode_prompt(prompt, tokenizer, limits.vocab_size)
            limits.check(ids)
        except RolloutError as error:
            if options.on_error == "raise":
                raise RolloutError(f"prompt {i}: {error}") from error
            requests.append(BadPrompt(key, seed, str(error)))
            continue
        max_len = min(len(ids) + params.max_new_tokens, limits.max_len)
        requests.append(Request(ids, n, params, seed, options.step, key, options.purpose, max_len, salt=options.salt))
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
