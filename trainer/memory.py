"""The run's memory: how large the KV pool has to be, what everything comes to, and whether that was right."""

import logging
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedModel

from rollout import Rollout, RolloutEngine, RolloutGroup
from rollout.estimate import META, rollout_peak, training_peak
from rollout.ledger import Ledger, TrainingBytes, build_ledger, show_bytes
from rollout.loading import longest_sequence
from rollout.memory import device_bytes, peak_bytes, reset_peak, trim, used_bytes
from rollout.packing import Pack
from rollout.scoring import score_tokens
from trainer.batch import micro_batches
from trainer.config import ConfigError, TrainerConfig, sampling_params
from trainer.optimizer import MasterAdamW

logger = logging.getLogger(__name__)

_HEAP_HOLES = 0.3
"""What the C library's heap keeps beside a step's tensors, as a share of them: 15 to 40 % were seen after steps."""


@dataclass(frozen=True)
class StepShape:
    """The largest step of a run: how many sequences, and how long."""

    prompt: int
    """Tokens of the longest prompt."""
    new: int
    """Tokens of the longest completion."""
    num_sequences: int
    """Rollouts of a step, or greedy completions of an evaluation, if those are more."""


def step_shape(config: TrainerConfig, model: PreTrainedModel, longest_prompt: int, num_eval_rows: int) -> StepShape:
    """The largest step that the configuration can come to; longest_prompt in tokens."""
    limit = longest_sequence(config.rollout, model.config)
    prompt = min(longest_prompt, limit - 1)
    new = max(config.sampling.max_new_tokens, config.eval.max_new_tokens or 0)
    num_rollouts = config.algorithm.prompts_per_step * config.algorithm.group_size
    return StepShape(prompt, min(new, limit - prompt), max(num_rollouts, num_eval_rows))


def plan_memory(
    config: TrainerConfig,
    engine: RolloutEngine,
    optimizer: MasterAdamW,
    reference: PreTrainedModel | None,
    shape: StepShape,
) -> Ledger:
    """The run's ledger, before its first step. Raises ConfigError if it does not fit, with the missing bytes."""
    weights = sum(p.nbytes for p in engine.module.parameters())
    trim()  # what loading and a warm start have freed
    copies = weights if reference is not None else 0
    packed = engine.packed.num_bytes if engine.packed is not None else 0
    held = weights + copies + packed + optimizer.held_bytes
    ledger = build_ledger(
        weights=weights,
        pool=engine.stats().pool_bytes,
        rollout_activations=rollout_peak(
            engine.module.config,
            engine.dtype,
            engine.config,
            engine.pool.num_blocks,
            shape.prompt,
            shape.new,
            config.algorithm.group_size,
            exact=engine.exact,
        ),
        training=_training_bytes(config, engine, optimizer, shape, copies),
        capacity=device_bytes(engine.device),
        packed=packed,
        process=max(0, used_bytes(engine.device) - held) if engine.device.type == "cpu" else 0,
        heap_holes=_HEAP_HOLES if engine.device.type == "cpu" else 0.0,
    )
    if ledger.missing:
        raise ConfigError(
            f"{ledger.render()}\nlower algorithm.micro_batch_tokens, rollout.memory_fraction or"
            " sampling.max_new_tokens, or set model.gradient_checkpointing=true"
        )
    return ledger


def _training_bytes(
    config: TrainerConfig, engine: RolloutEngine, optimizer: MasterAdamW, shape: StepShape, reference: int
) -> TrainingBytes:
    algorithm, sampling = config.algorithm, sampling_params(config)
    completion = Rollout(0, [0] * shape.new, [0.0] * shape.new, [], None, "length", 0)
    group = RolloutGroup([0] * shape.prompt, [completion] * algorithm.group_size, 0, 0)
    # two micro-batches tell as much as all of them
    per_group = shape.prompt + algorithm.group_size * shape.new
    count = min(algorithm.prompts_per_step, 2 + 2 * algorithm.micro_batch_tokens // per_group)
    batches = micro_batches(
        [group] * count,
        torch.zeros(count, algorithm.group_size),
        engine.layer_group,
        META,
        max_tokens=algorithm.micro_batch_tokens,
        exact=engine.exact,
    )
    # no other is larger; behind a second one the gradients of the first lie already
    packs = [batch.pack for batch in islice(batches, 2)]

    def backward(view: PreTrainedModel, pack: Pack) -> None:
        scores = score_tokens(view, pack, sampling)
        if reference:
            with torch.no_grad():
                score_tokens(view, pack, sampling)
        scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]

    peak = training_peak(
        engine.module.config,
        engine.dtype,
        packs[0],
        backward,
        exact=engine.exact,
        gradient_checkpointing=config.model.gradient_checkpointing,
        accumulated=len(packs) > 1,
    )
    return TrainingBytes(optimizer.master_bytes, optimizer.moment_bytes, peak.gradients, peak.activations, reference)


class MemoryWatch:
    """Compares the ledger with what the device says."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.ledger = ledger
        self.device = device
        reset_peak(device)

    def report(self) -> str:
        """Predicted and measured peak since this watch began."""
        measured = peak_bytes(self.device)
        difference = 100.0 * (self.ledger.peak - measured) / measured
        return (
            f"memory: predicted peak {show_bytes(self.ledger.peak)}, measured {show_bytes(measured)} so far"
            f" ({difference:+.0f} %)"
        )
