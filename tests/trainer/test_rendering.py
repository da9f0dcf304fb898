"""Prompts rendered once, and kept as they were."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tiny_models
from rollout.prompts import encode_prompt
from trainer.config import ConfigError
from trainer.rendering import kept_prompts, render_rows, restore_prompts
from trainer.rows import Row
from trainer.tasks import Task, exact_match

TOKENIZER = tiny_models.byte_tokenizer()
TRAIN = [Row("12+3=", "15"), Row([{"role": "user", "content": "é"}], 1), Row("x" * 300, "")]


@pytest.mark.parametrize("held_out", [[], [Row("held", "out")]])
def test_ids_come_back_through_a_file_as_they_were_rendered(tmp_path: Path, held_out: list[Row]) -> None:
    train, evaluation = render_rows(TRAIN, TOKENIZER, "train"), render_rows(held_out, TOKENIZER, "eval")
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
    assert render_rows(TRAIN, TOKENIZER, "train") == TRAIN  # the reward's row is the same


@pytest.mark.parametrize("prompt", ["", [{"role": "user"}, "text"]])
def test_row_that_cannot_be_rendered_is_named(prompt: object) -> None:
    with pytest.raises(ConfigError, match=r"^task: eval row 1: "):
        render_rows([TRAIN[0], Row(prompt, "")], TOKENIZER, "eval")  # type: ignore[arg-type]
