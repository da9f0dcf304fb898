"""Whole runs of the smoke experiment, in this process."""

import json
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

import tiny_models
from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import TrainerConfig, parse_config
from trainer.loop import train
from trainer.run import Run, prepare
from trainer.tracking.tracking import read_metrics

CHANGING = ("timing_s/", "memory/")


def configure(run_dir: Path, *overrides: str) -> TrainerConfig:
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        chosen = ["experiment=smoke", f"run_dir={run_dir}", "name=test", "checkpoint.every=0", *overrides]
        return parse_config(compose("config", chosen))


def run_once(run_dir: Path, *overrides: str) -> Run:
    run = prepare(configure(run_dir, *overrides))
    try:
        train(run)
    finally:
        run.close()
    return run


def metrics_of(run: Run) -> list[dict[str, float]]:
    """The lines, without what differs from one run to the next."""
    lines = read_metrics(run.run_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(CHANGING) and "per_second" not in k} for line in lines]


def weights_of(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.engine.module.parameters()]


def write_rows(path: Path, count: int = 12, **columns: Any) -> Path:
    rows = [{"prompt": "ab" * (1 + i % 3) + str(i), "answer": str(i), "id": i} | columns for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def hf_overrides(folder: Path, model: PreTrainedModel, rows: Path) -> list[str]:
    """Overrides for a run on a saved model directory and a JSONL file, rewarded by how early the text has an 'a'."""
    directory = tiny_models.save_directory(folder / "model", model, tiny_models.byte_tokenizer())
    reward = folder / "reward.py"
    reward.write_text(
        "def early(completions):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [float(-(text + 'a').index('a')) for text in texts]\n"
    )
    return [
        "model=hf", f"model.path={directory}", "task=jsonl", f"task.path={rows}",
        "task.eval_rows=0", "reward=custom", f"reward.path={reward}:early", "sampling.max_new_tokens=8",
        "optim.lr=1e-3", "optim.warmup_steps=0",
    ]  # fmt: skip
