"""What of a model's generation_config goes with the weights."""

from transformers import GenerationConfig, PreTrainedModel


def keep_special_ids(module: PreTrainedModel) -> None:
    """Keep the special ids only: contradictory sampling defaults of a model would make every save fail."""
    old = module.generation_config
    ids = {name: getattr(old, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    module.generation_config = GenerationConfig(**{name: value for name, value in ids.items() if value is not None})
