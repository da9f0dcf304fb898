"""Models from a directory, checked before they are used."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rollout.config import RolloutConfig
from rollout.errors import RolloutError, short
from rollout.model.families import check_config, family_named, quantised
from rollout.model.files import (
    check_tokenizer_files,
    check_values,
    find_directory,
    read_object,
    read_tensor,
    reading,
    weight_shapes,
    where_is,
)
from rollout.model.tokenizers import check_end_tokens, check_tokenizer
from rollout.torch_state import check_parameters

logger = logging.getLogger(__name__)


def resolve_device(device: str) -> torch.device:
    """The device that a configuration names; "auto" takes CUDA where it is."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RolloutError(f"device={device!r}: this machine has no CUDA device; use device=cpu or auto")
    named = torch.device(device)
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RolloutError(f"device={device!r}: the machine has {count} CUDA devices, from 0 on")
    return named


def default_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: what the model is stored in; float16 becomes bf16 on CUDA and fp32 on a CPU."""
    stored = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if stored in (torch.float32, torch.bfloat16):
        assert isinstance(stored, torch.dtype)
        return stored
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def open_model(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: RolloutConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A directory's model and tokenizer, or the caller's own; refused where they do not fit each other or `config`."""
    if isinstance(model, str | Path):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        module = load_model(model, config.dtype, resolve_device(config.device))
    else:
        module = check_module(model)
    check_tokenizer(tokenizer, module.config.vocab_size)
    check_parameters(module)
    check_matches(config, module.device, module.dtype)
    return module, tokenizer


def check_module(module: nn.Module) -> PreTrainedModel:
    """Refuse a module that is not a causal language model of a supported kind."""
    if not isinstance(module, PreTrainedModel) or "logits_to_keep" not in inspect.signature(module.forward).parameters:
        remedy = ": pass its get_base_model(), which has the adapter inside" if hasattr(module, "peft_config") else ""
        raise RolloutError(f"{type(module).__name__} is not a causal language model of transformers{remedy}")
    check_config(module.config)
    dtypes = {p.dtype for p in module.parameters()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise RolloutError(f"parameters are in {sorted(map(str, dtypes))}: use one of float32 and bfloat16 for all")
    return module


def check_directory(path: str | Path, *, needs_tokenizer: bool = True) -> Path:
    """The model directory, after a look at its files: configuration, headers of the weights, tokenizer.

    Raises RolloutError naming directory and file for everything that can be known without loading them.
    """
    directory = find_directory(path)
    read_config(directory)
    weight_shapes(directory)
    _check_generation_config(directory / "generation_config.json")
    if needs_tokenizer:
        check_tokenizer_files(directory)
    return directory


def read_config(path: Path) -> PretrainedConfig:
    """A supported model's configuration, from its directory or from the file itself."""
    file, where = _config_file(path)
    values = read_object(file)
    try:
        family_named(values.get("model_type"))
        if values.get("quantization_config") is not None:
            raise quantised()
        check_values(values)
        check_end_tokens(values.get("eos_token_id"))
        with reading("it describes no model"):
            config = AutoConfig.from_pretrained(file, local_files_only=True)
        assert isinstance(config, PretrainedConfig)
        check_config(config)
    except RolloutError as error:
        raise RolloutError(f"{where}: {error}") from error
    return config


def _config_file(path: Path) -> tuple[Path, str]:
    """The file itself, and how messages about it begin."""
    file = path if path.is_file() else path / "config.json"
    return file, f"{where_is(file.parent)}: {file.name}"


def model_shapes(config: PretrainedConfig, path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the model that path's configuration describes; takes no memory for them."""
    with reading(f"{_config_file(path)[1]}: it describes no model"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory."""
    directory = check_directory(path)
    where, file = f"{where_is(path)}: its tokenizer", directory / "tokenizer.json"
    if file.is_file():
        with reading(f"{where} does not load: {file.name} makes none"):
            Tokenizer.from_file(str(file))
    from_what = "tokenizer_config.json and what lies beside it" if file.is_file() else "without a tokenizer.json"
    with reading(f"{where} does not load: {from_what}"):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        tokenizer.decode(tokenizer("a")["input_ids"])
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise RolloutError(f"{where} has no vocabulary: tokenizer.json is missing or empty")
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if not isinstance(template, str | None):
            raise RolloutError(f"{where} has chat_template={short(template)}: give a Jinja template")
    try:
        check_tokenizer(tokenizer, read_config(directory).vocab_size)
    except RolloutError as error:
        raise RolloutError(f"{where_is(path)}: {error}") from error
    return tokenizer


def load_model(path: str | Path, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """A causal language model from a directory of safetensors, in `dtype`, on `device`, in eval mode."""
    directory = check_directory(path, needs_tokenizer=False)
    config = read_config(directory)
    _check_weights(directory, config)
    device = torch.device(device)
    wanted = default_dtype(config.dtype, device) if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and config.dtype is not None and config.dtype != wanted:
        logger.warning("model is stored in %s; dtype=auto runs it in %s", config.dtype, wanted)
    # `.to(bfloat16)` after loading would round the rotary frequencies too
    with reading(f"{where_is(path)} does not load"), _transformers_quiet(), _without_adapter(directory) as plain:
        model, info = AutoModelForCausalLM.from_pretrained(
            plain,
            config=config,
            dtype=wanted,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the others
        )
    _check_loaded(info, path)
    model.name_or_path = str(directory)
    model = check_module(model).to(device).eval()
    for name, parameter in model.named_parameters():
        if not torch.stack(parameter.detach().aminmax()).isfinite().all():
            raise RolloutError(f"weights in {str(path)!r}: {name} holds NaN or an infinity")
    return model


def _check_weights(directory: Path, config: PretrainedConfig) -> None:
    """Refuse weights of other shapes than the configuration's, before memory is taken for either."""
    where = f"weights in {str(directory)!r}"
    there = weight_shapes(directory)
    if config.num_hidden_layers > len(there):
        raise RolloutError(
            f"{where}: {len(there)} tensors are too few for config.json's num_hidden_layers={config.num_hidden_layers}"
        )
    wanted = model_shapes(config, directory)
    for name in sorted(wanted.keys() & there.keys()):
        if wanted[name] != there[name]:
            raise RolloutError(
                f"{where}: {name} has shape {list(there[name])}, and config.json asks for {list(wanted[name])}"
            )
    tied = [name for name in there if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    if config.tie_word_embeddings and len(tied) == 2:
        one, other = (read_tensor(directory, name) for name in tied)
        if not torch.equal(one, other.to(one.dtype)):
            raise RolloutError(
                f"{where}: {tied[0]} and {tied[1]} differ, but config.json ties them: set tie_word_embeddings to"
                " false, or save the model again"
            )


def _check_generation_config(file: Path) -> None:
    """transformers goes on without a file that it cannot read, and so without its end tokens."""
    if file.is_file():
        declared = read_object(file).get("eos_token_id")
        try:
            check_end_tokens(declared)
        except RolloutError as error:
            raise RolloutError(f"{where_is(file.parent)}: {file.name}: {error}") from error


def _check_loaded(info: dict[str, Any], path: str | Path) -> None:
    """Refuse a model that its weights do not fill, or that has no place for some of its layers' weights."""
    where = f"weights in {str(path)!r}"
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            raise RolloutError(f"{where}: {problem.replace('_', ' ')} {sorted(info[problem])[:5]}")
    surplus = sorted(info["unexpected_keys"])
    in_layers = [name for name in surplus if name.startswith("model.layers.")]
    if in_layers:
        raise RolloutError(
            f"{where}: {in_layers[0]} has no place in the model that config.json describes ({len(in_layers)} have none)"
        )
    if surplus:
        logger.warning("weights in %s that the model does not use: %s", path, surplus[:5])


@contextmanager
def _without_adapter(directory: Path) -> Iterator[Path]:
    """The directory, or links to all that it has but an adapter: transformers would apply that if peft is installed."""
    if not (directory / "adapter_config.json").exists():
        yield directory
        return
    logger.warning("model directory %s has an adapter_config.json: the adapter is not applied", directory)
    with TemporaryDirectory() as folder:
        for path in directory.iterdir():
            if not path.name.startswith("adapter_"):
                (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)


@contextmanager
def _transformers_quiet() -> Iterator[None]:
    """Without transformers' own report on loaded weights, since all of it is said here."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def check_matches(config: RolloutConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a configuration that asks for another device or dtype than the module's."""
    if config.dtype != "auto" and getattr(torch, config.dtype) != dtype:
        raise RolloutError(f"dtype={config.dtype!r}, but the module is in {dtype}: convert it, or use auto")
    wanted = resolve_device(config.device)
    if config.device != "auto" and (wanted.type, wanted.index or 0) != (device.type, device.index or 0):
        raise RolloutError(f"device={config.device!r}, but the module is on {device}: move it, or use auto")


def longest_sequence(config: RolloutConfig, model_config: PretrainedConfig) -> int:
    """Longest sequence in tokens: max_model_len, else the model's own limit."""
    limit = int(model_config.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise RolloutError(
            f"max_model_len={config.max_model_len} is more than the model's max_position_embeddings of {limit}"
        )
    return config.max_model_len or limit
