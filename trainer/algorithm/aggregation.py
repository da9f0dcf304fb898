"""From the values of a micro-batch's tokens to its share of the step's loss.

values: fp32 [C]. Masked tokens count for nothing, neither in a sum nor in a denominator. What a sum is divided by is
the whole update's, never the micro-batch's, so that neither the loss nor its gradient depends on how it was split.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithm.batch import StepTotals, TrainingBatch

Aggregation = Callable[[Tensor, TrainingBatch, StepTotals], Tensor]
"""(values [C], micro-batch, totals of the update) -> fp32 []"""


def token_mean(values: Tensor, batch: TrainingBatch, totals: StepTotals) -> Tensor:
    """Sum by the number of tokens of all rollouts (DAPO, arXiv 2503.14476)."""
    return torch.where(batch.loss_mask, values, 0.0).sum() / max(totals.num_tokens, 1)


def sequence_mean(values: Tensor, batch: TrainingBatch, totals: StepTotals) -> Tensor:
    """Mean over rollouts of the mean over each one's tokens (GRPO, arXiv 2402.03300)."""
    counts = batch.rollout_sums(batch.loss_mask.float()).clamp(min=1.0)
    sums = batch.rollout_sums(torch.where(batch.loss_mask, values, 0.0))
    return (sums / counts).sum() / max(totals.num_rollouts, 1)


def sequence_sum(values: Tensor, batch: TrainingBatch, totals: StepTotals) -> Tensor:
    """Mean over rollouts of the sum over each one's tokens: of log-probs of whole sequences (arXiv 2402.14740)."""
    return torch.where(batch.loss_mask, values, 0.0).sum() / max(totals.num_rollouts, 1)


def constant_length(values: Tensor, batch: TrainingBatch, totals: StepTotals) -> Tensor:
    """Sum by rollouts times the longest length that there can be, so that no length is favoured (arXiv 2503.20783)."""
    return sequence_sum(values, batch, totals) / totals.max_length


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
}
