"""`python -m trainer.grade`: the table and the lines say what a reward gives, and what it did instead."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.grade import main

LINES: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "is 2", "answer": "2", "level": 1},
    {"prompt": "2+2=", "completion": "five", "answer": 4, "level": 2},
    {"prompt": [{"role": "user", "content": "3+3?"}], "completion": "sleep", "answer": 6},
]
JUDGE = """
import time
def judge(completions, level):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    for text in texts:
        if text == "sleep":
            time.sleep(1e6)
        if text == "five":
            raise ValueError("five")
    return [float(value) for value in level]
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    Path("judge.py").write_text(JUDGE)


def _graded(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["rows.jsonl", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_table_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _graded(capsys, "reward=numeric")
    assert (status, err) == (0, "")
    cells = [re.split(r"  +", line) for line in out.splitlines()]
    assert cells == [
        ["row", "reward", "numeric", "answer", "completion"],
        ["rows.jsonl:1", "1", "1", '"2"', '"is 2"'],
        ["rows.jsonl:2", "0", "0", '"4"', '"five"'],
        ["rows.jsonl:3", "0", "0", '"6"', '"sleep"'],
        ["rewards/numeric/mean 0.3333", "rewards/numeric/std 0.5774", "rewards/numeric/failed 0", "rewards/unscored 0"],
    ]


BOTH = ["reward=functions", "reward.functions=[numeric,{path: judge.py:judge, weight: 0.5}]"]
BOTH += ["reward.workers=1", "reward.timeout=1"]


def test_failures_stand_with_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _graded(capsys, *BOTH)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert re.match(r"rows\.jsonl:1 +1\.5 +1 +1 ", lines[1])
    assert re.match(r"rows\.jsonl:2 +0 +0 +- ", lines[2])
    assert re.fullmatch(r" +reward judge raised ValueError: five at .*judge\.py:9", lines[3])
    assert lines[5].strip() == "reward judge took more than reward.timeout=1 s and was ended"


def test_lines_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _graded(capsys, "--json", *BOTH, "reward.on_timeout=-1")
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 1
    assert records[0] == {
        "row": "rows.jsonl:1",
        "reward": 1.5,
        "rewards": {"numeric": 1.0, "judge": 1.0},
        "failures": {},
    }
    assert [(record["reward"], record["rewards"]["judge"]) for record in records[1:]] == [(0.0, None), (-0.5, -1.0)]
    assert [list(record["failures"]) for record in records] == [[], ["judge"], ["judge"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nosuch.jsonl"], "error: FILE: file 'nosuch.jsonl' does not exist"),
        (["rows.jsonl", "reward=nosuch"], "error: In 'config': Could not find 'reward/nosuch'"),
        (["rows.jsonl", "reward.nosuch=1"], "error: Could not override 'reward.nosuch'"),
        (["rows.jsonl", "reward=regex"], "error: reward.pattern: reward=regex needs a regular expression"),
        (["rows.jsonl", "reward=regex", "'reward.pattern=[[]'"], "error: "),
        (["rows.jsonl", "reward.timeout=3"], "error: reward.timeout=3.0: a function in the trainer's own process"),
        (
            ["rows.jsonl", "reward=custom", "reward.path=judge.py:no"],
            "error: reward.path='judge.py:no': 'judge.py' has no",
        ),
        (
            ["rows.jsonl", "reward=functions", "reward.functions=[{name: soft_overlong, max_length: 8, buffer: 4}]"],
            "error: reward: soft_overlong wants completion_ids, which only a model's tokenizer gives",
        ),
        ([], "usage: python -m trainer.grade FILE"),
        (["rows.jsonl", "more.jsonl"], "usage: "),
        (["rows.jsonl", "--yaml"], "usage: "),
    ],
)
def test_what_cannot_be_used_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(problem)
    assert printed.out == ""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "p", "answer": 1}, "completion=None: give text"),
        ({"prompt": "p", "answer": 1, "completion": ["a"]}, "completion=['a']: give text"),
        ({"prompt": "p", "completion": "a"}, "the row has no 'answer'"),
        ({"prompt": "p", "completion": "a", "answer": "no number"}, "answer 'no number' is not a single number"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], line: dict[str, Any], problem: str
) -> None:
    Path("bad.jsonl").write_text(json.dumps(LINES[0]) + "\n" + json.dumps(line) + "\n")
    assert main(["bad.jsonl", "reward=numeric"]) == 2
    printed = capsys.readouterr().err
    assert "bad.jsonl:2" in printed
    assert problem in printed
