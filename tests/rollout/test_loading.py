"""Models from a directory, and what is refused before any work: each error names the thing that is wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rollout import RolloutError
from rollout.loading import check_module, load_model, resolve_device
from tiny_models import (
    ARCHITECTURES,
    TEXT_VOCAB,
    byte_tokenizer,
    eager_logits,
    greedy,
    random_model,
    save_directory,
    small_engine,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole model directory, to be spoiled."""
    return save_directory(tmp_path / "model", random_model("llama", vocab_size=TEXT_VOCAB), byte_tokenizer())


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


# -- what is loaded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_model_loads_as_it_was(tmp_path: Path, arch: str) -> None:
    model = random_model(arch)
    loaded = load_model(save_directory(tmp_path, model))
    loaded.set_attn_implementation("eager")
    assert torch.equal(eager_logits(loaded, [3, 1, 4, 1, 5]), eager_logits(model, [3, 1, 4, 1, 5]))
    assert not loaded.training


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
    ids=str,
)
def test_dtype(tmp_path: Path, stored: torch.dtype, asked: str, expected: torch.dtype) -> None:
    """auto is what the model is stored in; a CPU runs float16 in float32. Rotary frequencies are never rounded."""
    model = random_model("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    loaded = load_model(save_directory(tmp_path, model.to(stored)), asked)
    assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(expected))


def test_a_dtype_other_than_the_stored_one_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_directory(tmp_path, random_model("llama", dtype=torch.float16))
    with caplog.at_level(logging.WARNING, "rollout"):
        load_model(tmp_path)
    assert "stored in torch.float16; dtype=auto runs it in torch.float32" in caplog.text


def test_an_engine_from_a_directory_has_its_tokenizer(directory: Path) -> None:
    with small_engine(directory) as engine:
        (group,) = engine.generate_rollouts(["Hi!"], 1, greedy(3))
    assert group.prompt_ids == [43, 76, 4]
    assert isinstance(group.rollouts[0].text, str)


def test_a_given_tokenizer_stands_in_for_a_missing_one(directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with small_engine(directory, byte_tokenizer()) as engine:
        assert engine.generate_rollouts(["Hi!"], 1, greedy(3))[0].prompt_ids == [43, 76, 4]


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["config.json"], r"has no config\.json"),
        (["model.safetensors"], r"has no weights \(\*\.safetensors\)"),
        (
            ["tokenizer.json", "tokenizer_config.json"],
            r"has no tokenizer \(tokenizer\.json or",
        ),
    ],
    ids=["config", "weights", "tokenizer"],
)
def test_a_missing_file_is_named(directory: Path, missing: list[str], message: str) -> None:
    for name in missing:
        (directory / name).unlink()
    with pytest.raises(RolloutError, match=message) as raised:
        small_engine(directory)
    assert str(directory) in str(raised.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"model directory .*nowhere' does not exist"):
        small_engine(tmp_path / "nowhere")


def test_pickled_weights_alone_are_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(RolloutError, match="has no weights"):
        small_engine(directory)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: qwen3, qwen2, llama"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 12,
                    "long_factor": [1.0] * 12,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_type='longrope'",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised checkpoints are not supported"),
    ],
    ids=["gpt2", "unknown", "dynamic", "longrope", "old spelling", "quantised"],
)
def test_a_kind_of_model_that_cannot_be_run_right(directory: Path, values: dict[str, Any], message: str) -> None:
    edit_config(directory, **values)
    with pytest.raises(RolloutError, match=message):
        small_engine(directory)


def drop_one(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def narrow_one(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:, :-1].contiguous()


@pytest.mark.parametrize("change", [drop_one, narrow_one])
def test_weights_that_do_not_fill_the_model_are_named(directory: Path, change: Any) -> None:
    edit_weights(directory, change)
    with pytest.raises(RolloutError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        small_engine(directory)


def test_weights_that_the_model_has_no_place_for_are_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_weights(directory, lambda weights: weights.update({"model.surplus": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING, "rollout"):
        load_model(directory)
    assert "model.surplus" in caplog.text


def mixed() -> nn.Module:
    model = random_model("llama")
    model.lm_head.to(torch.bfloat16)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(3, 3), "Linear is not a causal language model"),
        (lambda: random_model("llama").model, "LlamaModel is not a causal language model"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)), "model_type='gpt2'"),
        (lambda: random_model("llama").half(), "parameters are in .*float16"),
        (lambda: random_model("llama").double(), "parameters are in .*float64"),
        (mixed, "parameters are in .*bfloat16.*float32"),
    ],
    ids=["linear", "base model", "gpt2", "half", "double", "mixed"],
)
def test_modules_that_cannot_be_run_right(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        check_module(make())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(RolloutError, match=f"device='{device}': this machine has no CUDA device"):
        resolve_device(device)
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "config.json is not JSON"), ("model.safetensors", "weights do not load")]
)
def test_a_file_cut_short_is_named(tmp_path: Path, name: str, message: str) -> None:
    directory = save_directory(tmp_path, random_model("llama"))
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(RolloutError, match=message):
        load_model(directory)
