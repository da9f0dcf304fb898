"""The model as the engine runs it: read from disk, views over the caller's tensors, KV storage."""

from rollout.manifest import MANIFEST, find_damage, flush, flush_directory, write_manifest
from rollout.model.adapters import switch_adapter
from rollout.model.builtin import build_tiny, tiny_config, tiny_tokenizer
from rollout.model.files import find_directory
from rollout.model.kv_cache import LayerGroup, layer_groups
from rollout.model.loading import (
    check_directory,
    default_dtype,
    load_model,
    load_tokenizer,
    longest_sequence,
    model_shapes,
    read_config,
    resolve_device,
)
from rollout.model.numerics import Numerics
from rollout.model.views import training_view

__all__ = [
    "MANIFEST",
    "LayerGroup",
    "Numerics",
    "build_tiny",
    "check_directory",
    "default_dtype",
    "find_damage",
    "find_directory",
    "flush",
    "flush_directory",
    "layer_groups",
    "load_model",
    "load_tokenizer",
    "longest_sequence",
    "model_shapes",
    "read_config",
    "resolve_device",
    "switch_adapter",
    "tiny_config",
    "tiny_tokenizer",
    "training_view",
    "write_manifest",
]
