"""Checkpoints: a model directory that transformers loads, and the trainer's own state beside it.

    run_dir/checkpoints/step-000040/
        model/                  config, safetensors, tokenizer
        optimizer.safetensors   moments and masters, fp32
        trainer.json            format_version, step, the keys that decide the trajectory

A checkpoint is written under another name, flushed to the disk and renamed, so a crash leaves the earlier one. Nothing
else has to be saved: data order and sampling are functions of counters.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.optimizer import MasterAdamW

FORMAT_VERSION = 1


@dataclass(frozen=True)
class TrainerState:
    """What trainer.json holds."""

    step: int
    """Optimizer steps done."""
    trajectory: dict[str, Any]
    num_threads: int
    kernels: str = ""
    """What computed: `rollout_kernels.native.identity`."""
    format_version: int = FORMAT_VERSION


def checkpoint_root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, the oldest first."""
    return sorted(path for path in checkpoint_root(run_dir).glob("step-*") if (path / "trainer.json").is_file())


def drop_later(run_dir: Path, step: int) -> None:
    """Remove checkpoints of steps that will run again."""
    for path in list_checkpoints(run_dir):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def save_checkpoint(
    run_dir: Path,
    state: TrainerState,
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
    keep: int,
) -> Path:
    """Write a checkpoint beside the earlier ones, then drop all but the last `keep`."""
    root = checkpoint_root(run_dir)
    target, partial = root / f"step-{state.step:06d}", root / f".writing-{state.step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    module.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    tensors = {name: tensor.detach().contiguous() for name, tensor in optimizer.state_tensors().items()}
    save_file(tensors, partial / "optimizer.safetensors")
    (partial / "trainer.json").write_text(json.dumps(state.__dict__, indent=2))
    _flush(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _flush_directory(root)
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return target


def _flush(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_directory(path)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names: "auto" is run_dir's last, if any; else a checkpoint or a run directory."""
    if resume is None:
        return None
    if resume == "auto":
        return next(reversed(list_checkpoints(run_dir)), None)
    named = Path(resume).expanduser()
    if (named / "trainer.json").is_file():
        return named
    found = list_checkpoints(named)
    if not found:
        raise ConfigError(f"resume={resume!r}: neither a checkpoint nor a run directory with checkpoints")
    return found[-1]


def read_state(checkpoint: Path, trajectory: dict[str, Any]) -> TrainerState:
    """trainer.json, after checking that the run goes on as it began; ConfigError names a key that changed."""
    raw = json.loads((checkpoint / "trainer.json").read_text())
    if raw.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"resume: {checkpoint} has format_version {raw.get('format_version')}, not {FORMAT_VERSION}")
    state = TrainerState(**raw)
    now = json.loads(json.dumps(trajectory))
    for key in sorted(now.keys() | state.trajectory.keys()):
        before, after = state.trajectory.get(key), now.get(key)
        if before != after:
            raise ConfigError(f"{key}: the run began with {before!r} and would go on with {after!r}; use the first")
    return state


@torch.no_grad()
def load_checkpoint(checkpoint: Path, module: PreTrainedModel, optimizer: MasterAdamW) -> None:
    """Copy a checkpoint's weights and optimizer state into the tensors that are already there."""
    saved: dict[str, Tensor] = {}
    for file in (checkpoint / "model").glob("*.safetensors"):
        saved |= load_file(file)
    # tied weights are saved once; every parameter has its name in the file or shares a tensor that has
    loaded = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in saved:
            tensor.copy_(saved[name])
            loaded.add(tensor.data_ptr())
    missing = [n for n, t in module.state_dict(keep_vars=True).items() if t.data_ptr() not in loaded]
    if missing:
        raise ConfigError(f"resume: {checkpoint} has no weights for {missing[:3]}")
    optimizer.load_state_tensors(load_file(checkpoint / "optimizer.safetensors"))
