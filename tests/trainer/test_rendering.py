"""Prompts rendered once with what their rows have for the template, and kept as they were."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny_models
from rollout import ChatPrompt
from rollout.engine.prompts import encode_prompt
from tiny_models import TEXT_VOCAB, TOOL_CHAT_TEMPLATE, byte_tokenizer
from trainer.config import ConfigError
from trainer.data.prompts import PromptSettings
from trainer.data.rendering import kept_prompts, prompt_of, render_rows, restore_prompts
from trainer.data.rows import Row
from trainer.data.tasks import Task, exact_match

TOKENIZER = tiny_models.byte_tokenizer()
TRAIN = [Row("12+3=", "15"), Row([{"role": "user", "content": "é"}], 1), Row("x" * 300, "")]


@pytest.mark.parametrize("held_out", [[], [Row("held", "out")]])
def test_ids_come_back_through_a_file_as_they_were_rendered(tmp_path: Path, held_out: list[Row]) -> None:
    train, evaluation = (
        render_rows(TRAIN, TOKENIZER, TEXT_VOCAB, "train"),
        render_rows(held_out, TOKENIZER, TEXT_VOCAB, "eval"),
    )
    expected = [encode_prompt(row.prompt, TOKENIZER, len(TOKENIZER)) for row in TRAIN]
    assert [row.engine_prompt for row in train] == expected
    save_file(kept_prompts(Task("t", train, evaluation, exact_match)), tmp_path / "prompts.safetensors")
    kept = load_file(tmp_path / "prompts.safetensors")
    assert [row.engine_prompt for row in restore_prompts(TRAIN, kept, "train")] == expected
    assert [row.prompt_ids for row in restore_prompts(held_out, kept, "eval")] == [r.prompt_ids for r in evaluation]
    with pytest.raises(ConfigError, match="prompts are kept of 3 train rows, and the task has 2"):
        restore_prompts(TRAIN[:2], kept, "train")


def test_row_that_was_not_rendered_gives_its_prompt() -> None:
    assert [row.engine_prompt for row in TRAIN] == [row.prompt for row in TRAIN]
    assert render_rows(TRAIN, TOKENIZER, TEXT_VOCAB, "train") == TRAIN  # the reward's row is the same


@pytest.mark.parametrize("prompt", ["", [{"role": "user"}, "text"]])
def test_row_that_cannot_be_rendered_is_named(prompt: object) -> None:
    with pytest.raises(ConfigError, match=r"^task: eval row b.jsonl:2 \("):
        render_rows([TRAIN[0], Row(prompt, "", source="b.jsonl:2")], TOKENIZER, TEXT_VOCAB, "eval")  # type: ignore[arg-type]


PLAIN = PromptSettings()
HELLO = [{"role": "user", "content": "Hi!"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize("own", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("shared", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_rows_fields_reach_its_template(own: dict[str, Any], shared: dict[str, Any], tools: Any) -> None:
    """The row's own arguments come before those of all rows."""
    tokenizer = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
    columns = {"chat_template_kwargs": own or None, "tools": tools}
    settings = PromptSettings(template_kwargs=shared)
    ids = encode_prompt(prompt_of(Row(HELLO, 1, columns), settings), tokenizer, TEXT_VOCAB)
    expected = tokenizer.apply_chat_template(
        HELLO, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **(shared | own)
    )
    assert ids == expected


def test_a_row_without_such_fields_is_its_prompt() -> None:
    assert prompt_of(Row("Hi!", 1, {"level": 3}), PLAIN) == "Hi!"
    assert prompt_of(Row(HELLO, 1), PLAIN) == ChatPrompt(HELLO)
    assert prompt_of(Row("Hi!", 1, {"tools": None, "chat_template_kwargs": {}}), PLAIN) == "Hi!"


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
        prompt_of(row, PromptSettings(template_kwargs=shared))
