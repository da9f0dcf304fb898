"""SIGKILL at any moment: the resumed run is the uninterrupted one, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from trainer.tracking import read_metrics

STEPS = 6

# a user's reward that also keeps the sampled tokens, and that kills the process at the moment KILL_AT names
REWARD = """
import json, os, signal
import trainer.checkpoint, trainer.loop, trainer.tracking

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

before(trainer.checkpoint, trainer.checkpoint, "_flush", "flush")            # written, but not yet renamed
before(trainer.checkpoint, trainer.checkpoint, "_flush_directory", "rename")
before(trainer.loop, trainer.loop, "save_checkpoint", "save")                # its metrics line is there already
before(trainer.loop, trainer.loop, "policy_loss", "loss")

def lengths(completion_ids):
    passing("reward")
    with open(os.environ["TOKENS"], "a") as file:
        file.write(json.dumps(completion_ids) + chr(10))
    return [float(len(set(ids))) for ids in completion_ids]
"""


def _run(folder: Path, *overrides: str, kill_at: str = "never:0") -> int:
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "trainer", "experiment=smoke", f"steps={STEPS}", "checkpoint.every=2", "name=kill"]
    command += ["eval.every=0", "reward=custom", f"reward.path={folder}/reward.py:lengths", f"run_dir={folder}/run"]
    command += ["model.warm_start_steps=2", "optim.lr=1e-3", *overrides]
    environment = os.environ | {"KILL_AT": kill_at, "TOKENS": str(folder / "tokens"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def _metrics(folder: Path) -> list[dict[str, float]]:
    lines = read_metrics(folder / "run/metrics.jsonl")
    changing = ("timing_s/", "memory/", "rollout/tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(changing)} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert _run(folder) == 0
    return folder


@pytest.mark.parametrize(
    ("kill_at", "first_again"),
    [
        ("flush:2", 2),  # inside the write of the checkpoint of step 4
        pytest.param("reward:1", 0, marks=pytest.mark.slow),  # before any checkpoint
        pytest.param("loss:4", 2, marks=pytest.mark.slow),  # in the middle of an update
        pytest.param("save:2", 2, marks=pytest.mark.slow),  # step 4 is in metrics.jsonl, but not on the disk
        pytest.param("reward:6", 4, marks=pytest.mark.slow),  # in the last step
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
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(f / "run/checkpoints/step-000006" / name) for f in (tmp_path, uninterrupted))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)
