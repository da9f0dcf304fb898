"""Which columns are prompt and answer: named by the user, in several forms, and refused with what there is."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, DatasetConfig
from trainer.data.rows import Row
from trainer.data.tasks import Task, check_answers, exact_match, make_task, numeric

USER = {"role": "user", "content": "1+1?"}
TWO = {"role": "assistant", "content": "2"}


def _task(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Task:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task(DatasetConfig(path=str(path), **options), 0)


GSM8K = {"prompt_column": "question", "answer_after": "####", "kind": "gsm8k"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Half of 48 is 24.\nAll: 48+24=<<48+24=72>>72\n#### 72", "72"),
        ("So $1,080.\n#### 1,080", "1,080"),
        ("#### not yet\n#### -3", "-3"),
        ("####5 \n", "5"),
    ],
)
def test_gsm8k(tmp_path: Path, answer: str, expected: str) -> None:
    task = _task(tmp_path, [{"question": "How many?", "answer": answer, "id": 7}], **GSM8K)
    assert task.train_rows == [Row("How many?", expected, {"id": 7})]
    assert task.reward is numeric
    number = expected.replace(",", "")
    said = [f"It is {number}.", f"#### {expected}", "1"]
    assert task.reward(completions=said, answer=[expected] * 3) == [1.0, 1.0, 0.0]
    check_answers(task.reward, task.train_rows)


@pytest.mark.parametrize("answer", ["72", "#### ", "", "## 72", 72, ["#### 72"]])
def test_an_answer_without_the_marker_is_named(tmp_path: Path, answer: Any) -> None:
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": answer}]
    with pytest.raises(ConfigError, match=r"^task\.path: .*rows\.jsonl:2: nothing follows task\.answer_after='####'"):
        _task(tmp_path, rows, **GSM8K)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "no 'prompt'; the columns are question, solution, answer: name one by task.prompt_column"),
        ({"prompt_column": "q"}, "no 'q'; the columns are question, solution, answer: name one by task.prompt_column"),
        (
            {"prompt_column": "question", "answer_column": "a"},
            "no 'a'; the columns are question, solution, answer: name one by task.answer_column",
        ),
        ({"prompt_column": "question", "answer_column": "solution"}, "field 'answer' is what rewards are called with"),
        ({"prompt_column": "question", "answer_column": None}, "field 'answer' is what rewards are called with"),
    ],
)
def test_a_column_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, options: dict[str, str], named: str
) -> None:
    rows = [{"question": "a", "solution": "b", "answer": 1}, {"question": "c", "solution": "d", "answer": 2}]
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, rows, **options)
    assert str(caught.value).startswith(f"task.path: {tmp_path / 'rows.jsonl'}:1: ")
    assert named in str(caught.value)


def test_a_row_that_lacks_a_column_of_others_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: the row has no 'answer'$"):
        _task(tmp_path, [{"prompt": "a", "answer": 1}, {"prompt": "a"}])


def test_renamed_columns_leave_the_others_to_the_reward(tmp_path: Path) -> None:
    rows = [{"question": "a", "label": 1, "prompt": "p", "id": 2}]
    task = _task(tmp_path, rows, prompt_column="question", answer_column="label")
    assert task.train_rows == [Row("a", 1, {"prompt": "p", "id": 2})]


@pytest.mark.parametrize("reward", [exact_match, numeric])
def test_rows_without_answers_need_a_reward_that_does_without(tmp_path: Path, reward: Any) -> None:
    rows = _task(tmp_path, [{"prompt": "a", "id": 1}], answer_column=None).train_rows
    assert rows == [Row("a", None, {"id": 1})]
    check_answers(lambda completions: [0.0] * len(completions), rows)
    with pytest.raises(ConfigError, match=r"^task\.answer_column: .*rows\.jsonl:1 \('a'\) has no answer"):
        check_answers(reward, rows)


# -- chats --------------------------------------------------------------------------------------------------------


def test_a_prompt_of_messages(tmp_path: Path) -> None:
    task = _task(tmp_path, [{"prompt": [USER], "answer": "2"}, {"prompt": "text", "answer": "3"}])
    assert [row.prompt for row in task.train_rows] == [[USER], "text"]


def test_a_conversation_whose_last_turn_is_the_answer(tmp_path: Path) -> None:
    conversation = [USER, TWO, {"role": "user", "content": "And 2+2?"}, {"role": "assistant", "content": "4"}]
    options = {"prompt_column": "messages", "answer_column": "messages"}
    rows = _task(tmp_path, [{"messages": [USER, TWO]}, {"messages": conversation}], **options).train_rows
    assert rows == [Row([USER], "2"), Row(conversation[:-1], "4")]


@pytest.mark.parametrize("messages", [[USER], [TWO], [TWO, USER], "text", [USER, TWO | {"content": None}]])
def test_a_conversation_without_an_answer_is_named(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: messages is to give prompt and answer"):
        _task(tmp_path, [{"messages": messages}], prompt_column="messages", answer_column="messages")
