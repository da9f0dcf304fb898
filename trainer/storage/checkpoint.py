"""Checkpoints: a model directory that transformers, or peft, loads, and the trainer's own state beside it.

    run_dir/checkpoints/step-000040/
        model/                  config, safetensors, tokenizer; of an adapter as peft saves it
        optimizer.safetensors   moments and masters, fp32
        prompts.safetensors     ids of all rows' prompts, rendered when the run began
        trainer.json            format_version, step, the keys and contents that decide the trajectory
        files.json              size and digest of each of these files

A checkpoint is written under another name, flushed to the disk and renamed, so a crash leaves the earlier one; what it
replaces is removed after that. Nothing else has to be saved: data order and sampling are functions of counters.
"""

import json
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.model import MANIFEST, find_damage, write_manifest
from rollout.model import flush as _flush
from rollout.model import flush_directory as _flush_directory
from trainer.config import ConfigError
from trainer.config.schema import options_with
from trainer.storage.folders import (
    NAME,
    REPLACED,
    WRITING,
    checkpoint_root,
    drop_replaced,
    list_checkpoints,
    own_folders,
)
from trainer.storage.weights import kept_tensors, save_weights
from trainer.storage.writing import writing
from trainer.weights.optimizer import MasterAdamW, check_tensors

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3

_TASK_PATHS = {f"task.{name}" for name in ("path", "split", "subset", "eval_path", "eval_split", "few_shot", "tools")}
_PATHS = _TASK_PATHS | {"model.path", "reward.path"}
"""Compared by what is in them, not by name."""


@dataclass(frozen=True)
class TrainerState:
    """What trainer.json holds."""

    step: int
    """Optimizer steps done."""
    trajectory: dict[str, Any]
    num_threads: int
    kernels: str = ""
    """What computed: `rollout_kernels.ops.Ops.identity`."""
    contents: dict[str, str] = field(default_factory=dict)
    """Digests of data, reward and model, by name."""
    num_refilled: int = 0
    """Prompts beyond prompts_per_step that the steps have taken from the data."""
    score: float | None = None
    """Of the metric by which the best checkpoint is kept, if that was measured at this step."""
    format_version: int = FORMAT_VERSION


def save_checkpoint(
    run_dir: Path,
    state: TrainerState,
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MasterAdamW,
    keep: int,
    prompts: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint beside the earlier ones, then drop those of later steps, and all but the last
    `keep` and the one of the highest score.

    Raises WriteError, with the earlier ones as they were, if it cannot be written.
    """
    root = checkpoint_root(run_dir)
    target, partial = root / f"step-{state.step:06d}", root / f"{WRITING}{state.step:06d}"
    replaced = root / f"{REPLACED}{state.step:06d}"
    with writing(target):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_weights(module, partial / "model")
            tokenizer.save_pretrained(partial / "model")
            tensors = {name: tensor.detach().contiguous() for name, tensor in optimizer.state_tensors().items()}
            save_file(tensors, partial / "optimizer.safetensors")
            if prompts:
                save_file(dict(prompts), partial / "prompts.safetensors")
            (partial / "trainer.json").write_text(json.dumps(state.__dict__, indent=2))
            write_manifest(partial)
            _flush(partial)
            if target.exists():
                target.rename(replaced)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if replaced.exists() and not target.exists():
                replaced.rename(target)
            raise
        _flush_directory(root)
        shutil.rmtree(replaced, ignore_errors=True)
        drop_replaced(run_dir, state.step, keep)
    return target


# -- resume -------------------------------------------------------------------------------------------------------


def find_checkpoint(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` names: "auto" is run_dir's last, if any; else a checkpoint or a run directory."""
    if resume is None:
        return None
    if resume == "auto":
        return _last(run_dir)
    named = Path(resume).expanduser()
    if (named / "trainer.json").is_file():
        return named
    found = _last(named)
    if found is None:
        raise ConfigError(f"resume={resume!r}: neither a checkpoint nor a run directory with checkpoints")
    return found


def _last(run_dir: Path) -> Path | None:
    folders, complete = own_folders(run_dir), list_checkpoints(run_dir)
    last = complete[-1] if complete else None
    later = [path for path, step in folders.items() if last is None or step > folders[last]]
    if later and last is None:
        raise ConfigError(f"resume: {later[-1]} has no trainer.json: it is no checkpoint; remove it to start over")
    for path in later:
        logger.warning("resume: %s has no trainer.json: it is no checkpoint, and the run goes on from %s", path, last)
    return last


def check_whole(checkpoint: Path) -> None:
    """Refuse a damaged checkpoint by its file, before anything is loaded."""
    if not (checkpoint / MANIFEST).is_file():
        _read_raw(checkpoint)  # another format, which may have no such list, is no damage
    damage = find_damage(checkpoint)
    if damage is not None:
        raise _damaged(checkpoint, damage)


def _damaged(checkpoint: Path, damage: str) -> ConfigError:
    folders = own_folders(checkpoint.resolve().parent.parent)
    step = folders.get(checkpoint.resolve(), 0)
    earlier = [path.name for path, number in folders.items() if number < step and (path / "trainer.json").is_file()]
    remedy = f"go on from {earlier[-1]}" if earlier else "start over"
    return ConfigError(f"resume: {checkpoint} is damaged: {damage}; move it away to {remedy}")


def _read_raw(checkpoint: Path) -> dict[str, Any]:
    try:
        raw = json.loads((checkpoint / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, f"trainer.json cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise _damaged(checkpoint, f"trainer.json holds {type(raw).__name__}, not an object")
    if raw.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"resume: {checkpoint} has format_version {raw.get('format_version')}, not {FORMAT_VERSION}")
    return raw


def read_state(checkpoint: Path, trajectory: dict[str, Any], may_change: Collection[str] = ()) -> TrainerState:
    """trainer.json, after checking that the run goes on as it began, but for the keys that may change.

    Raises ConfigError with the key that changed, and both values.
    """
    state = _checked_state(checkpoint, _read_raw(checkpoint))
    now = json.loads(json.dumps(trajectory))
    keys = (now.keys() | state.trajectory.keys()) - _PATHS
    # checkpoints of an earlier time have the keys of options that were not chosen, too
    unused = {key for key in keys - now.keys() if options_with(key.partition(".")[0], key.partition(".")[2])}
    for key in sorted(keys - unused):
        before, after = state.trajectory.get(key), now.get(key)
        if before != after and key not in may_change:
            raise ConfigError(
                f"{key}: the run began with {before!r} and would go on with {after!r}; use the first, or go on all the"
                f" same with resume_changed=[{key}]"
            )
        if before != after:
            logger.warning("%s: the run began with %r and goes on with %r", key, before, after)
    return state


def _checked_state(checkpoint: Path, raw: dict[str, Any]) -> TrainerState:
    kinds = {"step": int, "trajectory": dict, "num_threads": int, "kernels": str, "contents": dict}
    kinds |= {"num_refilled": int, "score": type(raw.get("score")), "format_version": int}
    if not isinstance(raw.get("score"), float | None):
        raise _damaged(checkpoint, f"trainer.json has score={raw['score']!r}, which is no float")
    for name in (spec.name for spec in fields(TrainerState)):
        if name not in raw or type(raw[name]) is not kinds[name]:
            raise _damaged(checkpoint, f"trainer.json has {name}={raw.get(name)!r}, which is no {kinds[name].__name__}")
    if raw.keys() - kinds.keys():
        raise _damaged(checkpoint, f"trainer.json has {min(raw.keys() - kinds.keys())!r}, which no checkpoint has")
    state = TrainerState(**raw)
    named = NAME.fullmatch(checkpoint.name)
    if state.step < 0 or (named is not None and state.step != int(named[1])):
        raise _damaged(checkpoint, f"trainer.json has step={state.step}")
    return state


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint's file; ConfigError names it."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume: {file} is damaged: {getattr(error, 'strerror', None) or error}") from error
    return tensors


@torch.no_grad()
def load_checkpoint(checkpoint: Path, module: PreTrainedModel, optimizer: MasterAdamW) -> None:
    """Copy a checkpoint's weights and optimizer state into the tensors that are already there, all or nothing.

    Raises ConfigError, by file and tensor, if any is missing, is not the model's, or has another shape or dtype.
    """
    saved: dict[str, Tensor] = {}
    files = sorted((checkpoint / "model").glob("*.safetensors"))
    if not files:
        raise _damaged(checkpoint, "model/ has no weights (*.safetensors)")
    for file in files:
        saved |= read_tensors(file)
    own = kept_tensors(module)
    by_address = {tensor.data_ptr(): saved[name] for name, tensor in own.items() if name in saved}
    # tied weights are saved once: every name of the model is in the file or shares a tensor that is
    given = {name: by_address[t.data_ptr()] for name, t in own.items() if t.data_ptr() in by_address} | saved
    try:
        check_tensors(own, given)
        for name, tensor in own.items():
            other = by_address[tensor.data_ptr()]
            if other is not given[name] and not torch.equal(other, given[name]):
                raise ConfigError(f"{name} has other values than under the name that it is tied to")
    except ConfigError as error:
        raise ConfigError(f"resume: weights in {checkpoint / 'model'}: {error}") from error
    state_file = checkpoint / "optimizer.safetensors"
    state = read_tensors(state_file)
    try:
        optimizer.check_state_tensors(state)
    except ConfigError as error:
        raise ConfigError(f"resume: {state_file}: {error}") from error
    for name, tensor in own.items():
        tensor.copy_(given[name])
    optimizer.load_state_tensors(state)
