"""Whether a tokenizer goes with a model, and the ids that end a completion."""

import logging

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.errors import RolloutError, short

logger = logging.getLogger(__name__)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for; a model may have more than it knows."""
    # ids may have gaps: how many entries there are says nothing about the highest
    entries = tokenizer.get_vocab().items() if tokenizer is not None else ()
    token, highest = max(entries, key=lambda entry: entry[1], default=("", -1))
    if highest >= vocab_size:
        raise RolloutError(
            f"the tokenizer's ids go up to {highest} ({token!r}), but the model has a vocabulary of {vocab_size}:"
            " use the model's own tokenizer, or resize its embeddings"
        )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that generation_config, config or tokenizer declare as an end token.

    One that the model cannot emit is left out, with a warning. Raises RolloutError if a declared one is no id.
    """
    sources = {
        "generation_config": getattr(model.generation_config, "eos_token_id", None),
        "config": getattr(model.config, "eos_token_id", None),
        "tokenizer": tokenizer.eos_token_id if tokenizer is not None else None,
    }
    vocab_size, ids = model.config.vocab_size, set()
    for source, declared in sources.items():
        for end in check_end_tokens(declared):
            if 0 <= end < vocab_size:
                ids.add(end)
            else:
                what = f"eos_token_id {end} of the {source} is outside the model's vocabulary of {vocab_size}"
                logger.warning("%s and ends no completion", what)
    return frozenset(ids)


def check_end_tokens(declared: object) -> list[int]:
    """An eos_token_id as a list: it may be one id, several or None. Raises RolloutError if it is nothing of these."""
    several = declared if isinstance(declared, list | tuple | set) else [] if declared is None else [declared]
    ids = [i for i in several if isinstance(i, int) and not isinstance(i, bool)]
    if len(ids) < len(several):
        raise RolloutError(f"eos_token_id={short(declared)}: give a token id, a list of them, or null")
    return ids
