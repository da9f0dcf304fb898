"""How far the policy has moved from the one that drew the tokens.

C completion tokens of a micro-batch, which holds every rollout that it has whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithm.batch import TrainingBatch

RatioFunction = Callable[[Tensor, TrainingBatch], Tensor]
"""(log-probs under the policy, fp32 [C], the micro-batch) -> ratio fp32 [C]; gradients flow through it."""


def log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log(pi / other) per token, fp32 [C]; 0 where mask (bool [C]) is False.

    Masked before anything is exponentiated: inf * 0 would be nan, in the loss or in its gradient.
    """
    return torch.where(mask, logprobs - others, 0.0)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), and exp(80) from x = 80 on: infinity, though clipped, would make 0 * inf of the gradient."""
    return x.clamp(max=80.0).exp()


def token_ratio(logprobs: Tensor, batch: TrainingBatch) -> Tensor:
    """r = pi / pi_old, each token's own (PPO, arXiv 1707.06347)."""
    return bounded_exp(log_ratio(logprobs, batch.old_logprobs, batch.loss_mask))


def sequence_ratio(logprobs: Tensor, batch: TrainingBatch) -> Tensor:
    """s = exp(mean over the rollout's tokens of log r), the same at each of them (GSPO, arXiv 2507.18071, eq. 7)."""
    return bounded_exp(_mean_log_ratio(logprobs, batch))


def sequence_token_ratio(logprobs: Tensor, batch: TrainingBatch) -> Tensor:
    """sg[s] * pi / sg[pi]: the value of the sequence's ratio, each token's own gradient (GSPO-token, eq. 14)."""
    own = log_ratio(logprobs, logprobs.detach(), batch.loss_mask)
    return bounded_exp(_mean_log_ratio(logprobs, batch).detach() + own)


def _mean_log_ratio(logprobs: Tensor, batch: TrainingBatch) -> Tensor:
    values = log_ratio(logprobs, batch.old_logprobs, batch.loss_mask)
    return (batch.rollout_sums(values) / batch.rollout_sums(batch.loss_mask.float()).clamp(min=1.0))[
        batch.rollout_places
    ]


RATIOS: dict[str, RatioFunction] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
