"""Runs on datasets: the same rows are the same run, whatever they lie in, and what a run began with is held to."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

import tiny_models
from runs import configure
from trainer.config import ConfigError
from trainer.loop import train
from trainer.run import Run, prepare
from trainer.tracking.tracking import read_metrics

ROWS = [{"question": "ab" * (1 + i % 3) + f"{i}?", "answer": f"Think.\n#### 1,{i:03}", "id": i} for i in range(12)]
REWARD = """
def early(completions, id):
    with open({seen!r}, "a") as file:
        print(*id, file=file)
    return [float(-(text + "a").index("a")) for text in completions]
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A small model, and the rows as JSONL, Parquet and a saved directory; the reward writes down what it sees."""
    datasets.disable_progress_bars()
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    directory = tiny_models.save_directory(tmp_path / "model", model, tiny_models.byte_tokenizer())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "judge.py").write_text(REWARD.format(seen=str(tmp_path / "seen")))
    return [
        "model=hf", f"model.path={directory}", "task=gsm8k", f"task.path={tmp_path}/rows.jsonl",
        "reward=custom", f"reward.path={tmp_path}/judge.py:early", "sampling.max_new_tokens=8", "optim.lr=1e-3",
        "optim.warmup_steps=0",
    ]  # fmt: skip


def _prepare(run_dir: Path, *overrides: str) -> Run:
    chosen = ["task.eval_rows=0", "checkpoint.every=1"]
    given = {override.partition("=")[0]: override for override in [*chosen, *overrides]}  # the last of two
    return prepare(configure(run_dir, *given.values()))


def _run(run_dir: Path, *overrides: str) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Final weights, and the lines of metrics without times and sizes."""
    run = _prepare(run_dir, *overrides)
    try:
        train(run)
        weights = [p.detach().clone() for p in run.engine.module.parameters()]
    finally:
        run.close()
    lines = read_metrics(run_dir / "metrics.jsonl")
    left_out = ("timing_s/", "memory/")
    return weights, [
        {k: v for k, v in line.items() if not k.startswith(left_out) and "per_second" not in k} for line in lines
    ]


def test_jsonl_parquet_and_a_saved_directory_are_one_run(tmp_path: Path, options: list[str]) -> None:
    runs, prompts = {}, {}
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        runs[name] = _run(tmp_path / f"run {name}", *options, f"task.path={tmp_path / name}", "steps=2")
        prompts[name] = load_file(tmp_path / f"run {name}" / "checkpoints/step-000002/prompts.safetensors")
    weights, metrics = runs["rows.jsonl"]
    before = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(weights[0], before)
    for name in ("rows.parquet", "saved"):
        assert all(torch.equal(a, b) for a, b in zip(runs[name][0], weights, strict=True))
        assert runs[name][1] == metrics
        assert all(torch.equal(prompts[name][key], ids) for key, ids in prompts["rows.jsonl"].items())
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[:2] == seen[2:4] == seen[4:]


def test_a_run_goes_on_with_the_same_rows_from_elsewhere(tmp_path: Path, options: list[str]) -> None:
    whole = _run(tmp_path / "whole", *options, "steps=2")
    _run(tmp_path / "parts", *options, "steps=1")
    moved = [*options, f"task.path={tmp_path}/saved", "task.split=train", "steps=2", "resume=auto"]
    weights, metrics = _run(tmp_path / "parts", *moved)
    assert metrics == whole[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, whole[0], strict=True))


def test_other_rows_are_refused_whatever_they_lie_in(tmp_path: Path, options: list[str]) -> None:
    _run(tmp_path / "run", *options, "steps=1")
    datasets.Dataset.from_list([ROWS[1], ROWS[0], *ROWS[2:]]).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"^task\.path: the training data has changed since the run began"):
        _prepare(tmp_path / "run", *options, f"task.path={tmp_path}/other.parquet", "resume=auto")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("task.system_prompt=Add.", r"^task\.system_prompt: the run began with None and would go on with 'Add\.'"),
        ("task.prefill=x", r"^task\.prefill: the run began with None"),
        ("task.chat=true", r"^task\.chat: the run began with False"),
        ("task.max_prompt_tokens=9", r"^task\.max_prompt_tokens: the run began with None"),
        ("task.answer_after=null", r"^task\.answer_after: the run began with '####'"),
        (
            "task.few_shot=null",
            r"^task\.few_shot, task\.tools: the text around prompts has changed since the run began",
        ),
        ("task.few_shot=[{prompt:a,answer:c}]", r"^task\.few_shot, task\.tools: the text around prompts has changed"),
    ],
)
def test_a_setting_that_would_change_the_trajectory_cannot_change(
    tmp_path: Path, options: list[str], changed: str, message: str
) -> None:
    (tmp_path / "shots.json").write_text('[{"question": "a", "answer": "b"}]')
    _run(tmp_path / "run", *options, f"task.few_shot={tmp_path}/shots.json", "steps=1")
    same = "task.few_shot=[{prompt:a,answer:b}]"
    _prepare(tmp_path / "run", *options, same, "resume=auto").close()
    with pytest.raises(ConfigError, match=message):
        _prepare(tmp_path / "run", *options, same, changed, "resume=auto")


def test_long_prompts_are_never_seen_also_across_a_resume(tmp_path: Path, options: list[str]) -> None:
    """Rows 2, 5, 8 and 11 have 8 tokens or more, and each step has 4 of the 8 others."""
    limited = [*options, "task.max_prompt_tokens=7"]
    whole = _run(tmp_path / "whole", *limited, "steps=4")
    seen = [int(i) for line in (tmp_path / "seen").read_text().splitlines() for i in line.split()[::4]]
    assert sorted(seen) == sorted([0, 1, 3, 4, 6, 7, 9, 10] * 2)
    _run(tmp_path / "parts", *limited, "steps=2")
    weights, metrics = _run(tmp_path / "parts", *limited, "steps=4", "resume=auto")
    assert metrics == whole[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, whole[0], strict=True))


def test_a_step_encodes_no_text(tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are ids by then, and a completion's ids are those that were sampled, never those of its text."""
    run = _prepare(tmp_path / "run", *options)
    try:
        calls: list[object] = []
        for name in ("__call__", "encode", "_encode_plus", "tokenize"):
            monkeypatch.setattr(type(run.tokenizer), name, lambda *given, **_: calls.append(given))
        result = run.trainer.step(0)
    finally:
        run.close()
    assert calls == []
    run.tokenizer("it is noticed")
    assert len(calls) == 1
    assert [group.prompt_ids for group in result.groups] == [list(row.prompt_ids or ()) for row in result.rows]


def test_the_engine_is_given_what_the_settings_say(tmp_path: Path, options: list[str]) -> None:
    shots = "task.few_shot=[{prompt:a,answer:b}]"
    run = _prepare(tmp_path / "run", *options, shots, "task.chat=true", "task.system_prompt=S", "task.prefill=P")
    try:
        groups = run.trainer.collector.collect(0).groups
        order = [row.prompt for row in run.trainer.collector.rows.take(0, 4)]
        texts = [run.tokenizer.decode(group.prompt_ids) for group in groups]
    finally:
        run.close()
    assert texts == [f"<user>S\n<user>a\n<user>b\n<user>{prompt}\nA:P" for prompt in order]


def test_the_built_in_model_on_reasoning_gym(tmp_path: Path) -> None:
    """Its warm start imitates the library's answers, and the library scores what it samples."""
    pytest.importorskip("reasoning_gym")
    options = ["task=reasoning_gym", "task.name=[chain_sum,gcd]", "task.size=20", "task.eval_rows=4"]
    small = ["model.warm_start_steps=1", "model.warm_start_batch_size=4", "steps=1", "sampling.max_new_tokens=4"]
    run = _prepare(tmp_path / "run", *options, *small)
    try:
        result = run.trainer.step(0)
        datasets_seen = {row.columns["dataset"] for row in run.task.train_rows}
    finally:
        run.close()
    assert datasets_seen == {"chain_sum", "gcd"}
    expected = [
        run.task.reward(
            completions=[r.text for r in group.rollouts], entry=[row.columns["entry"]] * len(group.rollouts)
        )
        for row, group in zip(result.rows, result.groups, strict=True)
    ]
    assert result.scores.totals.tolist() == expected
    assert ((result.scores.totals >= 0) & (result.scores.totals <= 1)).all()
