"""A third backend: one folder and one line, here a record with one operation of its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_models
from rollout import RolloutEngine, SamplingParams
from rollout_kernels import ops
from rollout_kernels.reference.norms import rms_norm
from runs import run_once

Calls = list[int]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, use_kernels: Callable[[str], None]) -> Calls:
    """A backend that has norms only is there and asked for; returns how many rows each call normalised."""
    calls: Calls = []

    def counted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append(x.numel() // x.shape[-1])
        return rms_norm(x, weight, eps)

    backend = ops.Backend("toy", "cpu", (torch.float32,), lambda: "toy-1", {"rms_norm": counted})
    monkeypatch.setattr(ops, "BACKENDS", (*ops.BACKENDS, backend))
    use_kernels("toy")
    return calls


def test_rollouts_run_through_it(toy: Calls) -> None:
    """One call for each norm of each forward: a prefill, and a decode of both completions for every token but one."""
    model = tiny_models.random_model("qwen3")
    with RolloutEngine(model) as engine:
        assert engine.numerics.ops.identity == "toy-1"
        assert engine.numerics.exact
        toy.clear()
        engine.generate_rollouts([[5, 6, 7]], n=2, sampling=SamplingParams(max_new_tokens=4, ignore_eos=True))
    per_forward = 2 * 4 + 1  # of two layers and the model; Qwen3 norms queries and keys too
    assert len(toy) == per_forward * 4


def test_a_checkpoint_names_it(toy: Calls, tmp_path: Path) -> None:
    run = run_once(tmp_path, "steps=1", "checkpoint.every=1")
    state = json.loads((tmp_path / "checkpoints/step-000001/trainer.json").read_text())
    assert state["kernels"] == run.engine.numerics.ops.identity == "toy-1"
    assert toy
