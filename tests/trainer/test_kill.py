"""SIGKILL at any moment: the resumed run is the uninterrupted one, bit for bit."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rollout.manifest import find_damage
from trainer.tracking.tracking import read_metrics

STEPS = 6

# a user's reward that also keeps the sampled tokens, and that kills the process at the moment KILL_AT names
REWARD = """
import json, os, signal
import trainer.loop, trainer.step
from trainer.storage import checkpoint, folders

place, _, count = os.environ.get("KILL_AT", "never:0").partition(":")
seen = {}

def passing(name):
    seen[name] = seen.get(name, 0) + 1
    if name == place and seen[name] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)

def before(module, owner, name, place):
    original = getattr(owner, name)
    def wrapped(*arguments, **options):
        passing(place)
        return original(*arguments, **options)
    setattr(owner, name, wrapped)

before(checkpoint, checkpoint, "_flush", "flush")            # written, but not yet renamed
before(checkpoint, checkpoint, "_flush_directory", "rename")
before(trainer.loop, trainer.loop, "save_checkpoint", "save")                # its metrics line is there already
before(trainer.step, trainer.step.Trainer, "_forward", "loss")

def lengths(completion_ids):
    passing("reward")
    with open(os.environ["TOKENS"], "a") as file:
        file.write(json.dumps(completion_ids) + chr(10))
    return [float(len(set(ids))) for ids in completion_ids]
"""


def _command(folder: Path, *overrides: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "trainer", "experiment=smoke", f"steps={STEPS}", "checkpoint.every=2", "name=kill"]
    command += ["eval.every=0", "reward=custom", f"reward.path={folder}/reward.py:lengths", f"run_dir={folder}/run"]
    command += ["model.warm_start_steps=2", "optim.lr=1e-3"]
    given = {override.split("=")[0] for override in overrides}  # a key may be given only once
    return [*(part for part in command if part.split("=")[0] not in given), *overrides]


def _environment(folder: Path, kill_at: str = "never:0") -> dict[str, str]:
    return os.environ | {"KILL_AT": kill_at, "TOKENS": str(folder / "tokens"), "OMP_NUM_THREADS": "1"}


def _done(folder: Path, *overrides: str, kill_at: str = "never:0") -> subprocess.CompletedProcess[str]:
    command, environment = _command(folder, *overrides), _environment(folder, kill_at)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _run(folder: Path, *overrides: str, kill_at: str = "never:0") -> int:
    return _done(folder, *overrides, kill_at=kill_at).returncode


def _metrics(folder: Path) -> list[dict[str, float]]:
    lines = read_metrics(folder / "run/metrics.jsonl")
    changing = ("timing_s/", "memory/", "rollout/tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(changing)} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert _run(folder) == 0
    return folder


UPDATES = "algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.prompts_per_step=4"
KINDS = {"full": (), "lora": ("adapter=lora",), "updates": UPDATES, "lora and updates": ("adapter=lora", *UPDATES)}


@pytest.fixture(scope="module", params=KINDS)
def of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """An uninterrupted run, and its settings."""
    folder, overrides = tmp_path_factory.mktemp("whole"), KINDS[request.param]
    assert _run(folder, *overrides) == 0
    return folder, overrides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill_at", "first_again"),
    [
        ("flush:2", 2),  # inside the write of the checkpoint of step 4
        ("reward:1", 0),  # before any checkpoint
        ("loss:4", 2),  # in the middle of an update
        ("save:2", 2),  # step 4 is in metrics.jsonl, but not on the disk
        ("reward:6", 4),  # in the last step
    ],
)
def test_killed_and_resumed(tmp_path: Path, uninterrupted: Path, kill_at: str, first_again: int) -> None:
    assert _run(tmp_path, kill_at=kill_at) == -signal.SIGKILL
    (tmp_path / "tokens").unlink(missing_ok=True)
    assert _run(tmp_path, "resume=auto") == 0
    assert _metrics(tmp_path) == _metrics(uninterrupted)
    assert [line["step"] for line in _metrics(tmp_path)] == list(range(1, STEPS + 1))
    expected = [json.loads(line) for line in (uninterrupted / "tokens").read_text().splitlines()]
    assert [json.loads(line) for line in (tmp_path / "tokens").read_text().splitlines()] == expected[first_again:]
    _assert_equal_ends(tmp_path, uninterrupted)


def _assert_equal_ends(folder: Path, uninterrupted: Path) -> None:
    """Metrics, each step once, and the last checkpoint in every bit; nothing half-written lies about."""
    assert _metrics(folder) == _metrics(uninterrupted)
    last = Path("run/checkpoints/step-000006")
    names, again = (
        {p.relative_to(f / last) for p in (f / last).rglob("*.safetensors")} for f in (uninterrupted, folder)
    )
    assert names == again
    assert {path.name for path in names} > {"optimizer.safetensors", "prompts.safetensors"}  # and a model or an adapter
    for name in names:
        ours, theirs = (load_file(f / last / name) for f in (folder, uninterrupted))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)
    assert {path.name for path in (folder / "run/checkpoints").iterdir()} == {"step-000004", "step-000006"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_twice_at_random_moments(tmp_path: Path, of_kind: tuple[Path, tuple[str, ...]], seed: int) -> None:
    uninterrupted, overrides = of_kind
    moments = random.Random(seed)
    for wanted in sorted(moments.sample(range(1, 6), 2)):
        process = subprocess.Popen(
            _command(tmp_path, "resume=auto", *overrides),
            cwd=tmp_path,
            env=_environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            steps = (int(line[5]) for line in process.stdout if re.match(r"step \d/", line))
            any(step >= wanted for step in steps)
            time.sleep(moments.random() * 0.4)
            process.kill()
        assert process.returncode in (-signal.SIGKILL, 0)  # 0: it was faster
    done = _done(tmp_path, "resume=auto", *overrides)
    assert done.returncode == 0, done.stderr
    _assert_equal_ends(tmp_path, uninterrupted)


def _other_shape(file: Path, choice: random.Random) -> None:
    tensors = load_file(file)
    name = choice.choice(sorted(tensors))
    tensors[name] = tensors[name][:1].clone() if tensors[name].ndim else tensors[name].reshape(1, 1)
    save_file(tensors, file)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_damage(tmp_path: Path, uninterrupted: Path, seed: int) -> None:
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    choice, root = random.Random(seed), tmp_path / "run/checkpoints"
    kind = ("cut", "zeroed", "removed", "shape")[seed % 4]
    pattern = "*.safetensors" if kind == "shape" else "*"
    file = choice.choice(sorted(path for path in (root / "step-000006").rglob(pattern) if path.is_file()))
    whole = file.read_bytes()
    if kind == "shape":
        _other_shape(file, choice)
    elif kind == "removed":
        file.unlink()
    else:
        file.write_bytes(whole[: choice.randrange(len(whole))] if kind == "cut" else bytes(len(whole)))
    done = _done(tmp_path, "resume=auto")
    name = file.relative_to(root / "step-000006")
    if done.returncode == 0:
        assert (name.name, kind) == ("trainer.json", "removed")
    else:
        assert done.returncode == 2
        assert f"error: resume: {root}/step-000006 is damaged: {name} " in done.stderr
        assert "Traceback" not in done.stderr
        assert find_damage(root / "step-000004") is None
        if seed:  # going on from the one before is the same whatever the damage was
            return
        shutil.move(root / "step-000006", tmp_path / "moved")
        assert _run(tmp_path, "resume=auto") == 0
    _assert_equal_ends(tmp_path, uninterrupted)


@pytest.mark.slow
def test_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    command = _command(tmp_path, "resume=auto", "steps=1000", "checkpoint.every=1")
    with subprocess.Popen(
        command, cwd=tmp_path, env=_environment(tmp_path), stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        next(line for line in first.stdout if line.startswith("step 1/"))
        second = _done(tmp_path, "resume=auto", "steps=1000", "checkpoint.every=1")
        assert (second.returncode, "Traceback" in second.stderr) == (2, False)
        assert f"error: run_dir: {tmp_path}/run is in use by process {first.pid} on " in second.stderr
        first.kill()
    steps = [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    third = _done(tmp_path, "resume=auto", f"steps={len(steps) + 1}", "checkpoint.every=1")
    assert third.returncode == 0, third.stderr


@pytest.mark.slow
def test_full_disk_ends_with_1_and_without_a_traceback(tmp_path: Path, uninterrupted: Path) -> None:
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000006")
    environment = _environment(tmp_path)
    limited = ["bash", "-c", 'ulimit -f 5000; exec "$@"', "limited", *_command(tmp_path, "resume=auto")]
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert f"error: {tmp_path}/run/checkpoints/step-000006 could not be written: " in done.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000004"]
    assert _run(tmp_path, "resume=auto") == 0
    _assert_equal_ends(tmp_path, uninterrupted)


def test_place_that_cannot_be_written_ends_with_2_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    environment = _environment(tmp_path) | {"COWROLL_CACHE": str(tmp_path / "cache")}
    command = _command(tmp_path, f"run_dir={tmp_path}/file/run")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    reason = "cannot be made and written to: Not a directory"
    assert done.stderr == f"error: run_dir: {tmp_path}/file/run {reason}\n"
    assert not (tmp_path / "cache").exists()
