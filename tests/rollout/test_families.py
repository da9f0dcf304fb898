"""What the code knows of each family, against transformers' own modules and configurations."""

from typing import Any

import pytest
import torch
from torch import nn

import tiny_models
from rollout import RolloutError
from rollout.model.families import FAMILIES, LayerAttention, ModelFamily, check_config, family_named


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_norm_and_mlp_have_the_form_that_is_claimed(arch: str) -> None:
    model = tiny_models.random_model(arch, dtype=torch.float64)
    family, x = FAMILIES[arch], torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    layer: Any = model.model.layers[0]
    assert (type(layer.input_layernorm), type(layer.mlp)) == (family.norm, family.mlp)
    norm, mlp = layer.input_layernorm, layer.mlp
    rms = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    torch.testing.assert_close(norm(x), norm.weight * x / rms, rtol=1e-6, atol=1e-6)  # transformers norms in fp32
    torch.testing.assert_close(mlp(x), mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_windows_are_those_that_transformers_passes_to_attention(arch: str) -> None:
    kinds = ["sliding_attention", "full_attention"]
    extra: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8} if arch != "llama" else {}
    model = tiny_models.random_model(arch, layer_types=kinds, **extra)
    layers: Any = model.model.layers
    passed = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    assert family_named(arch).attention(model.config) == [LayerAttention(window) for window in passed]


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_scores_are_scaled_as_transformers_modules_say(arch: str) -> None:
    model = tiny_models.random_model(arch)
    layers: Any = model.model.layers
    dim = layers[0].self_attn.head_dim
    scales = [layer.scale or dim**-0.5 for layer in family_named(arch).attention(model.config)]
    assert scales == [layer.self_attn.scaling for layer in layers]


@pytest.mark.parametrize(("kind", "what"), [({"soft_cap": 50.0}, "a soft cap"), ({"sinks": True}, "sinks")])
def test_attention_that_no_operation_computes_is_refused(
    kind: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [LayerAttention(), LayerAttention(**kind)]
    monkeypatch.setattr(ModelFamily, "attention", lambda self, config: layers)
    with pytest.raises(RolloutError, match=f"model_type='qwen3' attends with {what}, which is not supported"):
        check_config(tiny_models.random_config("qwen3"))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", None, ["qwen3"]], ids=str)
def test_another_family_is_refused_with_the_list(model_type: object) -> None:
    with pytest.raises(RolloutError, match=r"is not supported; supported: qwen3, qwen2, llama"):
        family_named(model_type)
