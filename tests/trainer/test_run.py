"""Whole runs in small: the loop's promises, on the real engine."""

import json
import random
import resource
import shutil
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import chat_template_utils

import tiny_models
from rollout import RolloutError, generate_rollouts
from rollout_kernels.ops import choose
from runs import configure, hf_overrides, metrics_of, run_once, weights_of, write_rows
from trainer.config import ConfigError
from trainer.loop import train
from trainer.run import Run, prepare
from trainer.storage import folders
from trainer.storage.writing import WriteError
from trainer.tracking.tracking import read_metrics


@pytest.fixture
def text_model() -> PreTrainedModel:
    return tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)


@pytest.mark.slow
def test_two_runs_of_one_seed_agree_and_another_seed_does_not(tmp_path: Path) -> None:
    first, second, other = (run_once(tmp_path / name, f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert metrics_of(first) == metrics_of(second) != metrics_of(other)
    assert all(line["logprob_gap_max"] == 0.0 for line in metrics_of(first) if line["step"])
    assert [line["step"] for line in metrics_of(first)] == [0, 1, 2, 3]


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_on_jsonl_moves_the_weights_and_saves_what_transformers_loads(
    tmp_path: Path, arch: str, dtype: torch.dtype
) -> None:
    model = tiny_models.random_model(arch, vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS, dtype=dtype)
    overrides = hf_overrides(tmp_path, model, write_rows(tmp_path / "rows.jsonl"))
    run = run_once(tmp_path / "run", *overrides, "steps=10", "checkpoint.every=5")
    lines = metrics_of(run)
    assert all(torch.tensor(list(line.values())).isfinite().all() for line in lines)
    assert [line["logprob_gap_max"] for line in lines] == [0.0] * 10
    assert not torch.equal(model.get_input_embeddings().weight, run.engine.module.get_input_embeddings().weight)
    loaded = AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints/step-000010/model", dtype=dtype)
    ids = torch.arange(30)[None]
    assert torch.equal(loaded(input_ids=ids).logits, run.engine.module(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, dtype: torch.dtype) -> None:
    """Stopped after step 3 (a checkpoint at 2), in the middle of an epoch of 12 rows."""
    model = tiny_models.random_model("qwen2", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=1, dtype=dtype)
    overrides = hf_overrides(tmp_path, model, write_rows(tmp_path / "rows.jsonl"))
    whole = run_once(tmp_path / "whole", *overrides, "steps=6")
    run_once(tmp_path / "parts", *overrides, "steps=3", "checkpoint.every=2", "checkpoint.keep=5")
    (tmp_path / "parts/checkpoints/step-000003/trainer.json").unlink()  # as if it had not been written
    resumed = run_once(tmp_path / "parts", *overrides, "steps=6", "resume=auto")
    assert metrics_of(resumed) == metrics_of(whole)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(resumed), weights_of(whole), strict=True))


def test_every_row_is_seen_as_often_as_planned_also_across_a_resume(tmp_path: Path) -> None:
    """12 rows, 4 per step: two epochs in 6 steps, cut at step 4."""
    seen = tmp_path / "seen.txt"
    reward = tmp_path / "log.py"
    reward.write_text(
        "def log(completions, id):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        file.write(' '.join(map(str, id[::4])) + chr(10))\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    model = tiny_models.random_model("llama", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=1)
    overrides = hf_overrides(tmp_path, model, write_rows(tmp_path / "rows.jsonl"))
    overrides += [f"reward.path={reward}:log"]
    run_once(tmp_path / "whole", *overrides, "steps=6")
    whole = seen.read_text().split("\n")
    seen.unlink()
    run_once(tmp_path / "parts", *overrides, "steps=4", "checkpoint.every=4")
    run_once(tmp_path / "parts", *overrides, "steps=6", "resume=auto")
    assert seen.read_text().split("\n") == whole
    places = " ".join(whole).split()
    assert [sorted(map(int, part)) for part in (places[:12], places[12:])] == [list(range(12))] * 2


def test_the_split_into_micro_batches_does_not_matter(tmp_path: Path, text_model: PreTrainedModel) -> None:
    overrides = hf_overrides(tmp_path, text_model, write_rows(tmp_path / "rows.jsonl"))
    runs = [
        run_once(tmp_path / str(size), *overrides, "steps=2", f"algorithm.micro_batch_tokens={size}")
        for size in (100_000, 60, 1)
    ]
    for run in runs[1:]:
        for ours, theirs in zip(metrics_of(run), metrics_of(runs[0]), strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        for a, b in zip(weights_of(run), weights_of(runs[0]), strict=True):
            assert (a - b).norm() < 1e-5 * b.norm()


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    often, never = (run_once(tmp_path / str(every), f"eval.every={every}") for every in (1, 0))
    trained = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in metrics_of(often)[1:]]
    assert trained == metrics_of(never)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_first_ratio_is_one_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    run = run_once(tmp_path, f"sampling.temperature={temperature}", "optim.lr=0", "steps=2")
    for line in metrics_of(run)[1:]:
        assert [line[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")] == [1.0] * 3


def test_where_bits_differ_the_trainer_says_so_and_uses_its_own_log_probs(tmp_path: Path) -> None:
    run = run_once(tmp_path, "rollout.exact=off")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exact"], summary["exact_reason"]) == (False, "exact=off")
    for line in metrics_of(run)[1:]:
        assert line["sampling/importance_sampling_ratio/max"] == 1.0


def test_a_kl_term_is_zero_at_first_and_grows(tmp_path: Path, text_model: PreTrainedModel) -> None:
    overrides = hf_overrides(tmp_path, text_model, write_rows(tmp_path / "rows.jsonl"))
    run = run_once(tmp_path / "run", *overrides, "algorithm.kl_coef=0.1", "steps=3")
    kl = [line["kl"] for line in metrics_of(run)]
    assert kl[0] == 0.0
    assert 0.0 < kl[1] < kl[2]


def test_an_over_long_prompt_is_skipped_and_counted(tmp_path: Path, text_model: PreTrainedModel) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "answer": "x"}) + "\n" for p in ("a", "b" * 600, "c", "d")))
    overrides = hf_overrides(tmp_path, text_model, rows)
    run = run_once(tmp_path / "run", *overrides, "steps=1")
    assert metrics_of(run)[0]["num_prompts"] == 3


def test_a_task_of_which_no_row_fits_is_refused(tmp_path: Path, text_model: PreTrainedModel) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "b" * 600, "answer": "x"}) + "\n")
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len=512: no row of the task fits"):
        prepare(configure(tmp_path / "run", *hf_overrides(tmp_path, text_model, rows)))


def test_a_user_reward_may_call_the_library_on_the_running_engine(tmp_path: Path) -> None:
    reward = tmp_path / "judge.py"
    reward.write_text(
        "from rollout import generate_rollouts\n"
        "def judge(completions):\n"
        "    (group,) = generate_rollouts(['1+1='], n=1, temperature=0.0, max_new_tokens=2)\n"
        "    return [float(len(group.rollouts[0].completion_ids))] * len(completions)\n"
    )
    run = run_once(tmp_path / "run", "reward=custom", f"reward.path={reward}:judge", "eval.every=0")
    assert all(line["reward"] in (1.0, 2.0) for line in metrics_of(run))
    with pytest.warns(UserWarning, match="built-in tiny model"):
        generate_rollouts(["1+1="], n=1, max_new_tokens=1)


def test_a_bad_reward_names_itself_and_the_engine_stays_usable(tmp_path: Path) -> None:
    reward = tmp_path / "bad.py"
    reward.write_text("def bad(completions):\n    return [0.0]\n")
    run = prepare(configure(tmp_path / "run", "reward=custom", f"reward.path={reward}:bad", "eval.every=0"))
    with pytest.raises(RolloutError, match=r"bad returned 1 values for 4 completions, for row "):
        train(run)
    stats = run.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert len(run.engine.generate_rollouts(["1+1="], 2)[0].rollouts) == 2
    run.close()


def test_a_run_directory_is_not_overwritten(tmp_path: Path) -> None:
    run_once(tmp_path, "steps=1")
    with pytest.raises(ConfigError, match=r"run_dir.*holds a run already"):
        prepare(configure(tmp_path, "steps=1"))


def test_a_resume_with_another_learning_rate_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path, "steps=1", "checkpoint.every=1")
    with pytest.raises(ConfigError, match=r"optim\.lr: the run began with"):
        prepare(configure(tmp_path, "steps=2", "resume=auto", "optim.lr=0.5"))


def test_a_resume_on_other_kernels_or_threads_says_so(
    tmp_path: Path, use_kernels: Callable[[str], None], caplog: pytest.LogCaptureFixture, restore_threads: None
) -> None:
    run_once(tmp_path, "steps=1", "checkpoint.every=1")
    began, threads = choose(torch.device("cpu"), torch.float32).identity, torch.get_num_threads()
    use_kernels("torch")
    torch.set_num_threads(threads + 1)
    prepare(configure(tmp_path, "steps=2", "resume=auto")).close()
    told = [m for m in caplog.messages if m.startswith("the run began")]
    expected = [f"{threads} threads and goes on with {threads + 1}", f"kernels {began} and goes on with torch"]
    assert told == [f"the run began with {what}" for what in expected][: 1 if began == "torch" else 2]


def test_resuming_from_an_earlier_checkpoint_drops_the_later_ones_when_the_first_new_one_is_there(
    tmp_path: Path,
) -> None:
    options = ["steps=6", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=0"]
    before = metrics_of(run_once(tmp_path, *options))
    names, first = [f"step-{step:06d}" for step in (2, 4, 6)], tmp_path / "checkpoints/step-000002"
    run = prepare(configure(tmp_path, *options, f"resume={first}"))
    run.close()
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == names
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    # as if killed before step 3: nothing of the first time is lost
    assert metrics_of(run_once(tmp_path, *options, "resume=auto")) == before
    options[1] = "checkpoint.every=3"
    first_new = run_once(tmp_path, *options[1:], "steps=3", f"resume={first}")
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == [names[0], "step-000003"]
    assert metrics_of(first_new) == before[:3]
    assert not (tmp_path / folders.METRICS_ASIDE).exists()


def test_another_runs_checkpoint_brings_its_metrics_along(tmp_path: Path) -> None:
    run_once(tmp_path / "a", "steps=2", "checkpoint.every=1")
    run = run_once(tmp_path / "b", "steps=3", f"resume={tmp_path / 'a/checkpoints/step-000001'}")
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3]
    assert len(list((tmp_path / "a/checkpoints").iterdir())) == 2


def test_starting_over_without_a_checkpoint_keeps_the_old_metrics_aside(tmp_path: Path) -> None:
    before = metrics_of(run_once(tmp_path, "steps=2"))
    after = metrics_of(run_once(tmp_path, "steps=2", "resume=auto"))
    assert after == before
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.before-restart.jsonl")] == [0, 1, 2]


def test_resuming_a_finished_run_leaves_its_summary_alone(tmp_path: Path) -> None:
    run_once(tmp_path, "steps=2", "checkpoint.every=2")
    before = (tmp_path / "summary.json").read_text()
    run_once(tmp_path, "steps=2", "checkpoint.every=2", "resume=auto")
    assert (tmp_path / "summary.json").read_text() == before


@pytest.mark.parametrize("exact", ["auto", "require"])
def test_a_difference_after_all_is_refused_or_recomputed(
    tmp_path: Path, exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is a sample: here the generator's log-probs are off by a little in a run that it took for exact."""
    run = prepare(configure(tmp_path, f"rollout.exact={exact}", "eval.every=0"))
    append = run.engine._core._append

    def off(sequence: Any, token: int, logprob: float, raw_logprob: float) -> bool:
        return append(sequence, token, logprob - 0.125, raw_logprob)

    monkeypatch.setattr(run.engine._core, "_append", off)
    if exact == "require":
        with pytest.raises(RolloutError, match=r"differ by up to 0\.12"):
            train(run)
        run.close(1)
        return
    train(run)
    run.close()
    ratios = [line["sampling/importance_sampling_ratio/max"] for line in metrics_of(run)]
    assert ratios[0] > 1.1
    assert ratios[1:] == [1.0, 1.0]
    assert not run.engine.numerics.exact


# -- damage, and what changed between a run and its resume ----------------------------------------------------------


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of 4 steps with checkpoints at 2 and 4, and its overrides."""
    folder = tmp_path_factory.mktemp("half")
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    overrides = hf_overrides(folder, model, write_rows(folder / "rows.jsonl"))
    overrides += ["task.eval_rows=2", "checkpoint.every=2"]
    run_once(folder / "run", *overrides, "steps=4")
    return folder, overrides


@pytest.fixture
def changed(half: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of it whose files a test may change."""
    folder, overrides = half
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy", [override.replace(str(folder), str(tmp_path / "copy")) for override in overrides]


def _go_on(folder: Path, overrides: list[str], *more: str) -> Run:
    return run_once(folder / "run", *overrides, "steps=6", "resume=auto", *more)


def _prepared(folder: Path, overrides: list[str], *more: str) -> int:
    """The step that a resume would go on from."""
    run = prepare(configure(folder / "run", *overrides, "steps=6", "resume=auto", *more))
    run.close()
    return run.start_step


def test_copies_beside_the_checkpoints_are_left_alone(changed: tuple[Path, list[str]]) -> None:
    folder, overrides = changed
    root = folder / "run/checkpoints"
    for name in ("step-000004-backup", "step-best", "step-000009.old"):
        shutil.copytree(root / "step-000004", root / name)
    assert _go_on(folder, overrides, "checkpoint.keep=1").start_step == 4
    kept = {"step-000004-backup", "step-best", "step-000009.old", "step-000006"}
    assert {path.name for path in root.iterdir()} == kept


@pytest.mark.parametrize("seed", range(6))
def test_a_random_damage_is_refused_by_name_or_does_no_harm(changed: tuple[Path, list[str]], seed: int) -> None:
    folder, overrides = changed
    last, harm = folder / "run/checkpoints/step-000004", random.Random(seed)
    file = harm.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    data = file.read_bytes()
    if seed % 3:
        file.write_bytes(data[: harm.randrange(len(data))] if seed % 3 == 1 else bytes(len(data)))
    else:
        file.unlink()
    if file.name == "trainer.json" and not file.exists():
        assert _prepared(folder, overrides) == 2
    else:
        with pytest.raises(
            ConfigError, match=rf"^resume: {last} is damaged: {file.relative_to(last)} .*from step-000002"
        ):
            _prepared(folder, overrides)
    assert {path.name for path in last.parent.iterdir()} == {"step-000002", "step-000004"}
    shutil.rmtree(last)
    assert _prepared(folder, overrides) == 2


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def _other_weights(folder: Path) -> None:
    model = tiny_models.random_model("qwen3", seed=9, vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    model.save_pretrained(folder / "model")


CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an answer": (lambda f: _edit(f / "rows.jsonl", '"answer": "7"', '"answer": "8"'), "task.path", "data"),
    "a column": (lambda f: _edit(f / "rows.jsonl", '"id": 3}', '"id": 33}'), "task.path", "data"),
    "a row more": (lambda f: write_rows(f / "rows.jsonl", 13), "task.path", "data"),
    "reward": (lambda f: _edit(f / "reward.py", "float(-", "float(+"), "reward.path", "reward"),
    "weights": (_other_weights, "model.path", "model"),
    "config": (lambda f: _edit(f / "model/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), "", "model"),
    "template": (lambda f: _edit(f / "model/chat_template.jinja", "A:", "B:"), "model.path: the chat", "model"),
    "tokenizer": (lambda f: _edit(f / "model/tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'),
                  "model.path: the tok", "model"),
}  # fmt: skip


_QUICK = ("an answer", "reward", "tokenizer")


@pytest.mark.parametrize("change", [pytest.param(c, marks=[] if c in _QUICK else pytest.mark.slow) for c in CHANGES])
def test_changed_contents_are_refused_by_name_and_allowed_on_request(
    changed: tuple[Path, list[str]], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, overrides = changed
    make, named, group = CHANGES[change]
    make(folder)
    with pytest.raises(ConfigError, match=rf"^{named}.* has changed since the run began; .*resume_changed=\[{group}\]"):
        _prepared(folder, overrides)
    other = "reward" if group != "reward" else "data"
    with pytest.raises(ConfigError, match=rf"resume_changed=\[{other},{group}\]"):
        _prepared(folder, overrides, f"resume_changed=[{other}]")
    assert _prepared(folder, overrides, f"resume_changed=[{group}]") == 4
    assert "has changed since the run began, as resume_changed allows" in caplog.text


def test_what_was_allowed_once_is_what_later_resumes_are_held_to(changed: tuple[Path, list[str]]) -> None:
    folder, overrides = changed
    write_rows(folder / "rows.jsonl", 14, level=1)
    run = _go_on(folder, overrides, "resume_changed=[data]")
    assert [line["step"] for line in metrics_of(run) if "reward" in line] == [1, 2, 3, 4, 5, 6]
    assert _prepared(folder, overrides) == 6
    write_rows(folder / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"^task\.path: the (training|held-out) data has changed"):
        _prepared(folder, overrides)


def test_the_same_contents_in_another_place_are_no_change(changed: tuple[Path, list[str]]) -> None:
    folder, overrides = changed
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    spelled = "\n\n".join(json.dumps(dict(reversed(row.items())), indent=None, separators=(" ,", ": ")) for row in rows)
    (folder / "moved.jsonl").write_text(spelled)
    (folder / "model").rename(folder / "renamed")
    moved = [f"task.path={folder / 'moved.jsonl'}", f"model.path={folder / 'renamed'}"]
    assert _prepared(folder, overrides, *moved) == 4


def test_a_helper_that_the_reward_imports_belongs_to_it(
    changed: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, overrides = changed
    monkeypatch.syspath_prepend(str(folder))
    (folder / "reward.py").write_text("from helper_of_a_reward import early\n")
    (folder / "helper_of_a_reward.py").write_text(
        "def early(completions):\n    return [float(len(t)) for t in completions]\n"
    )
    _go_on(folder, overrides, "resume_changed=[reward]")
    with (folder / "helper_of_a_reward.py").open("a") as file:
        file.write("\n# another\n")
    with pytest.raises(ConfigError, match=r"^reward\.path: the reward has changed"):
        _prepared(folder, overrides)


DATED = "{{ strftime_now('%d %b %Y') }} " + tiny_models.CHAT_TEMPLATE


@pytest.mark.slow
def test_a_template_that_prints_the_date_gives_a_run_the_same_prompts_on_every_day(
    tmp_path: Path, text_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    messages = [[{"role": "user", "content": f"{i}+1="}] for i in range(8)]
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in messages))
    overrides = [*hf_overrides(tmp_path, text_model, rows), "checkpoint.every=2", "task.eval_rows=2", "eval.every=1"]
    tiny_models.byte_tokenizer(chat_template=DATED).save_pretrained(tmp_path / "model")

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Tomorrow":
            return cls(2030, 12, 31, tzinfo=tz)

    whole = run_once(tmp_path / "whole", *overrides, "steps=4")
    run_once(tmp_path / "parts", *overrides, "steps=2")
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    on_another_day = run_once(tmp_path / "parts", *overrides, "steps=4", "resume=auto")
    assert [r.prompt_ids for r in on_another_day.task.train_rows] == [r.prompt_ids for r in whole.task.train_rows]
    assert metrics_of(on_another_day)[3:] == metrics_of(whole)[3:]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(on_another_day), weights_of(whole), strict=True))
    fresh = run_once(tmp_path / "fresh", *overrides, "steps=1")
    assert [r.prompt_ids for r in fresh.task.train_rows] != [r.prompt_ids for r in whole.task.train_rows]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "checkpoints"])
def test_a_folder_with_half_of_a_run_is_not_taken_for_a_new_one(changed: tuple[Path, list[str]], missing: str) -> None:
    folder, overrides = changed
    path = folder / "run" / missing
    path.rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match=r"^run_dir: .* holds a run already"):
        run_once(folder / "run", *overrides, "steps=6")


def test_a_full_disk_ends_a_run_that_then_goes_on_as_if_nothing_had_been(changed: tuple[Path, list[str]]) -> None:
    folder, overrides = changed
    whole = run_once(folder / "whole", *overrides, "steps=8")
    limit = (folder / "run/checkpoints/step-000004/optimizer.safetensors").stat().st_size - 1
    run = prepare(configure(folder / "run", *overrides, "steps=8", "resume=auto"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(WriteError, match=r"step-000006 could not be written: .*File too large"):
            train(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        run.close()
    assert {path.name for path in (folder / "run/checkpoints").iterdir()} == {"step-000002", "step-000004"}
    with (folder / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rewa')  # as the disk may leave a line
    resumed = run_once(folder / "run", *overrides, "steps=8", "resume=auto")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(resumed), weights_of(whole), strict=True))
    assert [line["step"] for line in metrics_of(resumed)] == [line["step"] for line in metrics_of(whole)]
