"""Rewards in whole runs: what is wrong with them ends with status 2 before the model loads, or with 1, never with 0."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from caches import cache_with_kernels
from trainer.__main__ import main

SMALL = [
    "experiment=smoke", "steps=2", "model.warm_start_steps=0", "algorithm.prompts_per_step=2", "eval.every=1",
    "checkpoint.every=0", "sampling.max_new_tokens=4", "rollout.num_blocks=64", "run_dir=run", "tracking=none",
    "task=jsonl", "task.path=train.jsonl",
]  # fmt: skip
CUSTOM = ["reward=custom", "reward.path=judge.py:score"]


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command in this process, in tmp_path: exit status and standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COWROLL_CACHE", str(cache_with_kernels(tmp_path / "cache")))

    def command(
        *own: str, rows: list[Any], held_out: list[Any] | None = None, arguments: list[str] = SMALL
    ) -> tuple[int, str]:
        for name, values in (("train.jsonl", rows), ("eval.jsonl", held_out or [])):
            Path(name).write_text("".join(json.dumps(value) + "\n" for value in values))
        split = "task.eval_rows=0" if held_out is None else "task.eval_path=eval.jsonl"
        monkeypatch.setattr(sys, "argv", ["python -m trainer", *arguments, *own, split])
        status: Any = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().err

    yield command
    root.handlers[:] = handlers
    root.setLevel(level)


def _row(i: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"{i}+1=", "answer": i, **columns}


@pytest.mark.parametrize(
    ("body", "line"), [("exit(0)", 2), ("import os\n    raise SystemExit", 3), ("raise BaseException('gone')", 2)]
)
def test_reward_that_leaves_while_training_ends_with_1(run: Command, tmp_path: Path, body: str, line: int) -> None:
    (tmp_path / "judge.py").write_text(f"def score(completions, answer):\n    {body}\n")
    status, printed = run(*CUSTOM, rows=[_row(i) for i in range(4)])
    assert status == 1
    assert f" at {tmp_path / 'judge.py'}:{line}, for row train.jsonl:" in printed
    assert "reward score raised" in printed


@pytest.mark.parametrize("text", ["exit(0)", "raise SystemExit", "def score(:", "import nosuch_package"])
def test_reward_file_that_cannot_be_imported_ends_with_2(run: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "judge.py").write_text(text)
    status, printed = run(*CUSTOM, rows=[_row(1)])
    assert status == 2
    assert printed.startswith(f"error: reward.path='judge.py:score': {tmp_path / 'judge.py'}:1: ")
    assert "Traceback" not in printed
    assert not (tmp_path / "cache" / "random").exists()


def test_field_that_the_held_out_file_lacks_ends_with_2(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def score(completions, answer, level): return [0.0 for _ in completions]\n")
    status, printed = run(*CUSTOM, rows=[_row(i, level=i) for i in range(4)], held_out=[_row(9)])
    assert (status, printed.count("\n")) == (2, 1)
    assert "wants 'level', which is no field of the held-out rows in eval.jsonl" in printed
    assert not (tmp_path / "run").exists()


def test_field_that_some_held_out_rows_lack_is_none_there(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def score(completions, answer, level):\n"
        "    with open('seen', 'a') as seen:\n"
        "        seen.writelines(f'{a}:{b}\\n' for a, b in zip(answer, level, strict=True))\n"
        "    return [0.0 for _ in completions]\n"
    )
    held_out = [_row(7), _row(8, level=3), _row(9)]
    status, _ = run(*CUSTOM, rows=[_row(0, level=0), *map(_row, range(1, 4))], held_out=held_out)
    assert status == 0
    seen = set((tmp_path / "seen").read_text().split())
    assert seen == {"0:0", "1:None", "2:None", "3:None", "7:None", "8:3", "9:None"}


@pytest.mark.parametrize("held_out", [False, True])
def test_answer_that_is_no_number_ends_with_2(run: Command, held_out: bool) -> None:
    good, bad = [_row(1), _row(2)], [_row(3), {"prompt": "p", "answer": "1, 2"}]
    train, other = (good, bad) if held_out else (bad, good)
    status, printed = run("reward=numeric", rows=train, held_out=other)
    file = "eval.jsonl" if held_out else "train.jsonl"
    assert (status, printed.count("\n")) == (2, 1)
    assert f"error: reward=numeric: {file}:2 ('p'): answer '1, 2' is not a single number" in printed


def test_child_that_comes_out_of_a_reward_trains_nothing(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import os\ndef score(completions, answer):\n    child = os.fork()\n    if child:\n"
        "        assert os.waitpid(child, 0)[1] == 256\n    return [0.0 for _ in completions]\n"
    )
    status, _ = run(*CUSTOM, rows=[_row(i) for i in range(4)])
    assert status == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1, 2]


# -- several functions, and processes of their own ----------------------------------------------------------------

PARTS = """
import os, time
def right(completions): return [1.0 for _ in completions]
async def wrong(completions, trainer_state, log_metric, answer):
    log_metric("where", trainer_state.global_step / trainer_state.max_steps)
    return [0.0 for _ in completions]
def hangs(completions, answer):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if answer[0] == 2:
        time.sleep(1e6)
    return [float(len(text)) for text in completions]
"""


def _lines(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_logged_reward_is_the_weighted_sum(run: Command, tmp_path: Path, workers: int) -> None:
    (tmp_path / "judge.py").write_text(PARTS)
    parts = "[{path: judge.py:right, weight: 0.7}, {path: judge.py:wrong, weight: 0.3}, {path: judge.py:right}]"
    status, errors = run(
        "reward=functions", f"reward.functions={parts}", f"reward.workers={workers}",
        rows=[_row(i) for i in range(4)], held_out=[_row(9)],
    )  # fmt: skip
    assert (status, errors) == (0, "")
    before, *steps = _lines(tmp_path)
    assert (before["eval/reward"], before["eval/rewards/right/mean"], before["eval/rewards/wrong/mean"]) == (1.7, 1, 0)
    for line in steps:
        assert (line["reward"], line["reward_std"], line["rewards/right/mean"]) == (1.7, 0.0, 1.0)
        assert (line["rewards/wrong/mean"], line["rewards/right_2/mean"], line["rewards/unscored"]) == (0.0, 1.0, 0.0)
    assert [line["where"] for line in steps] == [0.0, 0.5]


def test_a_row_that_hangs_ends_the_run_by_name(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(PARTS)
    limits = ["reward.workers=2", "reward.timeout=1", "reward=custom", "reward.path=judge.py:hangs"]
    status, errors = run(*limits, rows=[_row(i) for i in range(4)])
    assert status == 1
    assert "reward hangs took more than reward.timeout=1 s and was ended, for row train.jsonl:3 " in errors
    _assert_ended(tmp_path)


def test_a_row_that_hangs_is_scored_0_and_counted(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(PARTS)
    limits = ["reward.workers=2", "reward.timeout=1", "reward=custom", "reward.path=judge.py:hangs"]
    status, errors = run(*limits, "reward.on_timeout=0", "algorithm.group_size=2", rows=[_row(i) for i in range(4)])
    assert (status, errors) == (0, "")
    # each row once in two steps of two
    assert sorted(line["rewards/hangs/failed"] for line in _lines(tmp_path)) == [0.0, 2.0]
    _assert_ended(tmp_path)


def _assert_ended(tmp_path: Path) -> None:
    pids = {int(line) for line in (tmp_path / "pids").read_text().split()}
    assert len(pids) >= 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_reward_by_functions_is_compared_on_resume(run: Command, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(PARTS)
    rows = [_row(i) for i in range(4)]
    several = ["reward=functions", "reward.functions=[numeric,judge.py:right]"]
    keep = [argument for argument in SMALL if not argument.startswith(("checkpoint.", "steps="))]
    assert run(*several, rows=rows, arguments=[*keep, "checkpoint.every=1", "steps=1"])[0] == 0
    (tmp_path / "judge.py").write_text(PARTS + "# another\n")
    again = [*keep, "checkpoint.every=1", "steps=2", "resume=auto"]
    status, errors = run(*several, rows=rows, arguments=again)
    assert status == 2
    assert errors.startswith("error: reward.functions: the reward has changed since the run began")
    assert run(*several, "reward.workers=1", rows=rows, arguments=[*again, "resume_changed=[reward]"])[0] == 0
