"""Modules of a view that compiled kernels run: linear layers, RMS norms and gated MLPs.

They hold the very parameters of what they stand in for, under the same names.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rollout.model.families import FAMILIES
from rollout_kernels.activations import SiLU
from rollout_kernels.fused import fits_linear, linear, rms_norm, swiglu
from rollout_kernels.native import supports

_NORMS = tuple(family.norm for family in FAMILIES.values())
_MLPS = tuple(family.mlp for family in FAMILIES.values())
_SILUS = (SiLU, nn.SiLU, type(ACT2FN["silu"]))


class FusedLinear(nn.Module):
    """Stands in for a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FusedRMSNorm(nn.Module):
    """Stands in for a norm of Llama's form."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """Stands in for down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = SiLU()  # what swiglu computes; the start-up probe looks for it

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


def fuse(view: PreTrainedModel) -> None:
    """Replace what compiled kernels can run in one pass, where they support the view's device and dtype."""
    parameter = next(view.parameters())
    if not supports(parameter.device, parameter.dtype):
        return
    for module in reversed(list(view.modules())):  # a module after what it is made of
        for name, child in list(module.named_children()):
            # a forward of the instance's own, or mixed dtypes, are for the module as it is
            if "forward" in vars(child) or any(p.dtype != parameter.dtype for p in child.parameters(recurse=False)):
                continue
            kind = type(child)
            if kind is nn.Linear and fits_linear(child.weight):
                setattr(module, name, FusedLinear(child))
            elif kind in _NORMS:
                setattr(module, name, FusedRMSNorm(child))
            elif kind in _MLPS and isinstance(child.act_fn, _SILUS):
                setattr(module, name, FusedMLP(child))
