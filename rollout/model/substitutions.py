"""Replacements of modules in a view.

They hold the very parameters of what they stand in for, under the same names.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rollout.model.families import FAMILIES
from rollout_kernels.ops import Ops
from rollout_kernels.reference.activations import SiLU
from rollout_kernels.reference.linear import narrow_linear

_NORMS = tuple(family.norm for family in FAMILIES.values())
_MLPS = tuple(family.mlp for family in FAMILIES.values())
_SILUS = (SiLU, nn.SiLU, type(ACT2FN["silu"]))


class FusedLinear(nn.Module):
    """Stands in for a linear layer."""

    def __init__(self, layer: nn.Linear, ops: Ops) -> None:
        super().__init__()
        self.weight, self.bias, self.linear = layer.weight, layer.bias, ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias)


class NarrowLinear(nn.Module):
    """Stands in for a linear layer of few outputs, without a bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return narrow_linear(x, self.weight)


class FusedRMSNorm(nn.Module):
    """Stands in for a norm of Llama's form."""

    def __init__(self, norm: Any, ops: Ops) -> None:
        super().__init__()
        self.weight, self.eps, self.rms_norm = norm.weight, float(norm.variance_epsilon), ops.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """Stands in for down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: Any, ops: Ops) -> None:
        super().__init__()
        self.swiglu = ops.swiglu
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = SiLU()  # what swiglu computes; the start-up probe looks for it

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class HeadTap(nn.Module):
    """Stands in for the output embeddings and lets hidden states through; logits are made of few rows at a time."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self._kept = (head,)  # no submodule: parameters keep their names

    @property
    def head(self) -> Any:
        """What it stands in for."""
        return self._kept[0]

    @property
    def trained(self) -> bool:
        """Whether some parameter of it, an adapter's perhaps, takes gradients."""
        return any(parameter.requires_grad for parameter in self.head.parameters())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V]"""
        out: Tensor = self.head(hidden)
        return out


def tap_head(view: PreTrainedModel) -> None:
    """What a forward returns as its logits are then the hidden states behind the last norm."""
    view.set_output_embeddings(HeadTap(view.get_output_embeddings()))


def substitute_silu(view: PreTrainedModel, ops: Ops) -> None:
    """Replace SiLU, whose bits depend on the tensor's size, by a form whose do not."""
    for module in view.modules():
        for name, child in module.named_children():
            if isinstance(child, type(ACT2FN["silu"]) | nn.SiLU):
                setattr(module, name, SiLU())


def fuse(view: PreTrainedModel, ops: Ops) -> None:
    """Replace linear layers, RMS norms and gated MLPs whose operation is the backend's own.

    What the reference would run is run as it is.
    """
    dtype = next(view.parameters()).dtype
    for module in reversed(list(view.modules())):  # a module after what it is made of
        for name, child in list(module.named_children()):
            # a forward of the instance's own, or mixed dtypes, are for the module as it is
            if "forward" in vars(child) or any(p.dtype != dtype for p in child.parameters(recurse=False)):
                continue
            kind = type(child)
            if kind is nn.Linear and "linear" in ops.own and ops.fits_linear(child.weight):
                setattr(module, name, FusedLinear(child, ops))
            elif kind in _NORMS and "rms_norm" in ops.own:
                setattr(module, name, FusedRMSNorm(child, ops))
            elif kind in _MLPS and "swiglu" in ops.own and isinstance(child.act_fn, _SILUS):
                setattr(module, name, FusedMLP(child, ops))


def substitute_narrow(view: PreTrainedModel, ops: Ops) -> None:
    """Replace the first matrices of LoRA adapters where torch would run them: their bits depend on the row count."""
    for module in view.modules():
        first = getattr(module, "lora_A", None)
        for name, child in first.items() if isinstance(first, nn.ModuleDict) else ():
            if type(child) is nn.Linear and child.bias is None:
                first[name] = NarrowLinear(child)
