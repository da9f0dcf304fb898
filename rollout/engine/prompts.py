"""Prompts to ids, and completions to text."""

import operator
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from rollout.engine.chat import ChatPrompt, Message, check_characters, encode_chat
from rollout.errors import RolloutError, short

Prompt = str | Sequence[int] | Sequence[Message] | ChatPrompt
"""A string, token ids, a list of chat messages, or such a list with tools and arguments for its template."""


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Ids of one prompt: messages through the tokenizer's chat template, strings with one BOS, ids as they are.

    vocab_size: the model's. A tokenizer's own count is no bound of its ids, which may have gaps.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, _need_tokenizer(tokenizer))
    elif isinstance(prompt, ChatPrompt):
        ids = encode_chat(prompt, _need_tokenizer(tokenizer))
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        ids = encode_chat(ChatPrompt(prompt), _need_tokenizer(tokenizer))  # type: ignore[arg-type]
    else:
        ids = _ids(prompt)
    if not ids:
        raise RolloutError(f"{short(prompt)} is empty: it has no tokens, and this tokenizer puts no BOS before it")
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
    raise RolloutError(f"{short(prompt)} is neither a string, a list of token ids nor a list of chat messages")


def _need_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise RolloutError("a text prompt needs a tokenizer, and the engine has none: pass one, or token ids")
    return tokenizer


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    check_characters(text)
    # a string that was rendered by a chat template already has its BOS
    rendered = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids, added = _encoded(text, tokenizer, add_special_tokens=not rendered)
    if not added or not added[-1]:
        return ids
    # the tokenizer closes texts, with an end token as a rule, and a prompt is to be continued; one without tokens of
    # its own does not show what is put before it and what behind
    shows = _encoded("a", tokenizer, add_special_tokens=True)[1] if all(added) else added
    before = next((place for place, by_tokenizer in enumerate(shows) if not by_tokenizer), 0)
    return ids[:before] + _encoded(text, tokenizer, add_special_tokens=False)[0]


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
    """Ids of a whole text, and for each whether the tokenizer has added it (1) or the text has it (0)."""
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, return_attention_mask=False, return_special_tokens_mask=True
    )
    return encoded["input_ids"], encoded["special_tokens_mask"]


_TEXT_CONTEXT = 32
"""Prompt tokens that a completion's text is decoded behind: more than any character or word is made of."""


def decode_completion(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    skip_special_tokens: bool = True,
) -> str:
    """The text that the completion adds to the prompt's: special tokens left out unless asked for, spaces as they are.

    Some tokenizers drop the space before a text's first word, so a completion is decoded behind its prompt's end.
    """

    def decode(ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        try:
            text = tokenizer.decode(list(ids), **options)
        except (ValueError, LookupError, TypeError):  # written in Python, and an id of the model's alone
            known = set(tokenizer.get_vocab().values())
            text = tokenizer.decode([i for i in ids if i in known], **options)
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
