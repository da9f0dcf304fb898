"""However a run is ended: the exit status and the dashboard say so, nothing is lost, nothing is left running."""

import os
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import trainer.collecting
import trainer.loop
import trainer.rewards.scorer
import trainer.run
import trainer.storage.lines
import trainer.weights.optimizer
import trainer.weights.warm_start
from caches import cache_with_kernels
from trainer.tracking.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
RUN = [
    "experiment=smoke", f"steps={STEPS}", "checkpoint.every=4", "checkpoint.keep=9", "model.warm_start_steps=2",
    "name=x", "eval.every=3", "task.eval_rows=2", "reward=custom", "reward.path=judge.py:f", "optim.lr=1e-3",
    "run_dir=run", "algorithm.prompts_per_step=2", "sampling.max_new_tokens=4",
]  # fmt: skip
REWARD = "def f(completion_ids):\n    return [float(len(set(ids))) for ids in completion_ids]\n"

Command = Callable[..., tuple[int, str]]


def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, count: int, *signals: int) -> None:
    """Send this process the signals just before the count-th call of a function."""
    original, calls = getattr(owner, name), []

    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            for signum in signals:
                os.kill(os.getpid(), signum)
        return original(*arguments, **options)

    patch.setattr(owner, name, called)


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    changing = ("timing_s/", "memory/", "rollout/tokens_per_second")
    return [
        {k: v for k, v in line.items() if not k.startswith(changing)}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def _saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "judge.py").write_text(REWARD)
    done = _process(folder, *RUN)
    _, errors = done.communicate()
    assert done.returncode == 0, errors
    return folder / "run"


def _cache(folder: Path) -> Path:
    cache = folder / "cache"
    return cache if cache.exists() else cache_with_kernels(cache)


def _process(folder: Path, *arguments: str, path: str = "") -> "subprocess.Popen[str]":
    """`python -m trainer`, the first of a group of its own."""
    search = os.pathsep.join(filter(None, [path, str(ROOT), str(ROOT / "kernels")]))
    environment = os.environ | {"PYTHONPATH": search, "COWROLL_CACHE": str(_cache(folder)), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments], cwd=folder, env=environment, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


# -- the moment ---------------------------------------------------------------------------------------------------

MOMENTS = {
    "loading the model": (trainer.run, "load_model", 1, []),
    "warm start": (trainer.weights.warm_start, "score_tokens", 2, []),
    "evaluation before the first step": (trainer.loop, "evaluate", 1, []),
    "first step": (trainer.step.Trainer, "_forward", 1, []),
    "rollouts": (trainer.collecting.Collector, "collect", 4, [3]),
    "reward": (trainer.rewards.scorer.Scorer, "collect", 5, [3]),
    "gradients": (trainer.step.Trainer, "_forward", 6, [4, 5]),
    # two of the warm start come before
    "update": (trainer.weights.optimizer.MasterAdamW, "step", 5, [3]),
    "evaluation": (trainer.loop, "evaluate", 2, [3]),
    "line": (trainer.storage.lines.StepFile, "append", 5, [2]),
    "checkpoint": (trainer.loop, "save_checkpoint", 1, [4]),
}


_QUICK = ("update", "checkpoint")


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[] if m in _QUICK else pytest.mark.slow) for m in MOMENTS])
def test_a_run_ended_at_any_moment_goes_on_as_if_it_had_not_been(
    here: Path, command: Command, uninterrupted: Path, moment: str
) -> None:
    owner, name, count, saved = MOMENTS[moment]
    signum, status = (signal.SIGTERM, 143) if len(moment) % 2 else (signal.SIGINT, 130)
    (here / "judge.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, owner, name, count, signum)
        ended, errors = command(*RUN)
    assert (ended, _saved(here / "run")) == (status, saved), errors
    assert "Traceback" not in errors
    again = shlex.split(errors.splitlines()[-1].partition("interrupted; go on with: python -m trainer ")[2])
    assert command(*again) == (0, "")
    assert _metrics(here / "run") == _metrics(uninterrupted)
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints/step-000006" / file) for run in (here / "run", uninterrupted))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)


@pytest.mark.parametrize("moment", ["update", "checkpoint", pytest.param("evaluation", marks=pytest.mark.slow)])
def test_a_second_signal_does_not_wait(here: Path, command: Command, moment: str) -> None:
    owner, name, count, _ = MOMENTS[moment]
    (here / "judge.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, owner, name, count, signal.SIGINT, signal.SIGTERM)
        ended, errors = command(*RUN)
    assert (ended, _saved(here / "run"), "Traceback" in errors) == (143, [], False), errors
    assert "go on with: " in errors


def test_a_signal_in_the_last_checkpoint_finds_the_run_done(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "judge.py").write_text(REWARD)
    _before(monkeypatch, trainer.loop, "save_checkpoint", 2, signal.SIGINT)
    assert command(*RUN)[0] == 0
    assert _saved(here / "run") == [4, 6]
    assert (here / "run/summary.json").exists()


def test_without_checkpoints_none_is_written(here: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "judge.py").write_text(REWARD)
    _before(monkeypatch, trainer.step.Trainer, "_forward", 3, signal.SIGINT)
    assert command(*RUN, "checkpoint.every=0")[0] == 2  # given twice
    chosen = [argument for argument in RUN if not argument.startswith("checkpoint.")]
    assert command(*chosen, "checkpoint.every=0")[0] == 130
    assert not (here / "run/checkpoints").exists()


@pytest.mark.slow
def test_a_run_from_another_one_s_checkpoint_goes_on_from_there(
    here: Path, command: Command, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "judge.py").write_text(REWARD)
    start = uninterrupted / "checkpoints/step-000004"
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, trainer.step.Trainer, "_forward", 1, signal.SIGINT)
        _, errors = command(*RUN, f"resume={start}")
    printed = shlex.split(errors.splitlines()[-1])
    assert f"resume={start}" in printed
    assert not [argument for argument in printed if argument.startswith(("name=", "run_dir="))]
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, trainer.step.Trainer, "_forward", 2, signal.SIGINT)
        _, errors = command(*RUN[:-3], "run_dir=other", *RUN[-2:], f"resume={start}")
    assert shlex.split(errors.splitlines()[-1])[-2:] == [f"run_dir={here / 'other'}", "resume=auto"]


def test_a_signal_that_a_reward_swallows_still_ends_the_run(here: Path, command: Command) -> None:
    (here / "judge.py").write_text(
        "import os, signal\ndef f(completions):\n    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except BaseException:\n        pass\n    return [0.0] * len(completions)\n"
    )
    chosen = ["eval.every=0" if argument.startswith("eval.every") else argument for argument in RUN]
    status, errors = command(*chosen)
    assert (status, _saved(here / "run"), "Traceback" in errors) == (143, [1], False)


# -- processes ----------------------------------------------------------------------------------------------------


def _assert_group_ends(group: int) -> None:
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process of the group is left")


@pytest.mark.parametrize(
    ("signum", "group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_traceback_and_no_child(tmp_path: Path, signum: int, group: bool) -> None:
    """With the dashboard's helper process in the group, as Ctrl-C in a terminal finds it."""
    (tmp_path / "judge.py").write_text(REWARD)
    chosen = ["steps=1000" if argument.startswith("steps=") else argument for argument in RUN]
    process = _process(tmp_path, *chosen, "tracking=wandb")
    assert process.stdout is not None
    assert any(line.startswith("step 6/") for line in process.stdout)
    (os.killpg if group else os.kill)(process.pid, signum)
    _, errors = process.communicate()
    assert process.returncode == 128 + signum
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("interrupted; go on with: python -m trainer experiment=smoke ")
    _assert_group_ends(process.pid)
    assert _saved(tmp_path / "run")[-1] == max(line["step"] for line in _metrics(tmp_path / "run"))


def test_an_interrupt_in_the_imports_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early/hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = _process(tmp_path, *RUN, path=str(tmp_path / "early"))
    assert process.communicate() == ("", "interrupted\n")
    assert process.returncode == 130


def test_an_ignored_signal_stays_ignored(here: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "judge.py").write_text(REWARD)
    _before(monkeypatch, trainer.step.Trainer, "_forward", 2, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command(*RUN) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, before)


# -- crashes, and the dashboard -----------------------------------------------------------------------------------

ENDS = {
    "return [0.0] * len(completions)": (0, None),
    "1 / 0": (1, 1),
    "exit(0)": (1, 1),
    "raise SystemExit": (1, 1),
    "raise KeyboardInterrupt": (130, 130),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM); return []": (143, 143),
}


@pytest.mark.parametrize("body", ENDS)
def test_exit_status_and_dashboard_say_how_it_ended(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    codes: list[int | None] = []
    dashboard = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda exit_code=None: codes.append(exit_code))
    fake = types.SimpleNamespace(init=lambda **_: dashboard, Table=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (here / "judge.py").write_text(f"def f(completions):\n    {body}\n")
    status, errors = command(*RUN, "tracking=wandb")
    assert (status, codes) == (ENDS[body][0], [ENDS[body][1]]), errors


@pytest.mark.parametrize(
    ("place", "bare"),
    [
        pytest.param("call", "class E(BaseException): pass", marks=pytest.mark.slow),
        pytest.param("call", "E = GeneratorExit", marks=pytest.mark.slow),
        pytest.param("import", "class E(BaseException): pass", marks=pytest.mark.slow),
        pytest.param("import", "E = SystemExit", marks=pytest.mark.slow),
    ],
)
def test_no_exception_of_a_reward_ends_with_0(tmp_path: Path, place: str, bare: str) -> None:
    raised = "raise E(0)" if place == "import" else ""
    (tmp_path / "judge.py").write_text(f"{bare}\n{raised}\ndef f(completions):\n    raise E(0)\n")
    process = _process(tmp_path, *RUN)
    _, errors = process.communicate()
    assert process.returncode in ((1, 2) if place == "import" else (1,))
    assert errors.strip()


def test_nobody_may_be_left_to_read_what_is_told() -> None:
    """A signal to the whole group ends `tee` too."""
    code = (
        "import os; from trainer.signals import tell; r, w = os.pipe(); os.dup2(w, 2); os.close(r); tell('x');"
        " print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "goes on\n"
