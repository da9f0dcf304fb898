"""The built-in tiny model: a Qwen3 shape of 2.4 million parameters and a byte tokenizer, made locally."""

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout.manifest import find_damage
from rollout.torch_state import own_torch_state
from rollout_kernels.cache import cache_directory

logger = logging.getLogger(__name__)

_SPECIAL_TOKENS = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every text can be encoded and digits are tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(_SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_config() -> Qwen3Config:
    """Four layers of width 256, two kv heads of 64."""
    return Qwen3Config(
        vocab_size=len(_SPECIAL_TOKENS) + 256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


@own_torch_state()
def build_tiny(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The tiny model with fp32 weights drawn from `seed`, and its tokenizer; torch's global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(tiny_config(), dtype=torch.float32).eval()
    return model, tiny_tokenizer()


def warm_started_directory() -> Path | None:
    """The newest undamaged warm-started tiny model that a training run left in the cache, or None."""
    found = [path.parent for path in cache_directory().glob("warm_start/[!.]*/config.json")]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning("%s in the cache is damaged and not used: %s", path, damage)
    return None
