"""Gated activations."""

from torch import Tensor

from rollout_kernels.reference.activations import silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for tensors of one shape and dtype, to which silu(gate) is rounded first. Differentiable."""
    return silu(gate) * up
