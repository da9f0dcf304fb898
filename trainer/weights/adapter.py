"""LoRA (arXiv 2106.09685): peft's layers inside the model's own modules, whose class stays what it is."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout.memory import skeleton
from trainer.config import AdapterConfig, ConfigError, LoraConfig
from trainer.config.model_options import ALL_LINEAR
from trainer.data.rows import ADAPTER_PURPOSE


def check_peft() -> None:
    """Raises ConfigError where peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(
            "adapter=lora needs peft, which is not installed: pip install -c constraints.txt -e '.[peft]'"
        )


def check_adapter(config: AdapterConfig, described: PretrainedConfig) -> None:
    """Refuse, before weights are loaded, an adapter that peft is missing for, or a name that no linear layer has."""
    if not isinstance(config, LoraConfig):
        return
    check_peft()
    if config.target_modules == ALL_LINEAR:
        return
    model = skeleton(described, torch.float32)
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    there = sorted({name.rpartition(".")[2] for name in linear})
    for name in config.target_modules:
        if name not in there:
            raise ConfigError(
                f"adapter.target_modules={name!r}: is none of the model's linear layers; use {ALL_LINEAR}, or some of"
                f" {', '.join(there)}"
            )


def inject(module: PreTrainedModel, config: AdapterConfig, *, seed: int = 0, base: Path | None = None) -> None:
    """Freeze the weights and put an adapter beside them, in their dtype; adapter=none changes nothing.

    A fresh adapter computes nothing yet (B is 0). A is drawn from `seed` alone, and torch's global generator is left as
    it was. base: the directory that the weights are from, for whoever loads the adapter.
    """
    if not isinstance(config, LoraConfig):
        return
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = config.target_modules
    chosen = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets if targets == ALL_LINEAR else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None else str(base.resolve()),
    )
    dtype = module.dtype
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ADAPTER_PURPOSE << 32 | seed)
        inject_adapter_in_model(chosen, module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
