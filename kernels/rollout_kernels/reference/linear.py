"""Linear layers."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype. Differentiable."""
    return F.linear(x, weight, bias)


def fits_linear(weight: Tensor) -> bool:
    """Whether `linear` takes a weight [N, K]: any."""
    return True
