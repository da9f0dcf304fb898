"""Rewards in processes of their own: whatever a function does to one row, the run goes on or stops as it was told to,
within the limit, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import RolloutError, RolloutGroup
from scoring import PROGRESS, group
from trainer.config import ConfigError, RewardConfig
from trainer.data.rows import Row
from trainer.data.tasks import numeric
from trainer.rewards.builtin import Regex
from trainer.rewards.functions import weighted
from trainer.rewards.loading import load_reward
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores

LIMIT = 1.0
# each completion is code to run; those that come back score the length of the completion
JUDGE = """
import ctypes, os, re, signal, subprocess, sys, threading, time
HERE = os.path.dirname(__file__)
def note(*pids):
    with open(os.path.join(HERE, "pids"), "a") as file:
        file.writelines(f"{pid}\\n" for pid in pids)
def judge(completions):
    note(os.getpid())
    for text in completions:
        exec(text)
    return [float(len(text)) for text in completions]
"""
GOOD = "pass"
ENDLESS = {
    "sleeps": "time.sleep(1e6)",
    "swallows": "while True:\n    try: time.sleep(1e6)\n    except BaseException: pass",
    "backtracks": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "holds a library's lock": "ctypes.PyDLL(None).usleep(4000000000); ctypes.PyDLL(None).pause()",
    "ignores signals": "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(1e6)",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "has a child": "child = subprocess.Popen(['sleep', '1000000']); note(child.pid); child.wait()",
    "forks": "pid = os.fork()\nnote(os.getpid())\ntime.sleep(1e6)",
}
ENDED = {
    "exits": ("os._exit(3)", "exit status 3"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    "crashes": ("ctypes.string_at(0)", "killed by SIGSEGV"),
    "exits with a child": ("note(subprocess.Popen(['sleep', '1000000']).pid); os._exit(0)", "exit status 0"),
    "exits from a thread": ("threading.Thread(target=os._exit, args=(4,)).start(); time.sleep(1e6)", "exit status 4"),
}
ROWS = [Row(f"prompt {i}", i, source=f"rows.jsonl:{i + 1}") for i in range(4)]


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    file = tmp_path / "judge.py"
    file.write_text(JUDGE)
    return file


def _scorer(file: Path, name: str = "judge", **options: Any) -> Scorer:
    path = f"{file}:{name}"
    return Scorer([weighted(load_reward(path), path=path)], RewardConfig(**{"workers": 2, "timeout": LIMIT} | options))


def _groups(*texts: list[str]) -> list[RolloutGroup]:
    return [group(some, key) for key, some in enumerate(texts)]


def _bad_third(text: str) -> list[RolloutGroup]:
    """Four groups of two; the second completion of the third row is the bad one."""
    return _groups([GOOD, GOOD], [GOOD, GOOD], [GOOD, text], [GOOD, GOOD])


def _assert_nobody_is_left(folder: Path) -> None:
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert pids
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# -- one bad row --------------------------------------------------------------------------------------------------


_QUICK = ("sleeps", "backtracks", "has a child")


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=how, marks=[] if how in _QUICK else pytest.mark.slow) for how, text in ENDLESS.items()],
)
def test_a_call_that_does_not_end_is_ended_and_only_its_completion_is_skipped(judge: Path, text: str) -> None:
    began = time.monotonic()
    with _scorer(judge, on_timeout="skip") as scorer:
        scores = scorer.collect(ROWS, _bad_third(text), PROGRESS)
    # the group, and then the bad completion alone; nothing here takes long by itself
    assert 2 * LIMIT < time.monotonic() - began < 2 * LIMIT + 5
    _assert_skipped(scores, "reward judge took more than reward.timeout=1 s and was ended")
    _assert_nobody_is_left(judge.parent)


@pytest.mark.parametrize(("text", "how"), ENDED.values(), ids=ENDED)
def test_a_process_that_ends_is_another_s_turn(judge: Path, text: str, how: str) -> None:
    with _scorer(judge, on_timeout="skip", timeout=60.0) as scorer:
        scores = scorer.collect(ROWS, _bad_third(text), PROGRESS)
    _assert_skipped(scores, f"reward judge ended its process ({how})")
    _assert_nobody_is_left(judge.parent)


def _assert_skipped(scores: Scores, why: str) -> None:
    assert scores.scored.tolist() == [[True, True], [True, True], [True, False], [True, True]]
    assert scores.totals.tolist() == [[4.0, 4.0], [4.0, 4.0], [4.0, 0.0], [4.0, 4.0]]
    assert scores.failures == {"judge": [(2, 1, why)]}
    assert scores.metrics() == {
        "rewards/judge/mean": 4.0, "rewards/judge/std": 0.0, "rewards/judge/failed": 1.0, "rewards/unscored": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (ENDLESS["backtracks"], r"took more than reward\.timeout=1 s and was ended"),
        (ENDED["exits"][0], r"ended its process \(exit status 3\)"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero at .*judge\.py:10"),
        ("sys.exit(0)", r"raised SystemExit: 0 at .*judge\.py:10"),
    ],
)
def test_by_default_the_run_ends_naming_function_and_row(judge: Path, text: str, what: str) -> None:
    began = time.monotonic()
    with _scorer(judge) as scorer, pytest.raises(RolloutError, match=f"^reward judge {what}, for row rows.jsonl:3 "):
        scorer.collect(ROWS, _bad_third(text), PROGRESS)
    assert time.monotonic() - began < LIMIT + 5
    _assert_nobody_is_left(judge.parent)


@pytest.mark.parametrize(
    "text",
    [
        "print('x' * 10_000_000)",
        "sys.stdout.write('x' * 100); os.write(1, b'y' * 1_000_000)",
        "globals().setdefault('kept', []).append(open(__file__))",
        "threading.Thread(target=time.sleep, args=(1e6,)).start()",
        "threading.Thread(target=lambda: re.match('(a+)+$', 'a' * 60 + 'b'), daemon=True)",
        "subprocess.Popen(['sleep', '1000000'])",
        "sys.stdin.read()",
    ],
)
def test_what_does_no_harm_is_scored_and_leaves_nobody(judge: Path, text: str) -> None:
    before = set(psutil.Process().children(recursive=True))  # multiprocessing's own, of other tests
    with _scorer(judge, timeout=30.0) as scorer:
        scores = scorer.collect(ROWS, _bad_third(text), PROGRESS)
        assert scores.totals[2].tolist() == [4.0, float(len(text))]
    _assert_nobody_is_left(judge.parent)
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(("policy", "value"), [("0", 0.0), ("-1.5", -1.5)])
def test_a_number_in_place_of_a_score(judge: Path, policy: str, value: float) -> None:
    with _scorer(judge, on_timeout=policy, on_error=policy) as scorer:
        scores = scorer.collect(ROWS, _groups([GOOD], ["1 / 0"], ["os._exit(1)"], [GOOD]), PROGRESS)
    assert scores.totals.flatten().tolist() == [4.0, value, value, 4.0]
    assert scores.scored.all()
    assert scores.metrics()["rewards/judge/failed"] == 2.0


def test_a_failure_is_told_once(judge: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _scorer(judge, on_error="skip") as scorer:
        for _ in range(2):
            scorer.collect(ROWS, _groups(*[["1 / 0"]] * 4), PROGRESS)
    (told,) = [record.getMessage() for record in caplog.records]
    assert re.match(r"reward judge raised ZeroDivisionError: .* for row rows\.jsonl:1 .*; it is not scored, as", told)


# -- what a process is --------------------------------------------------------------------------------------------


def test_a_process_is_fresh_and_answers_soon(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import os, sys, threading\n"
        "def judge(completions):\n"
        "    alone = threading.active_count() == 1 and not any('torch' in m for m in sys.modules)\n"
        "    return [float(alone and os.getpid() == os.getpgid(0) == os.getsid(0) and os.getcwd() == text)"
        " for text in completions]\n"
    )
    began = time.monotonic()
    with _scorer(tmp_path / "judge.py", timeout=None) as scorer:
        assert scorer.collect(ROWS[:1], _groups([os.getcwd()]), PROGRESS).totals.tolist() == [[1.0]]
    assert time.monotonic() - began < 5


def test_an_idle_process_that_is_gone_is_replaced(judge: Path) -> None:
    with _scorer(judge, workers=1) as scorer:
        for _ in range(3):
            assert scorer.collect(ROWS[:1], _groups([GOOD]), PROGRESS).totals.tolist() == [[4.0]]
            pid = int((judge.parent / "pids").read_text().split()[-1])
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len(set((judge.parent / "pids").read_text().split())) == 3


def test_neighbours_of_a_file_and_what_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside_the_judge.py").write_text("VALUE = 7.0\n")
    Path("judge.py").write_text(
        "from beside_the_judge import VALUE\ndef judge(answer): return [VALUE for _ in answer]\n"
    )
    with _scorer(Path("judge.py")) as scorer:
        assert scorer.collect(ROWS, _groups(*[["a"]] * 4), PROGRESS).totals.flatten().tolist() == [7.0] * 4


def test_functions_of_ours_run_there_too() -> None:
    rows, texts = [Row("p", "1/2"), Row("p", 3)], [["0.5", "2"], ["x", "3"]]
    with Scorer([weighted(numeric), weighted(Regex("[0-9.]+"), "regex")], RewardConfig(workers=1)) as scorer:
        scores = scorer.collect(rows, _groups(*texts), PROGRESS)
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "numeric": [[1.0, 0.0], [0.0, 1.0]],
        "regex": [[1.0, 1.0], [0.0, 1.0]],
    }


def test_a_function_that_cannot_be_handed_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.workers: <lambda> cannot be handed to another process \(.*path"):
        Scorer([weighted(lambda completions: [])], RewardConfig(workers=1))


@pytest.mark.parametrize(
    ("line", "problem"), [("1 / 0", "judge.py:3: ZeroDivisionError"), ("os._exit(7)", r"loading \(exit status 7\)")]
)
def test_a_file_that_only_loads_in_the_trainer(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "judge.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    {line}\ndef judge(completions): return [1.0]\n"
    )
    with (
        _scorer(tmp_path / "judge.py", on_timeout="skip", on_error="skip") as scorer,
        pytest.raises(RolloutError, match=rf"^reward\.workers: a worker process could not start: .*{problem}"),
    ):
        scorer.collect(ROWS[:1], _groups(["a"]), PROGRESS)


# -- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_scores_do_not_depend_on_workers_or_on_who_ends_first(tmp_path: Path, workers: int) -> None:
    (tmp_path / "judge.py").write_text(
        "import time\n"
        "def judge(completions, answer, log_metric, log_extra):\n"
        "    time.sleep(0.1 * (3 - answer[0] % 4))\n"
        "    log_metric('length', sum(map(len, completions)) / len(completions))\n"
        "    log_extra('said', [text.upper() for text in completions])\n"
        "    return [None if text == 'n' else float('nan') if text == 'x' else len(text) + a / 3\n"
        "            for text, a in zip(completions, answer)]\n"
    )
    groups = _groups(["a", "bb"], ["n", "x"], ["ccc", "n"], ["x", "dddd"])
    options: dict[str, Any] = {"workers": workers, "timeout": None, "on_nan": "skip"}
    with _scorer(tmp_path / "judge.py", **options) as scorer:
        for place in (3, 1, 0, 2):
            scorer.submit(ROWS[place], groups[place], PROGRESS)
        scores = scorer.collect(ROWS, groups, PROGRESS)
    assert scores.totals.tolist() == [[1.0, 2.0], [0.0, 0.0], [3 + 2 / 3, 0.0], [0.0, 5.0]]
    assert scores.scored.tolist() == [[True, True], [False, False], [True, False], [False, True]]
    assert scores.extras == {"said": [["A", "BB"], ["N", None], ["CCC", "N"], [None, "DDDD"]]}
    assert [(g, i) for g, i, _ in scores.failures["judge"]] == [(1, 1), (3, 0)]


def test_work_begins_when_it_is_handed_over(tmp_path: Path) -> None:
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    (tmp_path / "judge.py").write_text(
        f"def judge(completions):\n    open({str(fifo)!r}, 'w').close()\n    return [1.0]\n"
    )
    with _scorer(tmp_path / "judge.py", timeout=None) as scorer:
        scorer.submit(ROWS[0], group(["a"]), PROGRESS)
        fifo.open().close()  # waits for whoever writes
        assert scorer.collect(ROWS[:1], [group(["a"])], PROGRESS).totals.tolist() == [[1.0]]


def test_closing_ends_what_runs(judge: Path) -> None:
    began, scorer = time.monotonic(), _scorer(judge, timeout=None)
    os.mkfifo(judge.parent / "begun")
    text = f"open({str(judge.parent / 'begun')!r}, 'w').close(); " + ENDLESS["sleeps"]
    scorer.submit(ROWS[0], group([text]), PROGRESS)
    (judge.parent / "begun").open().close()
    scorer.close()
    scorer.close()
    assert time.monotonic() - began < 10
    _assert_nobody_is_left(judge.parent)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward")]


# -- the trainer is gone ------------------------------------------------------------------------------------------

OWNER = """
import sys
from pathlib import Path
from scoring import PROGRESS, Row, group, weighted
from trainer.config import RewardConfig
from trainer.rewards.loading import load_reward
from trainer.rewards.scorer import Scorer
path = sys.argv[1] + ":judge"
scorer = Scorer([weighted(load_reward(path), path=path)], RewardConfig(workers=2))
rows = [Row("p", i) for i in range(2)]
scorer.collect(rows, [group([text], key) for key, text in enumerate(sys.argv[2:])], PROGRESS)
"""


@pytest.fixture
def owner(judge: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process whose two workers backtrack, and wait for a child of theirs."""
    told = "print('begun', os.getpid()); "
    texts = [told + ENDLESS["backtracks"], told + "child = " + ENDLESS["has a child"].split("= ", 1)[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(judge), *texts], env=environment, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_outlives_a_trainer_that_is_killed(owner: "subprocess.Popen[str]", judge: Path, signum: int) -> None:
    assert owner.stderr is not None
    begun = [owner.stderr.readline() for _ in range(2)]
    assert all(line.startswith("begun ") for line in begun), begun
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(family) >= 3  # the keeper and two workers; perhaps the child
    owner.send_signal(signum)
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    _assert_nobody_is_left(judge.parent)
