"""Checkpoints: complete or not there, loadable by transformers, and only for the run they belong to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import tiny_models
from rollout.loading import load_model
from trainer import checkpoint
from trainer.checkpoint import TrainerState
from trainer.config import ConfigError, OptimConfig
from trainer.optimizer import MasterAdamW

KEYS = {"optim.lr": 0.1, "sampling.stop_token_ids": [1, 2]}


def _step(model: PreTrainedModel) -> MasterAdamW:
    optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
    model(input_ids=torch.arange(9)[None]).logits.float().square().mean().backward()
    optimizer.step(1e-2)
    return optimizer


def _stepped(arch: str, dtype: torch.dtype) -> tuple[PreTrainedModel, MasterAdamW]:
    model = tiny_models.random_model(arch, dtype=dtype)
    return model, _step(model)


def _save(run_dir: Path, step: int, model: PreTrainedModel, optimizer: MasterAdamW, keep: int = 2) -> Path:
    state = TrainerState(step, KEYS, 1)
    return checkpoint.save_checkpoint(run_dir, state, model, tiny_models.byte_tokenizer(), optimizer, keep)


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_model_with_equal_logits(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    made = tiny_models.save_directory(tmp_path / "made", tiny_models.random_model(arch, dtype=dtype))
    model = load_model(made)
    saved = _save(tmp_path, 1, model, _step(model))
    loaded = AutoModelForCausalLM.from_pretrained(saved / "model", dtype=dtype)
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])  # untied and tied embeddings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_state_come_back_into_the_same_tensors(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    model, optimizer = _stepped(arch, dtype)
    saved = _save(tmp_path, 1, model, optimizer)
    other = tiny_models.random_model(arch, seed=5, dtype=dtype)
    addresses = [p.data_ptr() for p in other.parameters()]
    restored = MasterAdamW(other.named_parameters(), OptimConfig())
    checkpoint.load_checkpoint(saved, other, restored)
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before, after = optimizer.state_tensors(), restored.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_only_the_last_checkpoints_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    for step in (2, 10, 100):
        _save(tmp_path, step, model, optimizer)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000010", "step-000100"]
    found = checkpoint.find_checkpoint("auto", tmp_path)
    assert found == checkpoint.find_checkpoint(str(tmp_path), Path("elsewhere")) == tmp_path / "checkpoints/step-000100"
    assert checkpoint.find_checkpoint("auto", tmp_path / "new") is None
    with pytest.raises(ConfigError, match="resume"):
        checkpoint.find_checkpoint(str(tmp_path / "new"), tmp_path)


def test_a_crash_while_writing_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    first = _save(tmp_path, 2, model, optimizer)

    def crash(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", crash)
        with pytest.raises(OSError, match="disk full"):
            _save(tmp_path, 4, model, optimizer)
    assert checkpoint.find_checkpoint("auto", tmp_path) == first
    _save(tmp_path, 4, model, optimizer)  # what the crash left behind is in nobody's way
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (KEYS | {"optim.lr": 0.2}, "optim.lr: the run began with 0.1"),
        (KEYS | {"sampling.stop_token_ids": [1]}, "sampling.stop_token_ids"),
        (KEYS | {"new": 1}, "new: the run began with None"),
    ],
)
def test_a_changed_key_is_named(tmp_path: Path, now: dict[str, Any], named: str) -> None:
    saved = _save(tmp_path, 1, *_stepped("llama", torch.float32))
    assert checkpoint.read_state(saved, KEYS) == TrainerState(1, KEYS, 1)
    with pytest.raises(ConfigError, match=named):
        checkpoint.read_state(saved, now)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    saved = _save(tmp_path, 1, *_stepped("llama", torch.float32))
    state = json.loads((saved / "trainer.json").read_text())
    (saved / "trainer.json").write_text(json.dumps(state | {"format_version": 99}))
    with pytest.raises(ConfigError, match="format_version 99"):
        checkpoint.read_state(saved, KEYS)


def test_contradictory_sampling_defaults_do_not_block_saving(tmp_path: Path) -> None:
    from trainer.run import _clean_generation_config

    model, optimizer = _stepped("llama", torch.float32)
    model.generation_config.update(do_sample=False, temperature=0.9, top_p=0.6, eos_token_id=[7, 9])
    _clean_generation_config(model)
    saved = _save(tmp_path, 1, model, optimizer)
    assert json.loads((saved / "model/generation_config.json").read_text())["eos_token_id"] == [7, 9]
