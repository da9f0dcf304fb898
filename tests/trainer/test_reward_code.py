"""A reward leaves the process as it found it, and no child of it goes on with the run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Rollout, RolloutError, RolloutGroup
from scoring import score
from trainer.config import ConfigError
from trainer.data.rows import Row
from trainer.rewards.loading import load_reward

GROUP = RolloutGroup([1], [Rollout(0, [2], [0.0], [0.0], "a", "stop", 0)], 0, 0)
ROW = Row("p", 1, source="rows.jsonl:7")

CHANGES = [
    "torch.set_default_dtype(torch.bfloat16)",
    "torch.set_default_device('meta')",
    "torch.set_grad_enabled(False)",
    "torch.autocast('cpu', torch.float16).__enter__()",
    "torch.set_num_threads(torch.get_num_threads() + 1)",
    "os.chdir('/')",
]


def _state() -> list[Any]:
    return [
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads(), os.getcwd(),
    ]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_changes_is_put_back(tmp_path: Path, change: str) -> None:
    file, before = tmp_path / "judge.py", _state()
    file.write_text(f"import os, torch\n{change}\ndef f(completions):\n    {change}\n    return [1.0]\n")
    function = load_reward(f"{file}:f")
    assert _state() == before
    assert score(function, [ROW], [GROUP]) == [[1.0]]
    assert _state() == before


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_changes_before_it_fails_is_put_back(tmp_path: Path, change: str) -> None:
    file, before = tmp_path / "judge.py", _state()
    file.write_text(f"import os, torch\n{change}\n1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(f"{file}:f")
    assert _state() == before


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_error_without_a_message_still_names_function_and_row() -> None:
    def judge(completions: list[str]) -> list[float]:
        raise _MuteError

    with pytest.raises(
        RolloutError, match=r"reward judge raised _MuteError: .*__str__ raised RuntimeError.* rows\.jsonl:7"
    ):
        score(judge, [ROW], [GROUP])
    with pytest.raises(RolloutError, match=r"reward <lambda> returned a value of type _MuteError .* rows\.jsonl:7"):
        score(lambda completions: [_MuteError()], [ROW], [GROUP])


# -- children -----------------------------------------------------------------------------------------------------

FORKING = """
import os, sys
from scoring import score
from rollout import Rollout, RolloutGroup
from trainer.data.rows import Row
def judge(completions):
    child = os.fork()
    if child == 0:
        exec(sys.argv[number])
        return [0.0]
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return [1.0]
group = RolloutGroup([1], [Rollout(0, [2], [0.0], [0.0], "a", "stop", 0)], 0, 0)
for number in range(1, len(sys.argv)):
    if os.fork() == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        print(score(judge, [Row("p", 1)], [group]))
        break
    os.wait()
"""
CHILDREN = {
    "pass": (1, "a child that it forked returned from it"),
    "1 / 0": (1, "left it by ZeroDivisionError"),
    "raise KeyboardInterrupt": (1, "left it by KeyboardInterrupt"),
    "sys.exit(5)": (5, ""),
    "os._exit(3)": (3, ""),
}


def test_a_child_that_comes_out_of_a_reward_ends(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORKING, *CHILDREN], cwd=tmp_path, env=environment, check=True)
    for number, (child, (status, told)) in enumerate(CHILDREN.items(), start=1):
        out, err = ((tmp_path / f"{number}.{name}").read_text() for name in ("out", "err"))
        assert out == f"child {status}\n[[1.0]]\n", child
        assert told in err
        assert ("reward judge: " in err) is bool(told)
        assert "Traceback" not in err


TERMINATED = """
import multiprocessing, os, signal, time
from trainer.signals import interrupts
with interrupts.handled(), interrupts.raised():
    own = signal.getsignal(signal.SIGTERM)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        ready, writer = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=lambda: (writer.send(1), time.sleep(600)))
        worker.start()
        ready.recv()
        os.kill(worker.pid, signum)
        worker.join()
        assert worker.exitcode == -signum, worker.exitcode
    assert signal.getsignal(signal.SIGTERM) == own
"""


def test_a_worker_that_is_terminated_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_that_is_ignored_stays_ignored_in_a_child() -> None:
    code = TERMINATED.split("    own")[0].replace("with ", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith ")
    code += "    if os.fork() == 0: os.kill(os.getpid(), signal.SIGHUP); os._exit(0)\n    assert os.wait()[1] == 0\n"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
