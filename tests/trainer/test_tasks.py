"""Tasks: what is trained on is never held out, answers are right, and rewards do what their docstrings say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ArithmeticConfig, ConfigError, DatasetConfig
from trainer.data.rows import Row
from trainer.data.tasks import Task, _prompt_key, exact_match, final_answer, make_task, numeric


def _operands(row: Row) -> tuple[int, int]:
    found = re.fullmatch(r"(\d\d)\+(\d\d)=", str(row.prompt))
    assert found is not None
    return int(found[1]), int(found[2])


def _unordered(rows: list[Row]) -> set[frozenset[int]]:
    return {frozenset(_operands(row)) for row in rows}


@pytest.fixture(scope="module", params=[0, 1, 4294967295])
def arithmetic(request: pytest.FixtureRequest) -> Task:
    return make_task(ArithmeticConfig(), request.param)


# -- arithmetic ---------------------------------------------------------------------------------------------------


def test_enough_problems_with_right_answers(arithmetic: Task) -> None:
    for row in arithmetic.train_rows + arithmetic.eval_rows:
        assert row.answer == str(sum(_operands(row)))
        assert len(row.answer) >= 2
        assert row.columns == {"operands": list(_operands(row))}
    assert len({row.prompt for row in arithmetic.train_rows}) == len(arithmetic.train_rows) >= 1000
    assert len({row.prompt for row in arithmetic.eval_rows}) == len(arithmetic.eval_rows) == 256


def test_held_out_problems_share_no_operands_with_the_others(arithmetic: Task) -> None:
    train, held_out = _unordered(arithmetic.train_rows), _unordered(arithmetic.eval_rows)
    assert len(held_out) == 256
    assert not train & held_out
    # 90 numbers of two digits: 90 * 91 / 2 unordered pairs, all of them used, both ways round in training
    assert len(train | held_out) == 4095
    doubles = sum(len(pair) == 1 for pair in train)
    assert len(arithmetic.train_rows) == 2 * len(train) - doubles


def test_split_is_a_function_of_the_seed() -> None:
    splits = [_unordered(make_task(ArithmeticConfig(), seed).eval_rows) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


def test_held_out_problems_are_drawn_from_everywhere(arithmetic: Task) -> None:
    # the mean operand of 256 random pairs is 54.5 with a standard deviation below 1.3: five of them, 1 in a million
    mean = sum(sum(_operands(row)) for row in arithmetic.eval_rows) / 512
    assert abs(mean - 54.5) < 6.5
    swapped = sum(a > b for a, b in map(_operands, arithmetic.eval_rows))
    # every second one is turned round, but for the few whose operands are equal
    assert 110 < swapped <= 128


@pytest.mark.parametrize(
    ("operands", "uniform", "expected"),
    [
        ((47, 38), 0.0, "15+70=85"),
        ((47, 38), 0.34, "15+70=85"),
        ((47, 38), 0.35, "15+70"),
        ((47, 38), 0.999, "15+70"),
        ((10, 20), 0.0, "0+30=30"),
        ((99, 99), 0.0, "18+180=198"),
    ],
)
def test_worked_example(arithmetic: Task, operands: tuple[int, int], uniform: float, expected: str) -> None:
    a, b = operands
    assert arithmetic.worked_example is not None
    assert arithmetic.worked_example(Row(f"{a}+{b}=", str(a + b), {"operands": [a, b]}), uniform) == expected


def test_all_worked_examples_add_up_and_only_finished_ones_earn_a_reward(arithmetic: Task) -> None:
    assert arithmetic.worked_example is not None
    rows = arithmetic.train_rows
    for uniform, rewarded in ((0.0, 1.0), (0.9, 0.0)):
        texts = [arithmetic.worked_example(row, uniform) for row in rows]
        sums = [[sum(map(int, part.split("+"))) for part in text.split("=")] for text in texts]
        assert all(set(values) == {int(row.answer)} for values, row in zip(sums, rows, strict=True))
        assert set(arithmetic.reward(completions=texts, answer=[row.answer for row in rows])) == {rewarded}


@pytest.mark.parametrize(("fraction", "finished"), [(0.0, 0), (0.35, 35), (1.0, 100)])
def test_share_of_finished_worked_examples(fraction: float, finished: int) -> None:
    task = make_task(ArithmeticConfig(finished_fraction=fraction), 0)
    assert task.worked_example is not None
    texts = [task.worked_example(task.train_rows[0], i / 100) for i in range(100)]
    assert sum("=" in text for text in texts) == finished


# -- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("85", " 85 ", 1.0),
        ("85", 85, 1.0),
        ("4.5", 4.5, 1.0),
        ("\u00a0four\u2003", "four", 1.0),
        ("12345678901234567890123", 12345678901234567890123, 1.0),
        ("85.", "85", 0.0),
        ("8 5", "85", 0.0),
        ("Four", "four", 0.0),
        ("", "85", 0.0),
        ("85", "", 0.0),
        ("9007199254740992", 9007199254740993, 0.0),
    ],
)
def test_exact_match(completion: str, answer: object, reward: float) -> None:
    assert exact_match(completions=[completion], answer=[answer], prompts=["p"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("15+70=85", "85", 1.0),
        ("=85 ", "85", 1.0),
        ("85", "85", 1.0),
        ("85=85=85", "85", 1.0),
        ("85=15+70", "85", 0.0),
        ("15+70", "85", 0.0),
        ("15+70=", "85", 0.0),
        ("15+70=850", "85", 0.0),
        ("15+70=8 5", "85", 0.0),
    ],
)
def test_final_answer(completion: str, answer: str, reward: float) -> None:
    assert final_answer(completions=[completion], answer=[answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("the answer is 42", "42", 1.0),
        ("the answer is 42.", 42, 1.0),
        ("first 7, then 42", 42, 1.0),
        ("42, not 7", 42, 0.0),
        ("$1,234.50$", "1234.5", 1.0),
        ("1234", "#### 1,234", 1.0),
        ("x = -5", -5, 1.0),
        ("x = -5", 5, 0.0),
        ("1e3", 1000, 1.0),
        ("2.5E-1", 0.25, 1.0),
        (".5", 0.5, 1.0),
        ("+3", "3.0", 1.0),
        ("1000000", 1000000.9, 1.0),
        ("1000000", 1000002, 0.0),
        ("0", 0, 1.0),
        ("no number", 0, 0.0),
        ("", 1, 0.0),
        ("1", "no number", 0.0),
    ],
)
def test_numeric(completion: str, answer: object, reward: float) -> None:
    assert numeric(completions=[completion], answer=[answer], prompts=["p"]) == [reward]


@pytest.mark.parametrize("function", [exact_match, final_answer, numeric])
def test_one_reward_per_completion_in_order(function: object) -> None:
    assert callable(function)
    assert function(completions=["1", "2", "3", "1"], answer=["1", "1", "3", 2]) == [1.0, 0.0, 1.0, 0.0]


# -- files --------------------------------------------------------------------------------------------------------


def _write(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": i}) + "\n" for i in range(count)))
    return str(path)


def test_held_out_rows_of_a_file_are_taken_out_of_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.jsonl", 40)
    tasks = [make_task(DatasetConfig(kind="jsonl", path=path, eval_rows=15), seed) for seed in (0, 0, 1)]
    for task in tasks:
        train, held_out = ([row.answer for row in rows] for rows in (task.train_rows, task.eval_rows))
        assert sorted(train + held_out) == list(range(40))
        assert (train, held_out) == (sorted(train), sorted(held_out))
        assert len(held_out) == 15
    assert tasks[0] == tasks[1] != tasks[2]
    # not the first or last fifteen: 1 in 20 billion by chance
    assert [row.answer for row in tasks[0].eval_rows] not in (list(range(15)), list(range(25, 40)))


def test_held_out_file_of_its_own(tmp_path: Path) -> None:
    path, eval_path = _write(tmp_path / "rows.jsonl", 4), _write(tmp_path / "eval.jsonl", 2)
    task = make_task(DatasetConfig(kind="jsonl", path=path, eval_path=eval_path, eval_rows=100), 0)
    assert ([row.answer for row in task.train_rows], [row.answer for row in task.eval_rows]) == ([0, 1, 2, 3], [0, 1])
    assert task.worked_example is None
    assert task.reward(completions=["1"], answer=[1]) == [1.0]


def test_nothing_held_out(tmp_path: Path) -> None:
    task = make_task(DatasetConfig(kind="jsonl", path=_write(tmp_path / "rows.jsonl", 3), eval_rows=0), 0)
    assert ([row.answer for row in task.train_rows], task.eval_rows) == ([0, 1, 2], [])


@pytest.mark.parametrize("eval_rows", [5, 6, 100])
def test_holding_out_all_rows_of_a_file_is_refused(tmp_path: Path, eval_rows: int) -> None:
    path = _write(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ConfigError, match=rf"^task\.eval_rows={eval_rows}: .*rows\.jsonl has 5 rows"):
        make_task(DatasetConfig(kind="jsonl", path=path, eval_rows=eval_rows), 0)


@pytest.mark.parametrize("eval_rows", [4095, 5000])
def test_holding_out_all_problems_is_refused(eval_rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"^task\.eval_rows={eval_rows}: there are 4095 problems"):
        make_task(ArithmeticConfig(eval_rows=eval_rows), 0)


def test_holding_out_all_problems_but_one() -> None:
    task = make_task(ArithmeticConfig(eval_rows=4094), 0)
    assert len(_unordered(task.train_rows)) == 1
    assert len(task.eval_rows) == 4094


# -- equal prompts ------------------------------------------------------------------------------------------------


def _twins(path: Path, prompts: list[Any]) -> str:
    """A file with a row for each of the prompts; answers are their places."""
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": i}) + "\n" for i, prompt in enumerate(prompts)))
    return str(path)


def _prompts(rows: list[Row]) -> set[str]:
    return {"chat" if row.prompt in (CHAT, CHAT_NULLS, CHAT_PART) else json.dumps(row.prompt) for row in rows}


CHAT = [{"role": "user", "content": "p"}]
CHAT_TURNED = [{"content": "p", "role": "user"}]
CHAT_NULLS = [{"role": "user", "content": "p", "tool_calls": None, "name": None}]
CHAT_PART = [{"role": "user", "content": [{"type": "text", "text": "p", "cache": None}]}]
CHAT_PARTS = [{"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]}]
FILES = {
    "ten prompts twice each": ([f"p{i % 10}" for i in range(20)], 6),
    "twins side by side": ([f"p{i // 2}" for i in range(20)], 6),
    "one prompt often": (["p"] * 12 + [f"q{i}" for i in range(8)], 6),
    "parts and nulls": ([CHAT, CHAT_NULLS, "p", CHAT_PART, CHAT_PARTS, *(f"q{i}" for i in range(8))], 5),
    "messages": ([CHAT, CHAT_TURNED, "p", CHAT, *(f"q{i}" for i in range(8))], 5),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("prompts", "count"), FILES.values(), ids=FILES.keys())
def test_equal_prompts_go_to_one_side(tmp_path: Path, prompts: list[Any], count: int, seed: int) -> None:
    config = DatasetConfig(kind="jsonl", path=_twins(tmp_path / "rows.jsonl", prompts), eval_rows=count)
    task = make_task(config, seed)
    assert not _prompts(task.train_rows) & _prompts(task.eval_rows)
    assert sorted(row.answer for row in task.train_rows + task.eval_rows) == list(range(len(prompts)))
    assert len(task.eval_rows) == count
    assert task == make_task(config, seed)


def test_fewer_are_held_out_where_twins_would_be_parted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _twins(tmp_path / "rows.jsonl", [f"p{i % 10}" for i in range(20)])
    task = make_task(DatasetConfig(kind="jsonl", path=path, eval_rows=7), 0)
    assert len(task.eval_rows) == 6
    assert "task.eval_rows=7: rows with equal prompts stay together" in caplog.text
    assert "6 are held out" in caplog.text


def test_one_prompt_cannot_be_held_out_from_itself(tmp_path: Path) -> None:
    path = _twins(tmp_path / "rows.jsonl", ["p"] * 5)
    with pytest.raises(ConfigError, match=r"^task\.eval_rows=2: .* no prompt in fewer than 5 rows"):
        make_task(DatasetConfig(kind="jsonl", path=path, eval_rows=2), 0)


def test_held_out_file_with_prompts_that_are_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = (
        _twins(tmp_path / "t.jsonl", ["a", "b", CHAT]),
        _twins(tmp_path / "e.jsonl", ["c", "b", "d", CHAT_TURNED]),
    )
    make_task(DatasetConfig(kind="jsonl", path=path, eval_path=other), 0)
    expected = f"task.eval_path: 2 of 4 held-out rows have prompts that are trained on too, such as {other}:2 ('b')"
    assert caplog.messages == [expected]
    caplog.clear()
    make_task(DatasetConfig(kind="jsonl", path=path, eval_path=_twins(tmp_path / "e.jsonl", ["c", "a "])), 0)
    assert caplog.messages == []


@pytest.mark.parametrize("other", [CHAT_TURNED, CHAT_NULLS, CHAT_PART])
def test_messages_that_say_the_same_are_equal(other: list[Any]) -> None:
    assert _prompt_key(Row(other, 1)) == _prompt_key(Row(CHAT, 2))
    told = [{"role": "user", "content": "pq"}]
    assert _prompt_key(Row(CHAT_PARTS, 1)) == _prompt_key(Row(told, 1)) != _prompt_key(Row(CHAT, 1))


def test_every_row_has_the_fields_of_its_file(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "answer": 1, "level": 3},
        {"prompt": "b", "answer": 2, "unit": "m"},
        {"prompt": "c", "answer": 3},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = make_task(DatasetConfig(kind="jsonl", path=str(path), eval_rows=0), 0).train_rows
    assert [row.columns for row in rows] == [
        {"level": 3, "unit": None},
        {"level": None, "unit": "m"},
        {"level": None, "unit": None},
    ]
    one = DatasetConfig(kind="jsonl", path=str(path), eval_rows=1)
    held_out = [make_task(one, seed).eval_rows[0] for seed in range(5)]
    assert all(row.columns.keys() == {"level", "unit"} for row in held_out)
