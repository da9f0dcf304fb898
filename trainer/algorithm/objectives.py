"""Objectives: what a token is worth, to be maximised, from its ratio to the old policy and its advantage.

C tokens of a micro-batch. Which of them an objective clips, so that they teach nothing, is told for the metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.batch import TrainingBatch


@dataclass(frozen=True)
class Objective:
    """fp32 [C] to maximise, and bool [C] each: tokens that are clipped below and above, whatever their mask."""

    values: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


ObjectiveFunction = Callable[[Tensor, Tensor, TrainingBatch], Objective]
"""(ratio [C], log-probs [C], micro-batch) -> Objective"""


def clipped(
    ratio: Tensor, logprobs: Tensor, batch: TrainingBatch, *, low: float, high: float, dual: float | None = None
) -> Objective:
    """min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; low != high: DAPO, 2503.14476).

    dual: where A < 0, no less than dual * A (dual clip, arXiv 1912.09729).
    """
    del logprobs
    advantages = batch.advantages
    values = torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    fixed = ratio.detach()
    clipped_high = (fixed > 1.0 + high) & (advantages > 0)
    if dual is not None:
        values = torch.where(advantages < 0, torch.maximum(values, dual * advantages), values)
        clipped_high |= (fixed > dual) & (advantages < 0)
    return Objective(values, (fixed < 1.0 - low) & (advantages < 0), clipped_high)


def truncated_likelihood(ratio: Tensor, logprobs: Tensor, batch: TrainingBatch, *, cap: float) -> Objective:
    """sg[min(r, cap)] A log pi: every token keeps its gradient (CISPO, arXiv 2506.13585, without a lower bound)."""
    fixed = ratio.detach()
    values = torch.where(batch.loss_mask, fixed.clamp(max=cap) * batch.advantages * logprobs, 0.0)
    return Objective(values, torch.zeros_like(batch.loss_mask), fixed > cap)


def soft_gate(
    ratio: Tensor, logprobs: Tensor, batch: TrainingBatch, *, tau_positive: float, tau_negative: float
) -> Objective:
    """4 / tau * sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347): clipping without an edge."""
    del logprobs
    tau = torch.where(batch.advantages > 0, tau_positive, tau_negative)
    values = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * batch.advantages
    none = torch.zeros_like(batch.loss_mask)
    return Objective(values, none, none)


def likelihood(ratio: Tensor, logprobs: Tensor, batch: TrainingBatch) -> Objective:
    """A log pi (REINFORCE, Williams 1992); right only for tokens that the policy itself drew."""
    del ratio
    none = torch.zeros_like(batch.loss_mask)
    return Objective(torch.where(batch.loss_mask, batch.advantages * logprobs, 0.0), none, none)
