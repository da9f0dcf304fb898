"""Models from a directory, and what is refused before any work: each error names the thing that is wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from rollout import RolloutError
from rollout.model.loading import check_module, load_model, load_tokenizer, resolve_device
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
from trainer.plan import main


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
    model: nn.Module = random_model("llama")
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


# -- directories that are none, or lack something -------------------------------------------------------------------


def in_shards(directory: Path) -> list[str]:
    """Split a directory's weights into two files with an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    places = {name: files[i % 2] for i, name in enumerate(sorted(weights))}
    for file in files:
        part = {name: tensor for name, tensor in weights.items() if places[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def in_cache(directory: Path) -> Path:
    """Move a directory's files into a hub's cache below it; returns the snapshot, links to blobs."""
    root = directory / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for i, file in enumerate(path for path in sorted(directory.iterdir()) if path.is_file()):
        file.rename(root / "blobs" / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


def as_adapter(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def refusal(directory: Path) -> str:
    """The one line that an engine refuses a directory with."""
    with pytest.raises(RolloutError) as raised:
        small_engine(directory)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_shards_and_links_load_as_one_file_does(tmp_path: Path) -> None:
    model = random_model("llama", vocab_size=TEXT_VOCAB)
    plain, shards, cached = (save_directory(tmp_path / name, model, byte_tokenizer()) for name in "abc")
    in_shards(shards)
    made = []
    for directory in (plain, shards, in_cache(cached)):
        with small_engine(directory) as engine:
            made.append(engine.generate_rollouts(["Hi!"], 1, greedy(5))[0].rollouts[0].logprobs)
    assert made[0] == made[1] == made[2]


def test_an_adapter_alone_names_its_base(directory: Path) -> None:
    as_adapter(directory)
    hint = "it holds an adapter only (adapter_config.json); merge it into its base model 'org/base' and give that"
    assert refusal(directory) == f"model directory {str(directory)!r} has no weights (*.safetensors): {hint}"
    (directory / "config.json").unlink()
    assert refusal(directory) == f"model directory {str(directory)!r} has no config.json: {hint}"


def test_an_adapter_beside_whole_weights_is_said_not_to_be_applied(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.x": torch.zeros(1)}, directory / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING, "rollout"):
        model = load_model(directory)
    assert f"model directory {directory} has an adapter_config.json: the adapter is not applied" in caplog.text
    assert model.name_or_path == str(directory)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_of_peft_s_beside_whole_weights_is_not_applied(directory: Path) -> None:
    """transformers would, where peft is installed."""
    expected = load_model(directory)
    get_peft_model(load_model(directory), LoraConfig(init_lora_weights=False)).save_pretrained(directory)
    assert (directory / "adapter_model.safetensors").exists()
    loaded = load_model(directory)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_a_missing_shard_is_named(directory: Path) -> None:
    files = in_shards(directory)
    (directory / files[1]).unlink()
    assert f"{str(directory)!r}: {files[1]} is missing; model.safetensors.index.json names it" in refusal(directory)
    (directory / files[0]).unlink()
    assert f"{files[0]} is missing; model.safetensors.index.json names it, and 1 more" in refusal(directory)
    (directory / "model.safetensors.index.json").unlink()
    assert "has no weights (*.safetensors)" in refusal(directory)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}']
)
def test_an_index_that_names_nothing_is_named(directory: Path, text: str) -> None:
    in_shards(directory)
    (directory / "model.safetensors.index.json").write_text(text)
    assert f"{str(directory)!r}: model.safetensors.index.json " in refusal(directory)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ],
)
def test_a_link_to_nothing_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).symlink_to("../../blobs/0123")
    assert f"{str(directory)!r}: {name} is a link to '../../blobs/0123', which does not exist" in refusal(directory)


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_caches_root_says_where_the_model_is(directory: Path, levels: int) -> None:
    snapshot = in_cache(directory)
    given = snapshot.parents[levels]
    assert refusal(given) == f"model directory {str(given)!r} has no config.json: a model is in {str(snapshot)!r}"


def test_a_training_run_says_where_the_model_is(tmp_path: Path) -> None:
    model = save_directory(tmp_path / "checkpoints" / "step-000001" / "model", random_model("llama"))
    assert refusal(tmp_path).endswith(f"has no config.json: a model is in {str(model)!r}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors", "model.pt"])
def test_weights_of_another_kind_are_named(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    assert f"has no weights (*.safetensors): {name} is not read; save the model as model" in refusal(directory)


@pytest.mark.parametrize("given", ["Qwen/Qwen3-0.6B", "no/such/place", "nowhere"])
def test_a_name_that_is_no_directory_is_not_looked_for_elsewhere(given: str) -> None:
    message = f"model directory '{given}' does not exist; only local directories are read: download a model from a hub"
    assert refusal(Path(given)).startswith(message)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_in_a_directorys_place_is_named(directory: Path, name: str) -> None:
    assert refusal(directory / name).endswith("is a file: give the directory that holds config.json")


# -- damaged files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"5", b"\x00\x01", b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b"[" * 9999]
)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
    ],
)
def test_a_file_that_holds_no_json_object_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    said = refusal(directory)
    assert said.startswith(f"model directory {str(directory)!r}: {name} "), said
    assert "is not JSON" in said or "not a JSON object" in said


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer.json", {"model": 5}),
        ("tokenizer.json", {"model": {"type": "none"}}),
        ("tokenizer.json", {"decoder": {"type": "none"}}),
        ("tokenizer.json", {"added_tokens": "x"}),
        ("tokenizer.json", {"version": "9.9"}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "y"}}),
        ("tokenizer_config.json", {"padding_side": "x"}),
    ],
    ids=str,
)
def test_a_tokenizer_of_wrong_contents_is_named(directory: Path, name: str, values: dict[str, Any]) -> None:
    edit_json(directory / name, **values)
    assert refusal(directory).startswith(f"model directory {str(directory)!r}: its tokenizer does not load: {name} ")


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_without_its_vocabulary_is_refused(directory: Path, kind: str) -> None:
    """transformers makes an empty one of some kinds."""
    edit_json(directory / "tokenizer_config.json", tokenizer_class=kind)
    (directory / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(directory)


@pytest.mark.parametrize("template", [5, ["x"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_named(directory: Path, template: Any) -> None:
    (directory / "chat_template.jinja").unlink()
    edit_json(directory / "tokenizer_config.json", chat_template=template)
    with pytest.raises(RolloutError, match="its tokenizer"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "96"}, "hidden_size='96': must be a whole number"),
        ({"hidden_size": None}, "hidden_size=None: must be a whole number"),
        ({"hidden_size": 96.0}, "hidden_size=96.0: must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1: must be a whole number, at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"vocab_size": 0}, "vocab_size=0: must be a whole number, at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"head_dim": [24]}, r"head_dim=\[24\]: must be a whole number"),
        ({"head_dim": 7}, "it describes no model .*even rotary dimension"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None: must be"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta=-1: must be a number above 0"),
        ({"rope_parameters": "x"}, "rope_parameters='x': must be an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "a"}}, "rope_parameters.factor='a': must be a number"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "it describes no model .*factor"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta=nan: must be"),
        ({"dtype": "nonsense"}, "dtype='nonsense': must be one of float32, bfloat16"),
        ({"dtype": None, "torch_dtype": 5}, "torch_dtype=5: must be one of"),
        ({"dtype": "int8"}, "dtype='int8': must be one of"),
        ({"hidden_act": "nonsense"}, "hidden_act='nonsense': is no activation"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"attention_bias": "x"}, "attention_bias='x': must be true or false"),
        ({"output_hidden_states": "x"}, "output_hidden_states='x': must be true or false"),
        ({"use_cache": 1}, "use_cache=1: must be true or false"),
        ({"torchscript": [True]}, r"torchscript=\[True\]: must be true or false"),
        ({"return_dict": False}, "return_dict=False: must be true, or left out"),
        ({"rope_parameters": {"rope_type": ["x"], "rope_theta": 1.0}}, r"rope_parameters.rope_type=\['x'\]: must be"),
        (
            {"rope_parameters": {"rope_type": {"a": 1}, "rope_theta": 1.0}},
            "rope_parameters.rope_type={'a': 1}: must be",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": ["x"], "factor": 2.0}}, r"rope_scaling.type=\['x'\]: must"),
        ({"pad_token_id": -2}, "pad_token_id=-2: must be in the vocabulary of 264"),
        ({"pad_token_id": 9999}, "pad_token_id=9999: must be in the vocabulary of 264"),
        ({"layer_types": "x"}, "layer_types='x': must be a list of 2"),
        ({"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\]: must be a list of 2"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layer_types=.*linear.*: must be a list of 2, of full",
        ),
        ({"sliding_window": 0}, "sliding_window=0: must be a whole number, at least 1"),
        ({"id2label": 5}, "it describes no model"),
        ({"attn_implementation": "x"}, "it describes no model .*attn_implementation"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"model_type": ["llama"]}, "model_type=.*llama.* is not supported"),
        ({"quantization_config": {}}, "quantised checkpoints are not supported"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_model_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], message: str
) -> None:
    """By an engine and by a plan alike."""
    edit_config(directory, **values)
    with pytest.raises(RolloutError, match=rf"model directory '{directory}': config\.json: {message}"):
        small_engine(directory)
    assert main([f"model={directory}", "gpu=1GiB"]) == 2
    out, errors = capsys.readouterr()
    assert (out, "config.json: " in errors, len(errors.splitlines())) == ("", True, 1), errors


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])
@pytest.mark.parametrize(
    "values",
    [{}, {"sliding_window": 8}, {"use_sliding_window": True, "sliding_window": None}, {"use_sliding_window": False}],
    ids=str,
)
def test_sliding_layers_need_a_window(tmp_path: Path, arch: str, values: dict[str, Any]) -> None:
    directory = save_directory(tmp_path, random_model(arch, vocab_size=TEXT_VOCAB), byte_tokenizer())
    edit_config(directory, layer_types=["sliding_attention", "full_attention"], **values)
    assert "config.json: layer_types=['sliding_attention', 'full_attention']: sliding_attention" in refusal(directory)
    edit_config(directory, use_sliding_window=True, sliding_window=8)
    with small_engine(directory) as engine:
        assert engine.generate_rollouts(["Hi!"], 1, greedy(3))


@pytest.mark.parametrize(
    "values",
    [{"output_attentions": True}, {"output_hidden_states": True}, {"torchscript": True}, {"pad_token_id": -1}],
    ids=str,
)
def test_values_that_change_no_log_prob_are_taken(directory: Path, values: dict[str, Any]) -> None:
    made = []
    for _ in range(2):
        with small_engine(directory) as engine:
            made.append(engine.generate_rollouts(["Hi!"], 1, greedy(3))[0].rollouts[0].logprobs)
        edit_config(directory, **values)
    assert made[0] == made[1]


# -- damaged weights ------------------------------------------------------------------------------------------------


def flat(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(1)


def another_layer(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(160, 96)


def a_bias(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(96)


def whole_numbers(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(96, dtype=torch.int8)


def not_a_number(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan


def infinite(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][7, 0] = -torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), r"missing keys \['lm_head.weight'\]"),
        (lambda weights: weights.clear(), "0 tensors are too few for config.json's num_hidden_layers=2"),
        (flat, r"model.norm.weight has shape \[1\], and config.json asks for \[96\]"),
        (another_layer, "model.layers.2.mlp.up_proj.weight has no place in the model that config.json describes"),
        (a_bias, "model.layers.0.self_attn.q_proj.bias has no place in the model"),
        (whole_numbers, "model.norm.weight is stored as I8.*quantised weights are not read"),
        (not_a_number, "model.layers.1.mlp.up_proj.weight holds NaN or an infinity"),
        (infinite, "model.embed_tokens.weight holds NaN or an infinity"),
    ],
)
def test_weights_that_are_not_the_models_are_named(directory: Path, change: Any, message: str) -> None:
    edit_weights(directory, change)
    with pytest.raises(RolloutError, match=rf"'{directory}': .*{message}|'{directory}': {message}"):
        load_model(directory)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 1}, "model.layers.1.* has no place in the model"),
        ({"num_hidden_layers": 3}, "missing keys"),
        ({"num_hidden_layers": 10**6}, "tensors are too few for config.json's num_hidden_layers=1000000"),
        ({"vocab_size": 10**12}, r"has shape \[264, 96\], and config.json asks for \[1000000000000, 96\]"),
        ({"model_type": "qwen3"}, "missing keys .*k_norm"),
        ({"intermediate_size": 161}, r"has shape \[.*160.*\], and config.json asks for \[.*161.*\]"),
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(directory: Path, values: dict[str, Any], message: str) -> None:
    edit_config(directory, **values)
    with pytest.raises(RolloutError, match=message):
        load_model(directory)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"garbage" * 99])
def test_weights_that_are_no_safetensors_are_named(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    assert f"{str(directory)!r}: its weights do not load (model.safetensors: " in refusal(directory)


def test_a_shard_cut_short_is_named(directory: Path) -> None:
    shard = directory / in_shards(directory)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"its weights do not load ({shard.name}: " in refusal(directory)


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_weights_that_differ_are_refused(directory: Path, sharded: bool) -> None:
    edit_config(directory, tie_word_embeddings=True)
    edit_weights(
        directory, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    )
    if sharded:
        in_shards(directory)
    assert "lm_head.weight and model.embed_tokens.weight differ, but config.json ties them" in refusal(directory)


def test_tied_weights_that_are_stored_twice_load(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=True)
    edit_weights(
        directory, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    )
    model = load_model(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_refused_directory_leaves_transformers_messages_as_they_were(directory: Path) -> None:
    before = transformers_logging.get_verbosity()
    edit_weights(directory, drop_one)
    refusal(directory)
    assert transformers_logging.get_verbosity() == before
