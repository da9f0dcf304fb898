"""Losses per token. Masked tokens count for nothing, neither in the sum nor in the denominator.

C completion tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """loss: fp32 [], the micro-batch's share of the step's loss. Further fields [C]: for metrics, detached."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor | None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: int,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """Clipped policy gradient with one denominator for the whole step (arXiv 1707.06347, 2503.14476).

    Per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3, with r = exp(logprobs - old_logprobs)
    and k3 = exp(-x) - 1 + x for x = logprobs - ref_logprobs. Summed over the mask (bool [C]) and divided by num_tokens,
    the number of masked-in tokens of the whole step, so that the gradient does not depend on how the step was split.
    All arguments but num_tokens are fp32 [C]; gradients flow into logprobs only.
    """
    # zero the log-ratio where masked, before the exp: inf * 0 would be nan
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = None
    if ref_logprobs is not None:
        x = torch.where(mask, logprobs - ref_logprobs, 0.0)
        kl = torch.exp(-x) - 1.0 + x
        per_token = per_token + kl_coef * kl
    loss = torch.where(mask, per_token, 0.0).sum() / max(num_tokens, 1)
    return PolicyLoss(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=((ratio < 1.0 - clip_low) & (advantages < 0) & mask).detach(),
        clipped_high=((ratio > 1.0 + clip_high) & (advantages > 0) & mask).detach(),
        kl=None if kl is None else kl.detach(),
    )
