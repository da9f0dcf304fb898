"""Two views of the caller's module: the same parameters, our attention and activations.

A view is a second module tree over the very tensors of the first. The rollout view generates (eval, no gradients), the
training view is what the loss runs through; gradients land on the shared parameters. The same modules are replaced in
both, so that they compute the same bits. The caller's module itself is never changed.
"""

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rollout.errors import RolloutError
from rollout.model.adapters import AdapterState, adapter_state, check_adapter, switch_adapter
from rollout.model.kv_cache import KVCache
from rollout.model.numerics import Numerics
from rollout.model.substitutions import HeadTap, tap_head
from rollout.torch_state import own_torch_state
from rollout_kernels.attention import training_attention
from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.ops import Ops
from rollout_kernels.shapes import ROW_MULTIPLE, round_up

ATTENTION_NAME = "cowroll"
# what transformers passes every attention function, and what ours takes or may ignore
_KNOWN_KEYWORDS = {
    "position_ids",
    "use_cache",
    "is_causal",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
}


@dataclass
class AttentionContext:
    """What attention needs to know of one forward; passed to the model as a keyword and by it to every layer."""

    plan: AttentionPlan
    ops: Ops
    cache: KVCache | None = None
    """None in training: rows attend rows of the same pack."""
    write_rows: Tensor | None = None
    """[T * kv_heads] int64, where each new token's keys and values go in the cache."""
    layers_seen: list[int] | None = None
    """Filled while generating, to assert one call per layer."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attention_context: AttentionContext | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: query [1, H, T, D], key and value [1, K, T, D] of the new tokens only."""
    extra = {name for name, given in unknown.items() if given is not None} - _KNOWN_KEYWORDS
    if extra or dropout or attention_mask is not None or attention_context is None:
        what = sorted(extra) or f"dropout={dropout}, a mask or no context"
        raise RolloutError(f"attention of {type(module).__name__} asks for {what}, which this engine does not compute")
    dim = query.shape[-1]
    padding = round_up(dim, ROW_MULTIPLE) - dim
    if padding:
        query, key, value = (F.pad(x, (0, padding)) for x in (query, key, value))
    q = query[0].transpose(0, 1).contiguous()
    if attention_context.cache is None:
        out = training_attention(
            attention_context.ops, q, key[0].contiguous(), value[0].contiguous(), attention_context.plan, scaling,
            sliding_window,
        )  # fmt: skip
    else:
        out = _cached_attention(module, q, key, value, attention_context, scaling, sliding_window)
    return out[None, ..., :dim], None


def _cached_attention(
    module: nn.Module,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    context: AttentionContext,
    scaling: float,
    window: int | None,
) -> Tensor:
    cache, layer, rows = context.cache, module.layer_idx, context.write_rows
    assert cache is not None
    assert rows is not None
    assert isinstance(layer, int)
    if context.layers_seen is not None:
        context.layers_seen.append(layer)
    new_keys, new_values = (x[0].transpose(0, 1).reshape(-1, x.shape[-1]) for x in (key, value))
    cache.write(context.ops, layer, rows, new_keys, new_values)
    keys, values = cache.flat(layer)
    return context.ops.segment_attention(q, keys, values, context.plan, scaling, window)[0]


AttentionInterface.register(ATTENTION_NAME, _attention)


def _shared_tensors(module: nn.Module) -> dict[str, Tensor]:
    persistent = module.state_dict(keep_vars=True)
    return dict(module.named_parameters(remove_duplicate=False)) | persistent


def bare_view(module: PreTrainedModel) -> PreTrainedModel:
    """A module tree over `module`'s own parameters and buffers, in eval mode."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _shared_tensors(module).values()}
    for nested in module.modules():
        # the caller's hooks are for the caller's forwards, and may not be copyable
        memo |= {id(v): type(v)() for name, v in vars(nested).items() if "hooks" in name and isinstance(v, dict)}
    return copy.deepcopy(module, memo).eval()


@own_torch_state()
def make_view(module: PreTrainedModel, numerics: Numerics) -> PreTrainedModel:
    """A view that attends through this engine and computes as `numerics` says."""
    view = bare_view(module)
    view.numerics = numerics
    view.set_attn_implementation(ATTENTION_NAME)
    for substitute in numerics.substitutions:
        substitute(view, numerics.ops)
    tap_head(view)
    return view


def training_view(module: PreTrainedModel, numerics: Numerics, *, gradient_checkpointing: bool) -> PreTrainedModel:
    """The view that the loss runs through; dropout is refused, since the generator has none."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Dropout) and submodule.p > 0:
            raise RolloutError(
                f"{name} has dropout {submodule.p}; set it to 0, since rollouts are drawn without dropout"
            )
    dropout = getattr(module.config, "attention_dropout", 0.0)
    if dropout:
        raise RolloutError(f"attention_dropout={dropout}: set it to 0, since rollouts are drawn without dropout")
    view = make_view(module, numerics)
    if gradient_checkpointing:
        # renamed in transformers 5.24
        enable = getattr(view, "activation_checkpointing_enable", view.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        view.train()
    return view


@dataclass(frozen=True)
class Identity:
    """Where a module's parameters and persistent buffers lie, what they are, and which adapters compute."""

    tensors: dict[str, tuple[int, torch.dtype, torch.Size]]
    adapters: AdapterState


def identify(module: PreTrainedModel) -> Identity:
    """Raises RolloutError if an adapter is merged."""
    tensors = {name: (t.data_ptr(), t.dtype, t.shape) for name, t in _shared_tensors(module).items()}
    return Identity(tensors, adapter_state(module))


class Views:
    """A module and what an engine has made of it: views over the same tensors, which compute with the same adapters."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._identity = identify(module)
        self._made: WeakSet[PreTrainedModel] = WeakSet()

    def rollout(self, numerics: Numerics) -> PreTrainedModel:
        """A view to generate with."""
        view = make_view(self.module, numerics)
        self._made.add(view)
        return view

    def training(self, numerics: Numerics, *, gradient_checkpointing: bool) -> PreTrainedModel:
        """A view that the loss runs through."""
        view = training_view(self.module, numerics, gradient_checkpointing=gradient_checkpointing)
        self._made.add(view)
        return view

    def check(self) -> None:
        """Raise if the module no longer has the tensors that the views read, or computes with other adapters."""
        now = identify(self.module)
        if now.adapters != self._identity.adapters:
            raise RolloutError(
                "the module's adapters have changed under the engine: switch with engine.use_adapter(name), and make a"
                " new engine after one was injected or deleted"
            )
        for name, identity in self._identity.tensors.items():
            if now.tensors.get(name) != identity:
                raise RolloutError(
                    f"{name} is no longer the tensor that the engine reads (replaced by .to(), .data = or a resize):"
                    " update weights in place, or make a new engine"
                )

    def check_adapter(self, name: str | None) -> None:
        """Raise unless the adapter is there, in the module and so in the views."""
        self.check()
        check_adapter(self.module, name)

    def switch_adapter(self, name: str | None) -> None:
        """Have module and views compute with one adapter, or none; see rollout.model.adapters."""
        for tree in (self.module, *self._made):
            switch_adapter(tree, name)
        self._identity = identify(self.module)


def head_of(view: PreTrainedModel) -> HeadTap:
    head = view.get_output_embeddings()
    assert isinstance(head, HeadTap)
    return head


def hidden_states(
    view: PreTrainedModel, context: AttentionContext, ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:
    """One forward over ids [T] at positions [T]: what the head multiplies of the token rows [R]: [R, D].

    T and R are multiples of numerics.row_multiple. The caller's autocast and inference mode do not reach the model.
    """
    with own_torch_state(view.numerics.num_threads):
        out = view(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            attention_context=context,
        )
    hidden: Tensor = out.logits[0]
    return hidden


def raw_logits(
    view: PreTrainedModel, context: AttentionContext, ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:
    """The same with the head behind it: logits [R, V], in the model's dtype."""
    hidden = hidden_states(view, context, ids, positions, rows)
    with own_torch_state(view.numerics.num_threads):
        return head_of(view).logits(hidden)
