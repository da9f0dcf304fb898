"""Models from a directory, checked before they are used."""

import inspect
import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rollout.config import RolloutConfig
from rollout.errors import RolloutError

logger = logging.getLogger(__name__)

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen2", "llama")
"""Families whose attention has been checked to go through the engine's alone."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""`dynamic` and `longrope` depend on the longest position in the batch, so a rollout would depend on its neighbours."""


def resolve_device(device: str) -> torch.device:
    """The device that a configuration names; "auto" takes CUDA where it is."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RolloutError(f"device={device!r}: this machine has no CUDA device; use device=cpu or auto")
    return torch.device(device)


def _unsupported(model_type: str | None) -> RolloutError:
    return RolloutError(f"model_type={model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")


def default_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: what the model is stored in; float16 becomes bf16 on CUDA and fp32 on a CPU."""
    stored = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if stored in (torch.float32, torch.bfloat16):
        assert isinstance(stored, torch.dtype)
        return stored
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_config(config: PretrainedConfig) -> None:
    """Refuse a model kind that the engine cannot run right."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise _unsupported(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in rope.values() if isinstance(part, dict)}
    for kind in kinds or {rope.get("rope_type", "default")}:
        if kind not in SUPPORTED_ROPE_TYPES:
            raise RolloutError(f"rope_type={kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    if getattr(config, "quantization_config", None):
        raise RolloutError("quantised checkpoints are not supported: load the model in float32 or bfloat16")


def check_module(module: nn.Module) -> PreTrainedModel:
    """Refuse a module that is not a causal language model of a supported kind."""
    if not isinstance(module, PreTrainedModel) or "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise RolloutError(f"{type(module).__name__} is not a causal language model of transformers")
    check_config(module.config)
    dtypes = {p.dtype for p in module.parameters()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise RolloutError(f"parameters are in {sorted(map(str, dtypes))}: use one of float32 and bfloat16 for all")
    return module


def check_directory(path: str | Path, *, needs_tokenizer: bool = True) -> Path:
    """The model directory, after checking that config, weights and tokenizer are there."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise RolloutError(f"model directory {str(path)!r} does not exist")
    if not (directory / "config.json").is_file():
        raise RolloutError(f"model directory {str(path)!r} has no config.json")
    if not any(directory.glob("*.safetensors")):
        raise RolloutError(f"model directory {str(path)!r} has no weights (*.safetensors)")
    if needs_tokenizer and not any(
        (directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise RolloutError(f"model directory {str(path)!r} has no tokenizer (tokenizer.json or tokenizer_config.json)")
    return directory


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory."""
    directory = check_directory(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RolloutError(f"model directory {str(path)!r}: its tokenizer does not load ({error})") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_config(path: str | Path) -> PretrainedConfig:
    """The config of a model directory, checked; no weights are read."""
    directory = check_directory(path, needs_tokenizer=False)
    try:
        model_type = json.loads((directory / "config.json").read_text()).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RolloutError(f"model directory {str(path)!r}: config.json is not JSON ({error})") from error
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise _unsupported(model_type)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    check_config(config)
    return config


def load_model(path: str | Path, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """A causal language model from a directory of safetensors, in `dtype`, on `device`, in eval mode."""
    directory, config = check_directory(path, needs_tokenizer=False), load_config(path)
    device = torch.device(device)
    wanted = default_dtype(config.dtype, device) if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and config.dtype is not None and config.dtype != wanted:
        logger.warning("model is stored in %s; dtype=auto runs it in %s", config.dtype, wanted)
    # `.to(bfloat16)` after loading would round the rotary frequencies too
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=wanted,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the others
        )
    except SafetensorError as error:
        raise RolloutError(f"model directory {str(path)!r}: its weights do not load ({error})") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            raise RolloutError(f"weights in {str(path)!r}: {problem.replace('_', ' ')} {sorted(info[problem])[:5]}")
    if info["unexpected_keys"]:
        logger.warning("weights in %s that the model does not use: %s", path, sorted(info["unexpected_keys"])[:5])
    return check_module(model).to(device).eval()


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
