"""Weights for tokens that another policy drew than the one the trainer computes: rho = pi_old / mu, fp32 [C].

mu is what the rollout says that it was drawn with. Where generator and trainer agree in every bit rho is exactly 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithm.batch import TrainingBatch
from trainer.algorithm.ratios import log_ratio

Correction = Callable[[TrainingBatch, float, float], Tensor]
"""(micro-batch, low, high) -> weights of the objective, without gradients"""


def token_truncate(batch: TrainingBatch, low: float, high: float) -> Tensor:
    """min(rho, high), each token's own (truncated importance sampling, Yao et al. 2025)."""
    del low
    return _log_rho(batch).exp().clamp(max=high)


def token_mask(batch: TrainingBatch, low: float, high: float) -> Tensor:
    """rho where low <= rho <= high, else 0 (IcePop, arXiv 2510.18855)."""
    rho = _log_rho(batch).exp()
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def sequence_truncate(batch: TrainingBatch, low: float, high: float) -> Tensor:
    """min(rho, high) of the whole sequence: the product of its tokens'."""
    del low
    return _sequence_rho(batch).clamp(max=high)


def sequence_mask(batch: TrainingBatch, low: float, high: float) -> Tensor:
    """The whole sequence's rho where low <= rho <= high; sequences beyond teach nothing."""
    rho = _sequence_rho(batch)
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def _log_rho(batch: TrainingBatch) -> Tensor:
    return log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)


def _sequence_rho(batch: TrainingBatch) -> Tensor:
    return batch.rollout_sums(_log_rho(batch))[batch.rollout_places].exp()


CORRECTIONS: dict[str, Correction] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
}
