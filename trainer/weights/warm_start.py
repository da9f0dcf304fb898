"""Warm start: imitate worked examples briefly, since a random model earns no reward to learn from.

The result is cached by content: the key is a digest of the model's shape, the examples, the settings and versions.
"""

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout import RolloutError, SamplingParams
from rollout.engine import encode_prompt
from rollout.forward import build_pack, score_tokens
from rollout.model import (
    LayerGroup,
    Numerics,
    build_tiny,
    find_damage,
    flush,
    flush_directory,
    tiny_config,
    training_view,
    write_manifest,
)
from rollout_kernels.cache import cache_directory
from rollout_kernels.ops import choose
from trainer.config import OptimConfig, TaskConfig, TinyModelConfig
from trainer.data.rows import STYLE_PURPOSE, WARM_START_PURPOSE, Row, RowStream, uniforms
from trainer.data.tasks import Task
from trainer.storage.writing import WriteError, writing
from trainer.weights.optimizer import MasterAdamW, learning_rate

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 2


def warm_started_tiny(model: TinyModelConfig, task_config: TaskConfig, task: Task, seed: int) -> Path:
    """Directory of the tiny model after its warm start on `task`, if that has one; made now unless it is cached."""
    contents = {
        "format_version": _FORMAT_VERSION,
        "model": asdict(model),
        "task": asdict(task_config),
        "seed": seed,
        "shape": tiny_config().to_diff_dict(),
        "examples": [_example(task, row, place / 64) for place, row in enumerate(task.train_rows[:64])],
        "num_threads": torch.get_num_threads(),
        "kernels": choose(torch.device("cpu"), torch.float32).identity,
        "versions": [torch.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]
    imitates = task.worked_example is not None and model.warm_start_steps > 0
    if not imitates:
        logger.warning("no warm start: training begins with random weights, which may earn no reward to learn from")
    target = _cached(("warm_start" if imitates else "random"), digest)
    if target is not None and _is_whole(target):
        logger.info("model: taken from the cache, %s", target)
        return target
    partial = _new_folder(target)
    try:
        module, tokenizer = build_tiny(seed)
        if imitates:
            logger.info("warm start: %d steps of imitation on worked examples", model.warm_start_steps)
            imitate(module, tokenizer, model, task, seed)
        return _store(module, tokenizer, partial, target)
    except WriteError as error:
        shutil.rmtree(partial, ignore_errors=True)
        logger.warning("the model is made for this run only: %s", error)
        return _store(module, tokenizer, _temporary_folder(), None)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _cached(kind: str, digest: str) -> Path | None:
    try:
        return cache_directory() / kind / digest
    except RolloutError:  # this user has no home directory
        return None


def _is_whole(target: Path) -> bool:
    """Whether the cache holds it undamaged; says so if it is there and damaged."""
    try:
        damage = find_damage(target) if target.exists() else None
    except OSError as error:
        logger.warning("the cache cannot be read: %s", error)
        return False
    if damage is not None:
        logger.warning("%s in the cache is damaged: %s; it is made anew", target, damage)
    return damage is None and target.exists()


def _new_folder(target: Path | None) -> Path:
    """An empty folder beside `target`, or, with a warning, one for this process where the cache cannot be written."""
    reason: object = "this user has no home directory"
    if target is not None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=target.parent, prefix=".writing-"))
        except OSError as error:
            reason = error
    logger.warning("the model is made for this run only, since the cache cannot be written: %s", reason)
    return _temporary_folder()


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cowroll-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _store(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, partial: Path, target: Path | None) -> Path:
    """Write the model into `partial`; where that lies beside `target`, move it there, replacing a damaged one."""
    with writing(partial):
        module.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_manifest(partial)
        flush(partial)
        if target is None or partial.parent != target.parent:
            return partial
        if target.exists() and find_damage(target) is not None:
            damaged = partial.with_name(partial.name.replace(".writing-", ".damaged-"))
            target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir() or find_damage(target) is not None:
                raise
            shutil.rmtree(partial)  # another run of the same configuration was faster
        flush_directory(target.parent)
    return target


def _example(task: Task, row: Row, uniform: float) -> list[object]:
    """A prompt, as it is given and as it is rendered, and what is imitated behind it."""
    return [row.prompt, row.engine_prompt, task.worked_example(row, uniform) if task.worked_example is not None else ""]


def imitate(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: TinyModelConfig, task: Task, seed: int
) -> None:
    """Maximise the likelihood of worked examples for config.warm_start_steps steps, in place."""
    assert task.worked_example is not None
    optim = OptimConfig(lr=config.warm_start_lr, warmup_steps=20, schedule="linear")
    optimizer = MasterAdamW(module.named_parameters(), optim)
    stream = RowStream(task.train_rows, seed, WARM_START_PURPOSE)
    vocab_size, end = module.config.vocab_size, tokenizer.eos_token_id
    size = config.warm_start_batch_size
    layer = LayerGroup.of(module.config, module.dtype)
    numerics = Numerics.of(module.device, module.dtype, exact=False)
    view = training_view(module, numerics, gradient_checkpointing=False)
    for step in range(config.warm_start_steps):
        rows = stream.take(step * size, size)
        groups = []
        for row, uniform in zip(rows, uniforms(size, seed, STYLE_PURPOSE, step), strict=True):
            text = task.worked_example(row, float(uniform))
            completion = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
            groups.append((encode_prompt(row.engine_prompt, tokenizer, vocab_size), [completion]))
        pack = build_pack(groups, layer, module.device, row_multiple=numerics.row_multiple)
        loss = -score_tokens(view, pack, SamplingParams()).logprobs.mean()
        loss.backward()
        optimizer.step(learning_rate(optim, step, config.warm_start_steps))
        if (step + 1) % 100 == 0:
            logger.info("warm start: step %d/%d  loss %.3f", step + 1, config.warm_start_steps, loss.item())
    optimizer.close()
