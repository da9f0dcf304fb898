"""What the code knows of each model family: its modules, how its layers attend, and what of it is refused."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from rollout.errors import RolloutError


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends: softmax(scores) v over the positions up to a row's own."""

    window: int | None = None
    """How many of them a row sees, its own included; None: all."""
    scale: float | None = None
    """scores = scale * q k; None: 1 / sqrt(head_dim)."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap)."""
    sinks: bool = False
    """Whether every head has a learned score that takes part in the softmax and has no value."""

    @property
    def missing(self) -> str | None:
        """What of it no operation computes, if anything."""
        return "a soft cap" if self.soft_cap is not None else "sinks" if self.sinks else None


@dataclass(frozen=True)
class ModelFamily:
    """A model_type of transformers, whose attention has been checked to go through the engine's alone."""

    model_type: str
    norm: type[nn.Module]
    """weight * (x / rms(x)), with the attributes weight and variance_epsilon."""
    mlp: type[nn.Module]
    """down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    slides: bool
    """Whether a layer of the type sliding_attention has a window; where not, it sees everything."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """`dynamic` and `longrope` depend on the longest position in the batch, so a rollout would on its neighbours."""

    def attention(self, config: PretrainedConfig) -> list[LayerAttention]:
        """How each layer attends, in order."""
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
        window = getattr(config, "sliding_window", None) if self.slides else None
        return [LayerAttention(window if kind == "sliding_attention" else None) for kind in kinds]


FAMILIES = {
    family.model_type: family
    for family in (
        ModelFamily("qwen3", Qwen3RMSNorm, Qwen3MLP, slides=True),
        ModelFamily("qwen2", Qwen2RMSNorm, Qwen2MLP, slides=True),
        ModelFamily("llama", LlamaRMSNorm, LlamaMLP, slides=False),
    )
}


def family_named(model_type: object) -> ModelFamily:
    """Raises RolloutError with the list of those that are supported."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise RolloutError(f"model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return family


def check_config(config: PretrainedConfig) -> None:
    """Refuse what the engine cannot run right: a model kind, a rotary embedding, quantised weights."""
    family = family_named(config.model_type)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in rope.values() if isinstance(part, dict)}
    for kind in kinds or {rope.get("rope_type", "default")}:
        if kind not in family.rope_types:
            raise RolloutError(f"rope_type={kind!r} is not supported; supported: {', '.join(family.rope_types)}")
    for layer in family.attention(config):
        if layer.missing is not None:
            raise RolloutError(f"model_type={config.model_type!r} attends with {layer.missing}, which is not supported")
    if getattr(config, "quantization_config", None):
        raise quantised()


def quantised() -> RolloutError:
    return RolloutError("quantised checkpoints are not supported: load the model in float32 or bfloat16")
