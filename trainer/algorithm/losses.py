"""A loss: a ratio to the old policy, an objective of it, weights for what others drew, a divergence, an aggregation.

The parts are functions of tensors in the modules beside this one, and a loss is a function that puts some together:
`policy_loss`, or one of your own. C completion tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.forward import TokenScores
from trainer.algorithm.aggregation import Aggregation, token_mean
from trainer.algorithm.batch import StepTotals, TrainingBatch
from trainer.algorithm.divergences import k3
from trainer.algorithm.objectives import ObjectiveFunction
from trainer.algorithm.ratios import RatioFunction, log_ratio, token_ratio


@dataclass(frozen=True)
class PolicyLoss:
    """loss: fp32 [], the micro-batch's share of the update's loss. Further fields [C]: for metrics, detached."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor | None


LossFunction = Callable[[TokenScores, TrainingBatch, StepTotals], PolicyLoss]
"""(log-probs and entropies under the policy, the micro-batch, the update's totals) -> PolicyLoss.

The micro-batches' losses are added up, so what a sum is divided by has to be the update's, never the micro-batch's.
"""


def policy_loss(
    scores: TokenScores,
    batch: TrainingBatch,
    totals: StepTotals,
    *,
    objective: ObjectiveFunction,
    ratio: RatioFunction = token_ratio,
    aggregate: Aggregation = token_mean,
    correct: Callable[[TrainingBatch], Tensor] | None = None,
    divergence: Callable[[Tensor], Tensor] = k3,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """aggregate(-correct * objective(ratio) + kl_coef * divergence - entropy_coef * entropy). A LossFunction, once
    its parts are given.

    The divergence is from the batch's ref_logprobs, where it has some. Where the batch has a teaches mask, the
    objective is that of its tokens only.
    """
    logprobs, mask = scores.logprobs, batch.loss_mask
    ratios = ratio(logprobs, batch)
    chosen = objective(ratios, logprobs, batch)
    values = chosen.values if correct is None else correct(batch) * chosen.values
    if batch.teaches is not None:
        values = torch.where(batch.teaches, values, 0.0)
    per_token, kl = -values, None
    if batch.ref_logprobs is not None:
        kl = divergence(log_ratio(logprobs, batch.ref_logprobs, mask))
        per_token = per_token + kl_coef * kl
        kl = kl.detach()
    if entropy_coef:
        per_token = per_token - entropy_coef * scores.entropy
    clipped_low, clipped_high = chosen.clipped_low & mask, chosen.clipped_high & mask
    return PolicyLoss(aggregate(per_token, batch, totals), ratios.detach(), clipped_low, clipped_high, kl)
