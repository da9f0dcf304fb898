"""The run's memory: how large the KV pool has to be, what everything comes to, and whether that was right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from rollout import RolloutEngine
from rollout.memory import (
    Adapt,
    Ledger,
    LedgerRow,
    TrainingPeak,
    device_bytes,
    in_process,
    peak_bytes,
    reset_peak,
    rollout_peak,
    score_and_backward,
    show_bytes,
    slot_bytes,
    training_peak,
    trim,
    used_bytes,
    widest_pack,
)
from rollout.model import longest_sequence
from trainer.config import ConfigError, TrainerConfig, sampling_params
from trainer.weights.adapter import inject
from trainer.weights.optimizer import MasterAdamW, OptimizerBytes

_FRAGMENTATION = 0.3
"""Of the C library's heap, as a share of a step's transient tensors: 15 to 40 % were seen after steps."""

_NO_TRAINING, _NO_OPTIMIZER = TrainingPeak(), OptimizerBytes()


@dataclass(frozen=True)
class StepShape:
    """The largest step of a run: how many sequences, and how long."""

    prompt: int
    """Tokens of the longest prompt."""
    shortest_prompt: int
    new: int
    """Tokens of the longest completion."""
    num_sequences: int
    """Rollouts of a step, or greedy completions of an evaluation, if those are more."""


def step_shape(config: TrainerConfig, model: PreTrainedModel, lengths: Sequence[int], num_eval_rows: int) -> StepShape:
    """The largest step that the configuration can come to; lengths are those of all prompts, in tokens."""
    limit = longest_sequence(config.rollout, model.config)
    prompt, shortest = (min(length, limit - 1) for length in (max(lengths), min(lengths)))
    new = max(config.sampling.max_new_tokens, config.eval.max_new_tokens or 0)
    num_rollouts = config.algorithm.prompts_per_step * config.algorithm.group_size
    evaluated = num_eval_rows * config.eval.samples if config.eval.every else 0
    return StepShape(prompt, shortest, min(new, limit - shortest), max(num_rollouts, evaluated))


def build_ledger(
    *,
    weights: int,
    pool: int,
    slots: int,
    rollout_activations: int,
    capacity: int,
    training: TrainingPeak = _NO_TRAINING,
    optimizer: OptimizerBytes = _NO_OPTIMIZER,
    reference: int = 0,
    process: int = 0,
    fragmentation: float = 0.0,
) -> Ledger:
    """The ledger of a colocated trainer and generator, in bytes; without an optimizer, of a generator alone.

    reference: a frozen copy of the weights. process: on a CPU, what interpreter and libraries hold, which shares the
    machine's memory with the tensors. fragmentation: the heap's, as a share of what is transient.
    """
    rows = [
        LedgerRow.resident("weights", weights),
        LedgerRow.resident("reference weights", reference),
        LedgerRow.resident("fp32 masters", optimizer.masters),
        LedgerRow.resident("optimizer moments", optimizer.moments),
        LedgerRow("fp32 gradients", 0, training.gradients),
        LedgerRow("activations and logits", rollout_activations, training.activations),
        LedgerRow.resident("KV pool", pool),
        LedgerRow.resident("state slots", slots),
        LedgerRow.resident("process", process),
    ]
    if fragmentation:
        transient = training.gradients + training.activations
        lost = int(fragmentation * rollout_activations), int(fragmentation * transient)
        rows.append(LedgerRow("heap fragmentation", *lost))
    return Ledger(rows, capacity)


def plan_memory(
    config: TrainerConfig,
    engine: RolloutEngine,
    optimizer: MasterAdamW,
    reference: PreTrainedModel | None,
    shape: StepShape,
) -> Ledger:
    """The run's ledger, before its first step. Raises ConfigError if it does not fit, with the missing bytes."""
    weights = sum(p.nbytes for p in engine.module.parameters())
    kept = optimizer.bytes_for(engine.module.parameters())
    adapt = partial(inject, config=config.adapter)
    trim()  # what loading and a warm start have freed
    copies = weights if reference is not None else 0
    pool = engine.stats().pool_bytes
    max_len = min(engine.max_model_len, engine.pool.num_blocks * engine.config.block_size)
    slots = engine.config.max_num_seqs * slot_bytes(engine.layer_groups, max_len)
    held = weights + copies + pool + slots + kept.masters + kept.moments
    ledger = build_ledger(
        weights=weights,
        reference=copies,
        optimizer=kept,
        pool=pool,
        slots=slots,
        rollout_activations=rollout_peak(
            engine.module.config,
            engine.dtype,
            replace(engine.config, max_num_seqs=min(engine.config.max_num_seqs, shape.num_sequences)),
            engine.pool.num_blocks,
            shape.prompt,
            shape.new,
            config.algorithm.group_size,
            sampling_params(config),
            engine.numerics,
            adapt,
        ),
        training=_training_peak(config, engine, shape, adapt),
        capacity=device_bytes(engine.device),
        process=max(0, used_bytes(engine.device) - held) if in_process(engine.device) else 0,
        fragmentation=_FRAGMENTATION if in_process(engine.device) else 0.0,
    )
    if ledger.missing:
        raise ConfigError(
            f"{ledger.render()}\nlower algorithm.micro_batch_tokens, rollout.max_num_seqs, rollout.memory_fraction"
            " (or num_blocks) or sampling.max_new_tokens, or set model.gradient_checkpointing=true"
        )
    return ledger


def _training_peak(config: TrainerConfig, engine: RolloutEngine, shape: StepShape, adapt: Adapt) -> TrainingPeak:
    algorithm = config.algorithm

    def step_tokens(prompt: int) -> int:
        return algorithm.prompts_per_step * (prompt + algorithm.group_size * shape.new)

    # a full micro-batch has most logits behind short prompts; one that holds the whole step is longest behind long ones
    several = step_tokens(shape.shortest_prompt) > algorithm.micro_batch_tokens
    pack = widest_pack(
        engine.layer_group,
        shape.shortest_prompt if several else shape.prompt,
        shape.new,
        algorithm.group_size,
        algorithm.prompts_per_step,
        algorithm.micro_batch_tokens,
        row_multiple=engine.numerics.row_multiple,
    )

    return training_peak(
        engine.module.config,
        engine.dtype,
        pack,
        partial(score_and_backward, sampling=sampling_params(config), reference=bool(algorithm.kl_coef)),
        engine.numerics,
        gradient_checkpointing=config.model.gradient_checkpointing,
        accumulated=step_tokens(shape.prompt) > algorithm.micro_batch_tokens,
        adapt=adapt,
    )


class MemoryWatch:
    """Compares the ledger with what the device says."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.ledger = ledger
        self.device = device
        self._since = "so far" if reset_peak(device) else "since the process began"

    def report(self) -> str:
        """Predicted and measured peak since this watch began."""
        measured = peak_bytes(self.device)
        difference = 100.0 * (self.ledger.peak - measured) / measured
        return (
            f"memory: predicted peak {show_bytes(self.ledger.peak)}, measured {show_bytes(measured)} {self._since}"
            f" ({difference:+.0f} %)"
        )
