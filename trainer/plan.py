"""`python -m trainer.plan model=DIR gpu=80GiB`: will it fit? From a model's configuration alone, without weights.

Exit status: 0 it fits, 1 it does not, 2 an option that cannot be used, or not one KV block fits.
"""

import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rollout import RolloutConfig, RolloutError, SamplingParams
from rollout.memory import (
    Adapt,
    Ledger,
    TrainingPeak,
    device_bytes,
    parse_bytes,
    pool_size,
    rollout_peak,
    score_and_backward,
    show_bytes,
    skeleton,
    slot_bytes,
    training_peak,
    widest_pack,
)
from rollout.model import (
    LayerGroup,
    Numerics,
    default_dtype,
    layer_groups,
    longest_sequence,
    model_shapes,
    read_config,
    resolve_device,
)
from trainer.config import AdapterConfig, ConfigError, LoraConfig
from trainer.weights.adapter import check_peft, inject
from trainer.weights.memory import build_ledger
from trainer.weights.optimizer import MasterAdamW, OptimizerBytes

USAGE = "python -m trainer.plan model=DIR [gpu=80GiB] [fraction=0.35] [context=8192] [prompt=2048] [n=16] ..."


@dataclass(frozen=True)
class PlanOptions:
    """What can be said on the command line, as name=value."""

    model: str
    """Directory with a config.json, or such a file."""
    gpu: str = ""
    """Memory of the device, as 80GiB; left out: this machine's."""
    fraction: float = RolloutConfig.memory_fraction
    """Share of it for the KV pool."""
    context: int = 0
    """Longest sequence in tokens, prompt and completion; left out: the model's own limit."""
    prompt: int = 0
    """Tokens of it that are the prompt; left out: a quarter."""
    n: int = 16
    """Rollouts per prompt."""
    dtype: str = "auto"
    block_size: int = RolloutConfig.block_size
    max_num_seqs: int = RolloutConfig.max_num_seqs
    max_num_batched_tokens: int = RolloutConfig.max_num_batched_tokens
    micro_batch_tokens: int = 4096
    """Packed tokens per forward and backward in training; a longer rollout goes alone."""
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    """Rank of LoRA adapters in every linear layer but the head; left out: all weights are trained."""
    training: bool = True
    """Whether there is an optimizer beside the generator."""


def parse_options(arguments: list[str]) -> PlanOptions:
    """Options from name=value arguments. Raises RolloutError naming what is wrong."""
    kinds = {field.name: field.type for field in fields(PlanOptions)}
    values: dict[str, object] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in kinds or not equals:
            raise RolloutError(f"{argument!r} is not an option; say name=value with one of: {', '.join(kinds)}")
        values[name] = _convert(name, value, kinds[name])
    if "model" not in values:
        raise RolloutError(f"model= is missing; usage: {USAGE}")
    return PlanOptions(**values)  # type: ignore[arg-type]


def _convert(name: str, value: str, kind: object) -> object:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise RolloutError(f"{name}={value}: say true or false")
        return value.lower() == "true"
    if kind not in (int, float):
        return value
    try:
        number = int(value) if kind is int else float(value)
    except ValueError:
        raise RolloutError(f"{name}={value}: say a {'whole ' if kind is int else ''}number") from None
    if number <= 0:
        raise RolloutError(f"{name}={value}: must be more than 0")
    return number


def find_config(path: str) -> PretrainedConfig:
    """A model's configuration from its directory, or from a JSON file."""
    found = Path(path).expanduser()
    if not (found / "config.json").is_file() and not found.is_file():
        raise RolloutError(f"model={path}: neither a directory with a config.json nor such a file")
    try:
        config = read_config(found)
        model_shapes(config, found)
    except RolloutError as error:
        raise RolloutError(f"model={path}: not a model's configuration: {error}") from error
    return config


@dataclass(frozen=True)
class Plan:
    """What a configuration comes to."""

    ledger: Ledger
    kv_bytes_per_token: int
    num_blocks: int
    rollouts_apart: int
    """Rollouts of full length that fit if each holds its own prompt."""
    rollouts_sharing: int
    """The same if the n rollouts of a prompt share its full blocks."""


def rollouts_that_fit(num_blocks: int, block_size: int, prompt: int, context: int, n: int) -> int:
    """Sequences of `context` tokens, n to a prompt, that num_blocks hold when each group has its prompt's blocks once.

    The blocks that a prompt fills are shared; the one it fills partly and all that follow are each rollout's own.
    """
    shared = prompt // block_size
    own = -(-context // block_size) - shared
    groups, rest = divmod(num_blocks, shared + n * own)
    return groups * n + max(0, rest - shared) // own


def make_plan(options: PlanOptions) -> Plan:
    """Work out a plan. Raises RolloutError if an option cannot be used, or if not one KV block fits."""
    model_config = find_config(options.model)
    device = torch.device("cuda") if options.gpu else resolve_device("auto")
    total = parse_bytes(options.gpu) if options.gpu else device_bytes(device)
    config = _engine_config(options)
    context = longest_sequence(config, model_config)
    prompt = options.prompt or max(1, context // 4)
    if prompt >= context:
        raise RolloutError(f"prompt={prompt} leaves no room for a completion within context={context}")
    wanted = default_dtype(model_config.dtype, device)
    dtype = wanted if config.dtype == "auto" else getattr(torch, config.dtype)
    numerics, groups = Numerics.of(device, dtype), layer_groups(model_config, dtype)
    (layer,) = groups
    num_blocks = pool_size(config, groups, context, total)
    adapt = _adapt(options)
    parameters = list(skeleton(model_config, dtype, adapt).parameters())
    ledger = build_ledger(
        weights=sum(p.nbytes for p in parameters),
        pool=(num_blocks + 1) * config.block_size * layer.bytes_per_token(),
        slots=config.max_num_seqs * slot_bytes(groups, min(context, num_blocks * config.block_size)),
        rollout_activations=rollout_peak(
            model_config,
            dtype,
            config,
            num_blocks,
            prompt,
            context - prompt,
            options.n,
            SamplingParams(),
            numerics,
            adapt,
        ),
        training=_training_peak(options, model_config, dtype, numerics, layer, prompt, context - prompt),
        optimizer=MasterAdamW.bytes_for(parameters) if options.training else OptimizerBytes(),
        capacity=total,
    )
    return Plan(
        ledger=ledger,
        kv_bytes_per_token=layer.bytes_per_token(),
        num_blocks=num_blocks,
        rollouts_apart=num_blocks // -(-context // config.block_size),
        rollouts_sharing=rollouts_that_fit(num_blocks, config.block_size, prompt, context, options.n),
    )


def _engine_config(options: PlanOptions) -> RolloutConfig:
    return RolloutConfig(
        block_size=options.block_size,
        memory_fraction=options.fraction,
        max_model_len=options.context or None,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
    )


def _adapt(options: PlanOptions) -> Adapt:
    """Injects the adapter that the options ask for."""
    chosen = LoraConfig(rank=options.lora_rank) if options.lora_rank else AdapterConfig()
    return partial(inject, config=chosen)


def _training_peak(
    options: PlanOptions,
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    numerics: Numerics,
    layer: LayerGroup,
    prompt: int,
    new: int,
) -> TrainingPeak:
    """Forward and backward over packs of full-length rollouts."""
    if not options.training:
        return TrainingPeak()
    return training_peak(
        model_config,
        dtype,
        widest_pack(
            layer, prompt, new, options.n, 1 << 30, options.micro_batch_tokens, row_multiple=numerics.row_multiple
        ),
        score_and_backward,
        numerics,
        gradient_checkpointing=options.gradient_checkpointing,
        accumulated=True,
        adapt=_adapt(options),
    )


def main(arguments: list[str]) -> int:
    try:
        options = parse_options(arguments)
        if options.lora_rank:
            check_peft()
        plan = make_plan(options)
    except (RolloutError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    block = show_bytes(options.block_size * plan.kv_bytes_per_token)
    print(plan.ledger.render())
    print(f"KV per token         {plan.kv_bytes_per_token:,} bytes")
    print(
        f"KV blocks            {plan.num_blocks:,} of {options.block_size} tokens ({block} each), and one for padding"
    )
    print(f"the pool holds       {plan.rollouts_apart:,} rollouts of full length without sharing")
    print(f"                     {plan.rollouts_sharing:,} with {options.n} to a prompt, which share its blocks")
    print(f"run at once          {options.max_num_seqs:,} at most (max_num_seqs)")
    return 1 if plan.ledger.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
