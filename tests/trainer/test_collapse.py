"""A run that has gone wrong ends by itself."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

import tiny_models
from runs import configure, hf_overrides, metrics_of, write_rows
from trainer.config import StopConfig
from trainer.loop import train
from trainer.run import prepare
from trainer.storage.folders import list_checkpoints
from trainer.tracking.collapse import CollapseError, CollapseWatch

GOOD = {
    "sampling/sampling_logp_difference/mean": 0.0, "entropy": 1.0, "reward": 0.5, "completions/mean_length": 10.0,
    "skipped_updates": 0.0,
}  # fmt: skip
BAD = [
    (StopConfig(max_gap=0.1), {"sampling/sampling_logp_difference/mean": 0.2}),
    (StopConfig(min_entropy=0.05), {"entropy": 0.01}),
    (StopConfig(min_reward=0.1), {"reward": 0.0}),
    (StopConfig(min_length=5), {"completions/mean_length": 1.0}),
    (StopConfig(max_length=50), {"completions/mean_length": 60.0}),
    (StopConfig(max_skipped=1), {"skipped_updates": 1.0}),
]
CASES = pytest.mark.parametrize(("config", "bad"), BAD, ids=[next(iter(bad)) for _, bad in BAD])


@CASES
def test_bad_steps_in_a_row_end_it(config: StopConfig, bad: dict[str, float]) -> None:
    watch = CollapseWatch(config)
    for step in (1, 2):
        watch.check(GOOD | bad, step)
    watch.check(GOOD, 3)  # one good step in between
    for step in (4, 5):
        watch.check(GOOD | bad, step)
    with pytest.raises(CollapseError, match=rf"^stop\.\w+=.*: {next(iter(bad))} is .* at step 6, 3 in a row"):
        watch.check(GOOD | bad, 6)


@CASES
def test_steps_at_the_beginning_are_not_judged(config: StopConfig, bad: dict[str, float]) -> None:
    config.after = 10
    watch = CollapseWatch(config)
    for step in range(1, 13):
        watch.check(GOOD | bad, step)
    with pytest.raises(CollapseError):
        watch.check(GOOD | bad, 13)


def test_nothing_is_judged_by_itself() -> None:
    watch = CollapseWatch(StopConfig())
    for step in range(9):
        watch.check(dict.fromkeys(GOOD, -1e9), step)


def test_a_collapsed_run_leaves_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    model: PreTrainedModel = tiny_models.random_model(
        "qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS
    )
    given = hf_overrides(tmp_path, model, write_rows(tmp_path / "rows.jsonl"))
    given += ["steps=9", "checkpoint.every=100", "eval.every=0", "stop.min_reward=1", "stop.patience=2"]
    run = prepare(configure(tmp_path / "run", *given))
    with pytest.raises(CollapseError, match=r"stop\.min_reward=1: reward is"):
        train(run)
    run.close(1)
    assert [path.name for path in list_checkpoints(run.run_dir)] == ["step-000002"]
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
