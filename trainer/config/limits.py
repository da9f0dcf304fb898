"""What configuration, machine and data say before anything is loaded: an option that fits no row is refused by key."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from rollout import RolloutError
from rollout.memory import device_bytes, pool_size
from rollout.model import LayerGroup, default_dtype, layer_groups, longest_sequence, resolve_device
from trainer.config import ConfigError, TrainerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Demand:
    """What one kind of rows asks for."""

    rows: str
    """What they are called in messages."""
    lengths: Sequence[int]
    """Tokens of each prompt."""
    key: str
    """Where `new` comes from."""
    new: int
    """Longest completion, in tokens."""


def check_device(config: TrainerConfig) -> torch.device:
    """The device that the configuration names. Raises ConfigError if the machine has none such."""
    try:
        return resolve_device(config.rollout.device)
    except RolloutError as error:
        raise ConfigError(f"rollout.{error}") from error


def check_limits(
    config: TrainerConfig, model: PretrainedConfig, device: torch.device, train: Sequence[int], held_out: Sequence[int]
) -> None:
    """Refuse options that the model's vocabulary and length, the pool or the rows cannot meet.

    train, held_out: tokens of each row's prompt. Raises ConfigError naming the key if no row fits, or if the pool
    would cut completions short; if only some rows are too long, says how many.
    """
    _check_vocabulary(config, model.vocab_size)
    try:
        limit = longest_sequence(config.rollout, model)
    except RolloutError as error:
        raise ConfigError(f"rollout.{error}") from error
    demands = [_Demand("row", train, "sampling.max_new_tokens", config.sampling.max_new_tokens)]
    if held_out and config.eval.every:
        own = config.eval.max_new_tokens
        key = "sampling.max_new_tokens" if own is None else "eval.max_new_tokens"
        demands.append(_Demand("held-out row", held_out, key, own or config.sampling.max_new_tokens))
    for demand in demands:
        _check_length(demand, limit)
    dtype = getattr(torch, config.rollout.dtype, None) or default_dtype(model.dtype, device)
    for demand in demands:
        _check_pool(config, layer_groups(model, dtype), device, demand, limit)


def _check_vocabulary(config: TrainerConfig, size: int) -> None:
    outside = [i for i in config.sampling.stop_token_ids if i >= size]
    if outside:
        raise ConfigError(
            f"sampling.stop_token_ids: {outside[0]} is outside the model's vocabulary of {size} tokens, 0 .. {size - 1}"
        )
    if config.sampling.top_k > size:
        raise ConfigError(
            f"sampling.top_k={config.sampling.top_k}: the model's vocabulary has {size} tokens; 0 keeps all"
        )


def _check_length(demand: _Demand, limit: int) -> None:
    shortest, total = min(demand.lengths), len(demand.lengths)
    if shortest >= limit:
        raise ConfigError(
            f"rollout.max_model_len={limit}: no {demand.rows} of the task fits; the shortest prompt has {shortest}"
            " tokens"
        )
    if shortest + demand.new > limit:
        raise ConfigError(
            f"{demand.key}={demand.new}: no {demand.rows} leaves room for it within rollout.max_model_len={limit}; the"
            f" shortest prompt has {shortest} tokens, so that at most {limit - shortest} are left"
        )
    too_long = sum(length >= limit for length in demand.lengths)
    if too_long:
        logger.warning(
            "%d of %d %ss do not fit rollout.max_model_len=%d and will be skipped", too_long, total, demand.rows, limit
        )
    cut = sum(length + demand.new > limit for length in demand.lengths) - too_long
    if cut:
        logger.warning(
            "%d of %d %ss leave less than %s=%d within rollout.max_model_len=%d: their completions end sooner",
            cut, total, demand.rows, demand.key, demand.new, limit,
        )  # fmt: skip


def _check_pool(
    config: TrainerConfig, groups: Sequence[LayerGroup], device: torch.device, demand: _Demand, limit: int
) -> None:
    """A sequence that outgrows the pool would end there, though the pool's size is said to change nothing."""
    size = config.rollout.block_size
    prompt = max(length for length in demand.lengths if length < limit)
    needed = -(-min(prompt + demand.new, limit) // size)
    try:
        alone = replace(config.rollout, max_num_seqs=1)
        blocks = pool_size(alone, groups, min(prompt + demand.new, limit), device_bytes(device))
    except RolloutError as error:
        raise ConfigError(f"rollout.{error}") from error
    if blocks < needed:
        key = f"num_blocks={blocks}"
        if config.rollout.num_blocks is None:
            key = f"memory_fraction={config.rollout.memory_fraction}"
        raise ConfigError(
            f"rollout.{key}: a {demand.rows} of {prompt} tokens with {demand.key}={demand.new} needs {needed} blocks of"
            f" rollout.block_size={size}, and the pool has {blocks}"
        )
