"""Prompts to ids, completions to text, and the ids that end a completion."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.errors import RolloutError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A string, token ids, or a list of chat messages."""


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Ids of one prompt: messages through the tokenizer's chat template, strings with one BOS, ids as they are."""
    if isinstance(prompt, str):
        ids = _encode_text(prompt, _need_tokenizer(tokenizer))
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        ids = _encode_messages(prompt, _need_tokenizer(tokenizer))  # type: ignore[arg-type]
    else:
        ids = _ids(prompt)
    if not ids:
        raise RolloutError(f"{_short(prompt)} is empty: it has no tokens, and this tokenizer puts no BOS before it")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise RolloutError(f"token id {outside[0]} is outside the model's vocabulary of {vocab_size}")
    return ids


def _ids(prompt: object) -> list[int]:
    try:
        parts = list(prompt)  # type: ignore[call-overload]
        if not isinstance(prompt, bytes) and not any(isinstance(part, bool) for part in parts):
            return [operator.index(part) for part in parts]
    except TypeError:
        pass
    raise RolloutError(f"{_short(prompt)} is neither a string, a list of token ids nor a list of chat messages")


def _short(prompt: object) -> str:
    text = " ".join(repr(prompt).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _need_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise RolloutError("a text prompt needs a tokenizer, and the engine has none: pass one, or token ids")
    return tokenizer


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RolloutError(f"{_short(text)} has half a surrogate pair, which is no character") from error
    # a string that was rendered by a chat template already has its BOS
    rendered = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not rendered, return_attention_mask=False)["input_ids"]
    return ids


def _encode_messages(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise RolloutError("the prompt is a list of chat messages, but the tokenizer has no chat template: use strings")
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError as error:
        raise RolloutError(f"the chat template refuses {_short(messages)}: {error}") from error
    return ids


_TEXT_CONTEXT = 32
"""Prompt tokens that a completion's text is decoded behind: more than any character or word is made of."""


def decode_completion(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text that the completion adds to the prompt's: special tokens left out, spaces as they are.

    Some tokenizers drop the space before a text's first word, so a completion is decoded behind its prompt's end.
    """

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    before = prompt_ids[-_TEXT_CONTEXT:]
    prompt = decode(before)
    if not prompt:  # special tokens only
        before = prompt_ids
        prompt = decode(before)
    whole = decode([*before, *completion_ids])
    # a prompt that ends inside a character has no text of its own to take away
    return whole[len(prompt) :] if whole.startswith(prompt) else decode(completion_ids)


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that generation_config, config or tokenizer declare as an end token."""
    sources = (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id if hasattr(model.config, "eos_token_id") else None,
        tokenizer.eos_token_id if tokenizer is not None else None,
    )
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return frozenset(ids)
