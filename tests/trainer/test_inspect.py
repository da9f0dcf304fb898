"""`python -m trainer.inspect`: rows as the model will see them, and status 2 for what a run would refuse."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_models import EOS, USER, byte_tokenizer, random_model, save_directory
from trainer.__main__ import compose
from trainer.data.rendering import render_rows
from trainer.data.rows import Row, RowStream
from trainer.inspect.__main__ import histogram, inspect, row_lines, split_lines, visible

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = byte_tokenizer()


def _started(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "trainer.inspect", *arguments]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.parametrize(
    ("lengths", "lines"),
    [
        ([5], ["5 .. 5  " + "#" * 40 + "  1"]),
        ([1, 1, 2], ["1 .. 1  " + "#" * 40 + "  2", "2 .. 2  " + "#" * 20 + " " * 20 + "  1"]),
        ([8, 11, 11], [" 8 ..  8", " 9 ..  9", "10 .. 10", "11 .. 11"]),
        ([1, 21], ["1 .. ", "4 .. ", "7 .. ", "10 .. ", "13 .. ", "16 .. ", "19 .. 21"]),
        (list(range(100)), [f"{10 * i:>2} .. {10 * i + 9:>2}  {'#' * 40}  10" for i in range(10)]),
    ],
)
def test_histogram(lengths: list[int], lines: list[str]) -> None:
    made = list(histogram(lengths))
    assert len(made) == len(lines) <= 10
    assert all(line.strip() in shown for line, shown in zip(lines, made, strict=True))
    assert sum(int(line.split()[-1]) for line in made) == len(lengths)


def test_special_tokens_are_told_from_text_that_looks_like_them() -> None:
    text = TOKENIZER("a<us", add_special_tokens=False)["input_ids"]
    assert visible([USER, *text, EOS], TOKENIZER) == "«<user>»a<us«<eos>»"
    assert visible([], TOKENIZER) == ""


def test_a_row_and_its_split() -> None:
    rows = [Row("é\nb", "7", {"level": 1}, source="a.jsonl:3"), Row("xxxxxx", "8", {"unit": None})]
    rows = render_rows(rows, TOKENIZER, len(TOKENIZER), "train")
    ids = TOKENIZER("é\nb", add_special_tokens=False)["input_ids"]
    shown = ["  row a.jsonl:3", "    answer: '7'", "    level: 1", "    prompt, 4 tokens, special ones in « »:"]
    shown += ["      |é", "      |b", f"    ids: {' '.join(map(str, ids))}"]
    assert list(row_lines(rows[0], TOKENIZER)) == shown
    told = list(split_lines("train", rows))
    assert told[:2] == ["train: 2 rows", "  columns for the reward: answer, level, unit"]
    assert told[2] == "  tokens of a prompt: min 4, median 5, max 6"
    assert list(split_lines("eval", [])) == ["eval: 0 rows"]


def test_the_command_shows_what_the_first_step_sees(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(8)] + [
        {"question": "x" * 90, "answer": "####1"}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["task=gsm8k", "task.path=rows.jsonl", "task.chat=true", "task.max_prompt_tokens=80", "seed=3"]
    done = _started(tmp_path, *given)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("task.max_prompt_tokens=80: 1 of 9 train rows are longer and left out")
    assert lines[1:3] == ["train: 8 rows", "  columns for the reward: answer"]
    seen = [line.partition(":")[2] for line in lines if line.startswith("  row ")]
    order = RowStream([Row(str(i + 1), i) for i in range(8)], 3).take(0, 3)
    assert seen == [row.prompt for row in order]
    assert f"      |«<|im_start|>»user|      |{order[0].answer}+1?«<|im_end|>»" in "|".join(lines)
    assert lines[-1] == "eval: 0 rows"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command in this process, in tmp_path: exit status, standard output and standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["python -m trainer.inspect", *arguments])
        status: Any = 0
        try:
            compose(inspect)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_model_directory_has_its_own_tokenizer_and_limits(tmp_path: Path, command: Command) -> None:
    save_directory(tmp_path / "model", random_model("llama", vocab_size=len(TOKENIZER)), TOKENIZER)
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "hi"}], "answer": 1}')
    given = ["model=hf", "model.path=model", "task=dataset", "task.path=rows.jsonl"]
    status, shown, errors = command(*given, "sampling.max_new_tokens=8")
    assert (status, errors, "|«<user>»hi" in shown) == (0, "", True)
    status, shown, errors = command(*given, "sampling.max_new_tokens=508")
    assert (status, "|«<user>»hi" in shown) == (2, True)
    assert "error: sampling.max_new_tokens=508: no row leaves room for it within rollout.max_model_len=512" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=dataset"], "error: task.path: task=dataset needs a file, a directory"),
        (["task=dataset", "task.path=nosuch.json"], "error: task.path: file 'nosuch.json' does not exist"),
        (["task.nosuch=1"], "Could not override 'task.nosuch'"),
        (["reward=custom", "reward.path=nosuch.py:f"], "error: reward.path='nosuch.py:f'"),
        (["rollout.max_model_len=4"], "error: rollout.max_model_len=4: no row of the task fits"),
    ],
)
def test_what_a_run_would_refuse_ends_with_2(command: Command, arguments: list[str], message: str) -> None:
    status, _, errors = command(*arguments)
    assert (status, message in errors, "Traceback" in errors) == (2, True, False), errors


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    line = f"{sys.executable} -m trainer.inspect | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
