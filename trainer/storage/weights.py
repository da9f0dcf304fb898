"""What a checkpoint keeps of the model: all weights, as transformers saves them, or its adapter, as peft does."""

import copy
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER, _WEIGHTS = "default", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft's own wrapper puts before a module's names."""


def _has_adapter(module: PreTrainedModel) -> bool:
    return hasattr(module, "peft_config")


def kept_tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    """The module's own tensors that a checkpoint keeps, by their names in it; tied ones under each of their names."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if not _has_adapter(module):
        return state
    from peft import get_peft_model_state_dict

    of_adapter = get_peft_model_state_dict(module, state, _ADAPTER, save_embedding_layers=False)
    return {_PREFIX + name: tensor for name, tensor in of_adapter.items()}


def save_weights(module: PreTrainedModel, directory: Path) -> None:
    """Write the weights, or the adapter alone, with the configuration that transformers, or peft, reads them by."""
    if not _has_adapter(module):
        module.save_pretrained(directory)
        return
    directory.mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in kept_tensors(module).items()}
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(module.peft_config[_ADAPTER])
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)
    config.save_pretrained(directory)
