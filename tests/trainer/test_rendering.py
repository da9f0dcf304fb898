"""A row's fields for its chat template reach it, or are refused."""

from typing import Any

import pytest

from rollout import ChatPrompt
from rollout.prompts import encode_prompt
from tiny_models import TEXT_VOCAB, TOOL_CHAT_TEMPLATE, byte_tokenizer
from trainer.config import ConfigError
from trainer.rendering import prompt_of
from trainer.rows import Row

HELLO = [{"role": "user", "content": "Hi!"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize("own", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("shared", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_rows_fields_reach_its_template(own: dict[str, Any], shared: dict[str, Any], tools: Any) -> None:
    """The row's own arguments come before those of all rows."""
    tokenizer = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
    columns = {"chat_template_kwargs": own or None, "tools": tools}
    ids = encode_prompt(prompt_of(Row(HELLO, 1, columns), shared), tokenizer, TEXT_VOCAB)
    expected = tokenizer.apply_chat_template(
        HELLO, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **(shared | own)
    )
    assert ids == expected


def test_a_row_without_such_fields_is_its_prompt() -> None:
    assert prompt_of(Row("Hi!", 1, {"level": 3})) == "Hi!"
    assert prompt_of(Row(HELLO, 1)) == ChatPrompt(HELLO)
    assert prompt_of(Row("Hi!", 1, {"tools": None, "chat_template_kwargs": {}})) == "Hi!"


@pytest.mark.parametrize(
    ("row", "shared", "message"),
    [
        (Row("Hi!", 1, {"tools": TOOLS}), {}, "tools are for a chat template, and this prompt is text"),
        (Row("Hi!", 1, {"chat_template_kwargs": {"a": 1}}), {}, "chat_template_kwargs are for a chat template"),
        (Row("Hi!", 1), {"a": 1}, "chat_template_kwargs are for a chat template"),
        (Row(HELLO, 1, {"tools": "[]"}), {}, r"tools='\[\]': give a list of JSON schemas"),
        (Row(HELLO, 1, {"tools": {"name": "add"}}), {}, "tools=.*: give a list"),
        (Row(HELLO, 1, {"chat_template_kwargs": ["a"]}), {}, r"chat_template_kwargs=\['a'\]: give an object"),
        (Row(HELLO, 1, {"chat_template_kwargs": False}), {}, "chat_template_kwargs=False: give an object"),
    ],
    ids=str,
)
def test_fields_that_would_be_dropped_are_named(row: Row, shared: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prompt_of(row, shared)
