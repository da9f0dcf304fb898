"""Estimates of the KL divergence from a reference, per token, of x = log(pi / pi_ref): fp32 [C].

Under the policy's own tokens k1 and k3 have the divergence as their mean. As a loss only k2's gradient is that of the
divergence; k1's mean gradient is 0, and k3's is that of the divergence the other way round (arXiv 2506.09477).
"""

from collections.abc import Callable

from torch import Tensor

from trainer.algorithm.ratios import bounded_exp


def k1(log_ratios: Tensor) -> Tensor:
    """x"""
    return log_ratios


def k2(log_ratios: Tensor) -> Tensor:
    """x^2 / 2"""
    return 0.5 * log_ratios.square()


def k3(log_ratios: Tensor) -> Tensor:
    """exp(-x) - 1 + x (GRPO, arXiv 2402.03300, eq. 4), never negative."""
    return bounded_exp(-log_ratios) - 1.0 + log_ratios


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
