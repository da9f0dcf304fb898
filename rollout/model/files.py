"""What lies in a model directory, looked at file by file before a library reads it."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.activations import ACT2FN

from rollout.config import is_kind
from rollout.errors import RolloutError, short
from rollout.model.families import family_named

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NULLABLE_SIZES = ("num_key_value_heads", "head_dim")
_READ_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".txt")
_UNREAD_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors")
_PLACES_BELOW = ("snapshots/*", "*/snapshots/*", "checkpoints/*/model", "*")
"""Where models lie below directories that are given in their place: a hub's cache, a training run."""
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
_SWITCHES = (
    "use_cache",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "output_attentions",
    "output_hidden_states",
    "torchscript",
)
_LAYER_TYPES = ("full_attention", "sliding_attention")
_STORED_AS = ("F32", "BF16", "F16", "F64")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever a library raises on a file that it can make no sense of is an error of that file: `what` names it."""
    try:
        yield
    except (RolloutError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises no narrower one, transformers any
        raise RolloutError(f"{what} ({type(error).__name__}: {short(error)})") from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises RolloutError naming the file if there is none."""
    where = f"{where_is(file.parent)}: {file.name}"
    if not file.exists():
        raise RolloutError(f"{where} is missing")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RolloutError(f"{where} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"{where} is not JSON ({short(error)}): copy it again") from error
    if not isinstance(value, dict):
        raise RolloutError(f"{where} holds {short(value)}, not a JSON object")
    return value


def where_is(directory: str | Path) -> str:
    """How messages begin that are about a model directory."""
    return f"model directory {str(directory)!r}"


def find_directory(path: str | Path) -> Path:
    """The directory that a user named. Raises RolloutError saying what stands in its place, or which links are dead."""
    directory = Path(path).expanduser()
    if directory.is_file():
        raise RolloutError(f"{where_is(path)} is a file: give the directory that holds config.json")
    if not directory.is_dir():
        raise RolloutError(
            f"{where_is(path)} does not exist; only local directories are read: download a model from a hub first"
        )
    for file in sorted(directory.iterdir()):
        if file.suffix in _READ_SUFFIXES and not file.exists():
            target = str(file.readlink())
            raise RolloutError(f"{where_is(path)}: {file.name} is a link to {target!r}, which does not exist")
    if not (directory / "config.json").is_file():
        raise RolloutError(f"{where_is(path)} has no config.json{_instead(directory)}")
    return directory


def _instead(directory: Path) -> str:
    """A hint at what a directory without a model is."""
    for pattern in _PLACES_BELOW:
        below = [file.parent for file in directory.glob(f"{pattern}/config.json")]
        if below:
            return f": a model is in {str(max(below, key=lambda path: path.stat().st_mtime))!r}"
    base = _adapters_base(directory)
    if base is not None:
        return f": it holds an adapter only (adapter_config.json); merge it into its base model{base} and give that"
    others = [file.name for file in sorted(directory.iterdir()) if file.suffix in _UNREAD_WEIGHTS]
    if others:
        return f": {others[0]} is not read; save the model as {WEIGHTS}, or as shards with {WEIGHTS_INDEX}"
    return ""


def _adapters_base(directory: Path) -> str | None:
    file = directory / "adapter_config.json"
    if not file.is_file():
        return None
    base = read_object(file).get("base_model_name_or_path")
    return f" {base!r}" if isinstance(base, str) else ""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors that hold a model's weights, each there as a whole."""
    single, index = directory / WEIGHTS, directory / WEIGHTS_INDEX
    where = where_is(directory)
    if single.is_file():
        return [single]
    if not index.is_file():
        raise RolloutError(f"{where} has no weights (*.safetensors){_instead(directory)}")
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise RolloutError(f"{where}: {index.name} has no weight_map of tensors to files")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        rest = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RolloutError(f"{where}: {missing[0]} is missing; {index.name} names it{rest}")
    return [directory / name for name in names]


def weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a directory's weights, by the files' headers. Raises RolloutError naming a bad file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        where = f"{where_is(directory)}: its weights do not load ({file.name}:"
        try:
            with safe_open(file, framework="pt") as tensors:
                headers = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  no mapping
        except (SafetensorError, OSError) as error:
            raise RolloutError(f"{where} {short(error)}): copy it again") from error
        for name, header in headers.items():
            if header.get_dtype() not in _STORED_AS:
                raise RolloutError(f"{where} {name} is stored as {header.get_dtype()}): quantised weights are not read")
            shapes[name] = tuple(header.get_shape())
    return shapes


def read_tensor(directory: Path, name: str) -> torch.Tensor:
    """One tensor of a directory's weights."""
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  no mapping
                tensor: torch.Tensor = tensors.get_tensor(name)
                return tensor
    raise KeyError(name)


def check_tokenizer_files(directory: Path) -> None:
    """Raise if a directory has no tokenizer, or one of its files is no JSON."""
    there = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not any(file.name in _TOKENIZER_FILES[:2] for file in there):
        raise RolloutError(f"{where_is(directory)} has no tokenizer (tokenizer.json or tokenizer_config.json)")
    for file in there:
        read_object(file)


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse what no model can be made of among the values of a config.json."""

    def require(ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise RolloutError(f"{name}={short(values.get(name))}: {wanted}")

    for name in (*_SIZES, *_NULLABLE_SIZES, "max_position_embeddings"):
        value: Any = values.get(name)
        left_out = name not in values or (value is None and name in _NULLABLE_SIZES)
        fits = is_kind(int, value) and value >= 1
        require(fits or (left_out and name not in _SIZES), name, "must be a whole number, at least 1")
    heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads")
    require(
        kv_heads is None or heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads={heads}"
    )
    for name in ("rms_norm_eps", "rope_theta"):
        require(name not in values or _is_positive(values[name]), name, "must be a number above 0")
    require(values.get("hidden_act", "silu") in list(ACT2FN), "hidden_act", "is no activation of transformers")
    for name in ("dtype", "torch_dtype"):
        dtype = values.get(name)
        require(dtype is None or dtype in _DTYPES, name, f"must be one of {', '.join(_DTYPES)}")
    pad = values.get("pad_token_id")
    inside = pad is None or (is_kind(int, pad) and -1 <= pad < values["vocab_size"])  # -1: none, in older files
    require(inside, "pad_token_id", f"must be in the vocabulary of {values['vocab_size']}")
    for name in _SWITCHES:
        require(isinstance(values.get(name), bool | None), name, "must be true or false")
    require(values.get("return_dict", True) is True, "return_dict", "must be true, or left out")
    _check_layers(values, require)
    for name in ("rope_parameters", "rope_scaling"):
        require(values.get(name) is None or isinstance(values[name], dict), name, "must be an object")
        _check_rope(values.get(name) or {}, name)


def _check_layers(values: Mapping[str, Any], require: Callable[[bool, str, str], None]) -> None:
    """Kinds of layers, one per layer, and the window that some of them need."""
    kinds, window, layers = values.get("layer_types"), values.get("sliding_window"), values["num_hidden_layers"]
    fits = window is None or (is_kind(int, window) and window >= 1)
    require(fits, "sliding_window", "must be a whole number, at least 1, or null")
    if kinds is None:
        return
    known = isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds)
    require(
        known and len(kinds) == layers, "layer_types", f"must be a list of {layers}, of {' and '.join(_LAYER_TYPES)}"
    )
    if "sliding_attention" in kinds and family_named(values["model_type"]).slides:
        has_window = values.get("use_sliding_window", False) and values.get("sliding_window", 1) is not None
        require(has_window, "layer_types", "sliding_attention needs use_sliding_window=true and a sliding_window")


def _check_rope(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        if name in ("rope_type", "type") and not isinstance(value, str):
            raise RolloutError(f"{where}.{name}={short(value)}: must be a name")
        if isinstance(value, dict):  # one per kind of layer
            _check_rope(value, f"{where}.{name}")
        elif name in _ROPE_NUMBERS and value is not None and not _is_positive(value):
            raise RolloutError(f"{where}.{name}={short(value)}: must be a number above 0")


def _is_positive(value: Any) -> bool:
    return is_kind((int, float), value) and 0 < value < math.inf
