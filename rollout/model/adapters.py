"""Adapters that peft has injected into a module: which of them computes, and a change of that.

peft is imported only for a module that has adapters, and so was made with it.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout.errors import RolloutError, short

AdapterState = list[tuple[str, ...]]
"""For each layer with adapters, in order, the names of those that compute."""

_STIRRED = 0.02


def _adapted_layers(module: nn.Module) -> list[Any]:
    if not hasattr(module, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def adapter_state(module: PreTrainedModel) -> AdapterState:
    """What computes now; empty without adapters. Raises RolloutError if an adapter is merged into its base."""
    layers = _adapted_layers(module)
    merged = [layer.merged_adapters for layer in layers if layer.merged_adapters]
    if merged:
        raise RolloutError(f"adapter {merged[0][0]!r} is merged into the weights: unmerge it, or unload peft's layers")
    return [() if layer.disable_adapters else tuple(layer.active_adapters) for layer in layers]


def check_adapter(module: PreTrainedModel, name: str | None) -> None:
    """Raise RolloutError unless the module has an adapter of this name; None is the base model alone."""
    names = sorted(getattr(module, "peft_config", {}))
    if name is not None and name not in names:
        there = f"those there are: {', '.join(names)}" if names else "it has none; inject one with peft"
        raise RolloutError(f"adapter {short(name)} is not in the module; {there}")
    if name is None and not names:
        raise RolloutError("adapter None: the module has no adapters, so that there is nothing to switch off")


def switch_adapter(module: PreTrainedModel, name: str | None) -> None:
    """Have the module, or a view, compute with the adapter of this name only; None: with none.

    What is trained stays so: requires_grad is as before. Raises RolloutError for a name that is not there.
    """
    check_adapter(module, name)
    for layer in _adapted_layers(module):
        trained = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        if name is not None:
            layer.set_adapter(name)
        layer.enable_adapters(name is not None)
        for parameter, before in trained:
            parameter.requires_grad_(before)


@torch.no_grad()
def stir_adapters(view: PreTrainedModel) -> None:
    """Give a view weights of its own in the place of its adapters' zeros, which a fresh adapter's effect is."""
    generator = torch.Generator().manual_seed(0)
    for layer in _adapted_layers(view):
        for held in (getattr(layer, name) for name in layer.adapter_layer_names):
            for owner in held.modules() if isinstance(held, nn.Module) else ():
                for name, weight in list(owner.named_parameters(recurse=False)):
                    if not weight.any():
                        drawn = _STIRRED * torch.randn(weight.shape, generator=generator)
                        setattr(owner, name, nn.Parameter(drawn.to(weight), requires_grad=False))
