"""Weights that change: noticing it, and replacing them from outside."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from rollout.config import is_kind
from rollout.errors import RolloutError, short
from rollout_kernels.ops import holds_values

_SAMPLED = 16  # values looked at in each parameter


class WeightWatch:
    """Notices in-place changes of a module's parameters that nobody announced.

    Any torch optimizer's step is seen by a global hook, other in-place operations by the tensors' version counters.
    Writes through `.data`, from outside torch or by a custom kernel leave no such trace; a look at a few values of
    every parameter sees those that change much.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._parameters = list(module.parameters())
        self._addresses = {p.data_ptr() for p in self._parameters}
        self._stepped = self._mixed = False
        self.acknowledge()
        watch = weakref.ref(self)  # the hook is global, and must not keep an engine alive

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            alive = watch()
            if alive is not None:
                alive._optimizer_stepped(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        # masters of fp32 weights are other tensors over the same storage
        stepped = (p.data_ptr() for group in optimizer.param_groups for p in group["params"])
        self._stepped = self._stepped or not self._addresses.isdisjoint(stepped)

    def _read(self) -> list[int]:
        return [p._version for p in self._parameters]

    def _sample(self) -> Tensor:
        """fp32 values spread over each parameter."""
        flat = (p.detach().reshape(-1) for p in self._parameters)
        return torch.cat([values[:: max(1, values.numel() // _SAMPLED)].float() for values in flat])

    def changed(self, *, look: bool) -> bool:
        """Whether a change has been noticed since the last acknowledge(); look: at the values too."""
        return self._stepped or self._versions != self._read() or (look and not self._values.equal(self._sample()))

    def refuse_change(self) -> None:
        """While requests run: raise if a change has been noticed."""
        if self.changed(look=False):
            raise RolloutError("the weights changed while requests were running; they have been aborted")

    def replace(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Copy new weights; if anything breaks that off, they count as mixed until acknowledge()."""
        done = False
        try:
            with torch.no_grad():
                for target, given in copies.items():
                    target.copy_(given)
            done = True
        finally:
            # only now: threads that submit meanwhile look at it without having the turn
            self._mixed = self._mixed or not done

    def refuse_mixed(self) -> None:
        """Raise if a replacement was broken off."""
        if self._mixed:
            raise RolloutError("update_weights was broken off, so that old and new weights are mixed: call it again")

    def check_version(self, version: int, least: int) -> None:
        """Raise unless the weights, as they are, may be given this version."""
        self.refuse_mixed()
        if not is_kind(int, version) or version < least:
            raise RolloutError(
                f"policy_version={short(version)}: must be a whole number, at least {least} as it is now"
            )

    def acknowledge(self) -> None:
        """The change is known, and whole."""
        self._mixed = False
        self._stepped, self._versions, self._values = False, self._read(), self._sample()


def check_update(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
    """What to copy where, after checking names, shapes and values; changes nothing. RolloutError names what is wrong.

    Names are those of the module's state dict. Tied weights need one of their names; given under several, they must
    be equal.
    """
    own = module.state_dict(keep_vars=True)
    extra = sorted(tensors.keys() - own.keys())
    if extra:
        raise RolloutError(f"update_weights: the model has no {extra[0]!r} ({len(extra)} unknown names)")
    copies: dict[Tensor, Tensor] = {}
    for name, given in tensors.items():
        target = own[name]
        if not isinstance(given, Tensor):
            raise RolloutError(f"update_weights: {name!r} is a {type(given).__name__}, not a tensor")
        if holds_values(target) and not holds_values(given):
            raise RolloutError(f"update_weights: {name!r} is on the meta device, which holds no values")
        if given.shape != target.shape:
            raise RolloutError(f"update_weights: {name!r} has shape {tuple(given.shape)}, not {tuple(target.shape)}")
        if given.is_floating_point() != target.is_floating_point():
            raise RolloutError(f"update_weights: {name!r} is {given.dtype}, not {target.dtype}")
        if not _fits(given.detach(), target.dtype):
            raise RolloutError(f"update_weights: {name!r} holds NaN or an infinity (in {target.dtype})")
        earlier = copies.get(target)
        if earlier is not None and not torch.equal(earlier, given):
            raise RolloutError(f"update_weights: {name!r} is tied to another name, under which it has other values")
        copies[target] = given
    missing = [name for name, target in own.items() if target not in copies]
    if missing:
        raise RolloutError(f"update_weights: {missing[0]!r} is missing ({len(missing)} names in all)")
    return copies


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether floating-point values are finite, and stay so in dtype; others are not looked at."""
    if not values.is_floating_point() or not values.numel():
        return True
    values = values.float() if values.dtype.itemsize == 1 else values  # float8 has no aminmax
    return bool(torch.stack(values.aminmax()).to(dtype).isfinite().all())
