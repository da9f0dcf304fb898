"""An option that fits no row, or that the machine cannot meet, is refused by its key before anything is loaded."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

import tiny_models
from rollout import RolloutError
from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import ConfigError, TrainerConfig, parse_config
from trainer.config.limits import check_device
from trainer.loop import train
from trainer.run import Run, prepare
from trainer.tracking.tracking import read_metrics


def _configure(folder: Path, *overrides: str) -> TrainerConfig:
    common = ["experiment=smoke", f"run_dir={folder / 'run'}", "name=test", "checkpoint.every=0", "eval.every=1"]
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        return parse_config(
            compose("config", [o for o in common if o.split("=")[0] not in str(overrides)] + [*overrides])
        )


def _model(folder: Path) -> list[str]:
    """Overrides for a saved model of 512 positions and 264 tokens, whose weights are refused when they are read."""
    model = tiny_models.random_model("llama", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    directory = tiny_models.save_directory(folder / "model", model, tiny_models.byte_tokenizer())
    return [
        "model=hf",
        f"model.path={directory}",
        "task=jsonl",
        "sampling.max_new_tokens=8",
    ]


def _rows(path: Path, *lengths: int) -> str:
    path.write_text("".join(json.dumps({"prompt": "b" * length, "answer": "x"}) + "\n" for length in lengths))
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.stop_token_ids=[3,260]"], "sampling.stop_token_ids: 260 is outside the model's vocabulary of 260"),
        (["sampling.stop_token_ids=[999999]"], "sampling.stop_token_ids: 999999 is outside"),
        (["sampling.top_k=261"], "sampling.top_k=261: the model's vocabulary has 260 tokens; 0 keeps all"),
        (["rollout.num_blocks=1"], "rollout.num_blocks=1: a row of 6 tokens with sampling.max_new_tokens=24 needs"),
        (["rollout.num_blocks=5", "rollout.block_size=5"], "rollout.num_blocks=5: a row of 6 tokens with"),
        (
            ["rollout.num_blocks=2", "eval.max_new_tokens=27"],
            "rollout.num_blocks=2: a held-out row of 6 tokens with",
        ),
        (
            ["rollout.max_model_len=6"],
            "rollout.max_model_len=6: no row of the task fits; the shortest prompt has",
        ),
        (
            ["rollout.max_model_len=29"],
            "sampling.max_new_tokens=24: no row leaves room for it within",
        ),
        (["eval.max_new_tokens=507"], "eval.max_new_tokens=507: no held-out row leaves room for it within"),
        (["rollout.max_model_len=513"], "rollout.max_model_len=513 is more than the model's max_position_embeddings"),
        (["rollout.memory_fraction=1e-9"], "rollout.memory_fraction=1e-09 of "),
    ],
)
def test_an_option_that_fits_no_row_is_refused_before_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setenv("COWROLL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError) as caught:
        prepare(_configure(tmp_path, *overrides))
    assert str(caught.value).startswith(message)
    assert list(tmp_path.glob("cache/warm_start/*")) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "lengths", "message"),
    [
        (
            ["sampling.stop_token_ids=[264]"],
            [5],
            "sampling.stop_token_ids: 264 is outside the model's vocabulary",
        ),
        ([], [600, 512], "rollout.max_model_len=512: no row of the task fits; the shortest prompt has 512 tokens"),
        (
            ["sampling.max_new_tokens=100"],
            [600, 420],
            "sampling.max_new_tokens=100: no row leaves room for it within",
        ),
        (
            ["rollout.num_blocks=13"],
            [600, 5, 201],
            "rollout.num_blocks=13: a row of 201 tokens with ",
        ),
    ],
)
def test_before_the_weights_are_read(tmp_path: Path, overrides: list[str], lengths: list[int], message: str) -> None:
    rows = f"task.path={_rows(tmp_path / 'rows.jsonl', *lengths)}"
    with pytest.raises(ConfigError) as caught:
        prepare(_configure(tmp_path, *_model(tmp_path), rows, "task.eval_rows=0", *overrides))
    assert str(caught.value).startswith(message)


def test_held_out_rows_of_which_none_fits_are_refused(tmp_path: Path) -> None:
    rows = [f"task.path={_rows(tmp_path / 'a.jsonl', 5)}", f"task.eval_path={_rows(tmp_path / 'b.jsonl', 512, 700)}"]
    with pytest.raises(ConfigError, match=r"^rollout\.max_model_len=512: no held-out row of the task fits"):
        prepare(_configure(tmp_path, *_model(tmp_path), *rows))


def test_what_only_some_rows_cannot_have_is_said_once(
    tmp_path: Path, text_model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = _model(tmp_path)
    tiny_models.save_directory(tmp_path / "model", text_model, tiny_models.byte_tokenizer())
    rows = f"task.path={_rows(tmp_path / 'rows.jsonl', 5, 505, 511, 512, 900)}"
    with caplog.at_level(logging.WARNING):
        prepare(_configure(tmp_path, *chosen, rows, "task.eval_rows=0")).close()
    said = [message for message in caplog.messages if "rows" in message]
    assert said == [
        "2 of 5 rows do not fit rollout.max_model_len=512 and will be skipped",
        "2 of 5 rows leave less than sampling.max_new_tokens=8 within rollout.max_model_len=512: their completions end"
        " sooner",
    ]


@pytest.fixture
def text_model() -> PreTrainedModel:
    return tiny_models.random_model("llama", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)


def test_a_step_of_which_no_prompt_can_be_run_is_an_error(tmp_path: Path, text_model: PreTrainedModel) -> None:
    chosen = _model(tmp_path)
    tiny_models.save_directory(tmp_path / "model", text_model, tiny_models.byte_tokenizer())
    rows = f"task.path={_rows(tmp_path / 'rows.jsonl', 1, 600)}"
    run = prepare(_configure(tmp_path, *chosen, rows, "task.eval_rows=0", "algorithm.prompts_per_step=1"))
    with pytest.raises(RolloutError, match=r"^step [12]: none of its 1 prompts could be run; .*600 tokens"):
        train(run)
    run.close(1)
    assert all(line["num_prompts"] == 1 for line in read_metrics(run.run_dir / "metrics.jsonl"))


def _done(folder: Path, *overrides: str) -> Run:
    shape = ["model.warm_start_steps=0", "sampling.ignore_eos=true", "sampling.max_new_tokens=26", "steps=1"]
    run = prepare(_configure(folder, *shape, "eval.every=0", *overrides))
    train(run)
    run.close()
    return run


def test_the_smallest_pool_that_is_accepted_changes_nothing(tmp_path: Path) -> None:
    """6 and 26 tokens fill two blocks of 16 to the last place."""
    small, large = (_done(tmp_path / str(n), f"rollout.num_blocks={n}") for n in (2, "null"))
    (ours,), (theirs,) = (read_metrics(run.run_dir / "metrics.jsonl") for run in (small, large))
    assert small.engine.pool.num_blocks == 2
    assert ours["completions/min_length"] == 26.0
    kept = [key for key in ours if not key.startswith(("timing_s/", "rollout/", "memory/"))]
    assert {key: ours[key] for key in kept} == {key: theirs[key] for key in kept}
    pairs = zip(small.engine.module.parameters(), large.engine.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_card_that_is_not_there_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("COWROLL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=rf"^rollout\.device='{device}': this machine has no CUDA device"):
        prepare(_configure(tmp_path, f"rollout.device={device}"))
    assert os.listdir(tmp_path) == []


def test_a_card_past_the_last_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device(_configure(tmp_path, "rollout.device=cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"^rollout\.device='cuda:2': the machine has 2 CUDA devices"):
        check_device(_configure(tmp_path, "rollout.device=cuda:2"))
