"""A second copy of the weights, in the layout that a CPU's products read fastest: opt-in, and the same bits.

oneDNN rearranges a bf16 weight for its product in every call; at the few rows of a decode step that takes about as long
as the product itself. Here it is done once per policy version, at the price of the copy.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.errors import RolloutError
from rollout_kernels.tiles import ROW_MULTIPLE

_ROWS = 2 * ROW_MULTIPLE
"""Rows of input that the layout is chosen for; any number may come."""


class PackedLinear(nn.Module):
    """Stands in for a linear layer of the rollout view; never differentiated."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = self.pack()

    def pack(self) -> Tensor:
        """The weight as it is now, in the product's layout."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class PackedWeights:
    """The packed layers of one rollout view."""

    def __init__(self, view: PreTrainedModel) -> None:
        """Replace the view's linear layers. Raises RolloutError where products are not oneDNN's in bf16."""
        parameter = next(view.parameters())
        cpu = parameter.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if not cpu or parameter.dtype != torch.bfloat16:
            raise RolloutError(
                "packed_weights=True is for bfloat16 on a CPU with oneDNN, and this model is in"
                f" {parameter.dtype} on {parameter.device}: set it to False"
            )
        self._layers: list[PackedLinear] = []
        for module in list(view.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    self._layers.append(PackedLinear(child))
                    setattr(module, name, self._layers[-1])

    @property
    def num_bytes(self) -> int:
        return sum(layer.weight.nbytes for layer in self._layers)

    def refresh(self) -> None:
        """Pack anew after the weights changed; all or nothing."""
        packed = [layer.pack() for layer in self._layers]
        for layer, tensor in zip(self._layers, packed, strict=True):
            layer.packed = tensor
