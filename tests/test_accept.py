"""The default run, as a user would start it: what the README says of it. Minutes long."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.tracking.tracking import read_metrics

pytestmark = pytest.mark.slow


def _default_run(folder: Path, *overrides: str) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "trainer", "run_dir=run", *overrides]
    began = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"COWROLL_CACHE": str(folder / "cache")})
    summary: dict[str, Any] = json.loads((folder / "run/summary.json").read_text())
    return summary | {"wall": time.monotonic() - began}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_and_every_bit_agrees(tmp_path: Path, seed: int) -> None:
    summary = _default_run(tmp_path / "a", f"seed={seed}")
    assert summary["steps"] >= 60
    assert summary["reward_first10"] <= 0.5
    assert summary["reward_last10"] >= 0.9
    assert summary["eval_pass@1_after"] >= summary["eval_pass@1_before"] + 0.3
    assert summary["logprob_gap_max"] == 0.0
    assert summary["exact"]
    assert summary["wall"] <= 240
    assert summary["seconds"]["warm_start"] <= 0.3 * summary["wall"]


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    summary = _default_run(tmp_path / "a", "reward.shuffle=true")
    assert summary["eval_pass@1_after"] - summary["eval_pass@1_before"] < 0.05
    assert summary["reward_last10"] - summary["reward_first10"] < 0.05


def test_two_runs_of_one_seed_agree(tmp_path: Path) -> None:
    lines = []
    for name in ("a", "b"):
        _default_run(tmp_path / name, "steps=20")
        lines.append(
            [
                {k: v for k, v in line.items() if not k.startswith(("timing_s/", "memory/")) and "per_second" not in k}
                for line in read_metrics(tmp_path / name / "run/metrics.jsonl")
            ]
        )
    assert lines[0] == lines[1]
