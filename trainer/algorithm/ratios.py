"""How far the policy is from another, per token: ratios of probabilities, and the divergence that penalises them.

C completion tokens of a micro-batch.
"""

import torch
from torch import Tensor


def log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log(pi / other) per token, fp32 [C]; 0 where mask (bool [C]) is False.

    Masked before anything is exponentiated: inf * 0 would be nan, in the loss or in its gradient.
    """
    return torch.where(mask, logprobs - others, 0.0)


def token_ratio(log_ratios: Tensor) -> Tensor:
    """r = pi / pi_old, each token's own (arXiv 1707.06347). fp32 [C]."""
    return log_ratios.exp()


def k3(log_ratios: Tensor) -> Tensor:
    """exp(-x) - 1 + x for x = log(pi / pi_ref) (arXiv 2402.03300). fp32 [C], never negative.

    Its mean over the policy's tokens is the KL divergence from the reference.
    """
    return torch.exp(-log_ratios) - 1.0 + log_ratios
