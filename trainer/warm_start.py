"""Warm start: imitate worked examples briefly, since a random model earns no reward to learn from.

The result is cached by content: the key is a digest of the model's shape, the examples, the settings and versions.
"""

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

from rollout import SamplingParams
from rollout.builtin import build_tiny, tiny_config
from rollout.kv_cache import LayerGroup
from rollout.packing import build_pack
from rollout.prompts import encode_prompt
from rollout.scoring import score_tokens
from rollout.views import training_view
from rollout_kernels.cache import cache_directory
from rollout_kernels.native import identity
from trainer.config import ModelConfig, OptimConfig, TaskConfig
from trainer.optimizer import MasterAdamW, learning_rate
from trainer.rows import STYLE_PURPOSE, WARM_START_PURPOSE, Row, RowStream, uniforms
from trainer.tasks import Task

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1


def warm_started_tiny(model: ModelConfig, task_config: TaskConfig, task: Task, seed: int) -> Path:
    """Directory of the tiny model after its warm start on `task`, if that has one; made now unless it is cached."""
    contents = {
        "format_version": _FORMAT_VERSION,
        "model": asdict(model),
        "task": asdict(task_config),
        "seed": seed,
        "shape": tiny_config().to_diff_dict(),
        "examples": [_example(task, row, place / 64) for place, row in enumerate(task.train_rows[:64])],
        "num_threads": torch.get_num_threads(),
        "kernels": identity(torch.device("cpu")),
        "versions": [torch.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]
    imitates = task.worked_example is not None and model.warm_start_steps > 0
    target = cache_directory() / ("warm_start" if imitates else "random") / digest
    if not imitates:
        logger.warning("no warm start: training begins with random weights, which may earn no reward to learn from")
    if (target / "config.json").is_file():
        logger.info("model: taken from the cache, %s", target)
        return target
    module, tokenizer = build_tiny(seed)
    if imitates:
        logger.info("warm start: %d steps of imitation on worked examples", model.warm_start_steps)
        imitate(module, tokenizer, model, task, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".writing-"))
    module.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
        shutil.rmtree(partial)  # another run of the same configuration was faster
    return target


def _example(task: Task, row: Row, uniform: float) -> str:
    return f"{row.prompt}{task.worked_example(row, uniform) if task.worked_example is not None else ''}"


def imitate(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, task: Task, seed: int
) -> None:
    """Maximise the likelihood of worked examples for config.warm_start_steps steps, in place."""
    assert task.worked_example is not None
    optim = OptimConfig(lr=config.warm_start_lr, warmup_steps=20, schedule="linear")
    optimizer = MasterAdamW(module.named_parameters(), optim)
    stream = RowStream(task.train_rows, seed, WARM_START_PURPOSE)
    vocab_size, end = module.config.vocab_size, tokenizer.eos_token_id
    size = config.warm_start_batch_size
    layer = LayerGroup.of(module.config, module.dtype)
    view = training_view(module, exact=False, gradient_checkpointing=False)
    for step in range(config.warm_start_steps):
        rows = stream.take(step * size, size)
        groups = []
        for row, uniform in zip(rows, uniforms(size, seed, STYLE_PURPOSE, step), strict=True):
            text = task.worked_example(row, float(uniform))
            completion = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
            groups.append((encode_prompt(row.prompt, tokenizer, vocab_size), [completion]))
        pack = build_pack(groups, layer, module.device, exact=False)
        loss = -score_tokens(view, pack, SamplingParams()).logprobs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(learning_rate(optim, step, config.warm_start_steps))
        if (step + 1) % 100 == 0:
            logger.info("warm start: step %d/%d  loss %.3f", step + 1, config.warm_start_steps, loss.item())
    optimizer.close()
