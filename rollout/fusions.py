"""Modules of a view that run as one operation where compiled kernels are: RMS norms and gated MLPs.

They hold the very parameters of what they stand in for, under the same names.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rollout_kernels.activations import SiLU
from rollout_kernels.fused import rms_norm, swiglu
from rollout_kernels.native import supports

_NORMS = {"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
_MLPS = {"LlamaMLP", "Qwen2MLP", "Qwen3MLP"}
_SILUS = (SiLU, nn.SiLU, type(ACT2FN["silu"]))


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
        self.act_fn = SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


def fuse(view: PreTrainedModel) -> None:
    """Replace what compiled kernels can run in one pass, where they support the view's device and dtype."""
    parameter = next(view.parameters())
    if not supports(parameter.device, parameter.dtype):
        return
    for module in list(view.modules()):
        for name, child in list(module.named_children()):
            kind = type(child).__name__
            if kind in _NORMS:
                setattr(module, name, FusedRMSNorm(child))
            elif kind in _MLPS and isinstance(child.act_fn, _SILUS):
                setattr(module, name, FusedMLP(child))
