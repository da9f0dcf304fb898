"""Losses: a ratio (ratios.py), an objective that clips it, a divergence, and an aggregation of the tokens' values.

The parts are functions of tensors, and a loss is a function that puts some together: `policy_loss`, or one of your own.
Masked tokens count for nothing, neither in a sum nor in a denominator. C completion tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.batch import StepTotals, TrainingBatch
from trainer.algorithm.ratios import k3, log_ratio, token_ratio


@dataclass(frozen=True)
class PolicyLoss:
    """loss: fp32 [], the micro-batch's share of the step's loss. Further fields [C]: for metrics, detached."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor | None


LossFunction = Callable[[Tensor, TrainingBatch, StepTotals], PolicyLoss]
"""(log-probs under the policy, fp32 [C]; the micro-batch; the step's totals); gradients flow into log-probs only.

The micro-batches' losses are added up, so what a sum is divided by has to be the step's, never the micro-batch's.
"""


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), to be maximised (arXiv 1707.06347; low != high: 2503.14476). fp32 [C]."""
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def clipped_tokens(ratio: Tensor, batch: TrainingBatch, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Which tokens the objective clips below and above, where they teach nothing. bool [C], detached."""
    ratio, advantages, mask = ratio.detach(), batch.advantages, batch.loss_mask
    return (ratio < 1.0 - low) & (advantages < 0) & mask, (ratio > 1.0 + high) & (advantages > 0) & mask


def token_mean(values: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Sum over the mask by the number of tokens that count in the whole step (arXiv 2503.14476). fp32 [].

    One denominator, so that neither the loss nor its gradient depends on how the step was split.
    """
    return torch.where(mask, values, 0.0).sum() / max(totals.num_tokens, 1)


def policy_loss(
    logprobs: Tensor,
    batch: TrainingBatch,
    totals: StepTotals,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """The token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3.

    GRPO's objective (arXiv 2402.03300) with each token's own ratio to batch.old_logprobs, and a KL term where the batch
    has ref_logprobs. A LossFunction once the options are given.
    """
    mask = batch.loss_mask
    ratio = token_ratio(log_ratio(logprobs, batch.old_logprobs, mask))
    per_token = -clipped_objective(ratio, batch.advantages, clip_low, clip_high)
    kl = None
    if batch.ref_logprobs is not None:
        kl = k3(log_ratio(logprobs, batch.ref_logprobs, mask))
        per_token = per_token + kl_coef * kl
        kl = kl.detach()
    low, high = clipped_tokens(ratio, batch, clip_low, clip_high)
    return PolicyLoss(token_mean(per_token, mask, totals), ratio.detach(), low, high, kl)
