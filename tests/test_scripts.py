"""The benchmark scripts: their counts, ratios and costs against ones worked out here, and what makes them stop."""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_kernels
import bench_report
import bench_rollouts
import bench_step
import golden
import profile_rollouts
import tiny_models
from backends import has_kernels
from bench_report import Workload
from rollout import Rollout, RolloutGroup
from rollout.model.views import training_view

SCRIPTS = Path(bench_report.__file__).parent
LAYERS, KV_HEADS, HEADS, HEAD_DIM = 2, 2, 4, 32  # of random_model("qwen3")

Run = Callable[..., dict[str, Any]]


def _peer(key: str, value: float) -> str:
    """A command that prints {key: value} as its last line."""
    code = f"import json; print('warm'); print(json.dumps({{{key!r}: {value}, 'note': 'fake'}}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB)
    return tiny_models.save_directory(tmp_path_factory.mktemp("model"), model, tiny_models.byte_tokenizer())


@pytest.fixture
def run(directory: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script's main() on P, n, L and K; its last line."""

    def call(main: Callable[[list[str]], None], sizes: tuple[int, int, int, str], *options: str) -> dict[str, Any]:
        named = zip(("--prompts", "--n", "--prompt-len", "--new"), map(str, sizes), strict=True)
        capsys.readouterr()
        main(["--model", str(directory), *(word for pair in named for word in pair), *options])
        report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return report

    return call


def _values(report: dict[str, Any], side: str, key: str) -> list[float]:
    return [figures[key] for figures in report["sides"][side]["runs"]]


# -- tokens per second --------------------------------------------------------------------------------------------


def test_rollouts_beside_a_peer_and_a_variant(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--repeats", "3", "--dtype", "float32", "--json", str(file)]
    options += ["--variant", "inexact=exact=off,block_size=8"]
    report = run(bench_rollouts.main, (3, 2, 70, "2,5"), *options, "--peer", f"fake={_peer('tok_per_s', 10)}")
    assert json.loads(file.read_text()) == report
    tokens = 2 * (2 + 5 + 2)
    assert report["completion_tokens"] == tokens
    assert set(report["sides"]) == {"ours", "inexact", "fake"}
    for side in ("ours", "inexact"):
        assert len(report["sides"][side]["runs"]) == 3
        for figures in report["sides"][side]["runs"]:
            assert figures["tok_per_s"] * figures["seconds"] == pytest.approx(tokens)
            assert figures["prefill_s"] + figures["decode_s"] == pytest.approx(figures["seconds"])
            assert figures["prefill_s"] > 0
        summary = report["sides"][side]
        values = sorted(_values(report, side, "tok_per_s"))
        assert [summary[what]["tok_per_s"] for what in ("min", "median", "max")] == values
    assert report["sides"]["fake"]["runs"] == [{"tok_per_s": 10.0}] * 3
    median = statistics.median(_values(report, "ours", "tok_per_s"))
    assert report["ratios"]["fake"] == pytest.approx(median / 10.0)
    assert report["ratios"]["inexact"] == pytest.approx(
        median / statistics.median(_values(report, "inexact", "tok_per_s"))
    )
    assert not report["engines"]["inexact"]["exact"]
    assert report["settings"]["config"]["block_size"] == 16
    assert report["settings"]["variants"] == {"inexact": {"exact": "off", "block_size": 8}}
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["threads"] == torch.get_num_threads()


def test_prompts_are_fresh_in_every_call(directory: Path) -> None:
    workload = Workload(directory, 40, 1, 50, (1,))
    with tiny_models.small_engine(directory) as engine:
        drawn = [workload.prompts(engine, seed) for seed in range(3)]
        assert drawn[0] == workload.prompts(engine, 0)
    ids = [i for prompts in drawn for prompt in prompts for i in prompt]
    assert (min(ids), max(ids)) == (5, tiny_models.TEXT_VOCAB - 1)
    assert len({tuple(prompt) for prompts in drawn for prompt in prompts}) == 120


@pytest.mark.parametrize(
    ("sizes", "block_size"),
    [((1, 1, 1, (1,)), 16), ((3, 4, 32, (1, 40)), 16), ((5, 3, 17, (2,)), 1), ((2, 6, 15, (33,)), 8)],
)
def test_pool_holds_everything_at_once(
    directory: Path, sizes: tuple[int, int, int, tuple[int, ...]], block_size: int
) -> None:
    workload = Workload(directory, *sizes)
    with bench_report.open_engine(workload, {"block_size": block_size}) as engine:
        for repeat in range(2):
            groups = engine.generate_rollouts(workload.prompts(engine, repeat), workload.n, workload.sampling(repeat))
            bench_report.check_groups(groups, workload.n, workload.counts)
        stats = engine.stats()
    assert stats.preemptions == 0
    assert stats.recomputed_tokens == 0
    assert stats.peak_running == workload.num_prompts * workload.n
    assert stats.completion_tokens == 2 * workload.completion_tokens
    assert stats.cache_hit_tokens == 0


# -- what stops it ------------------------------------------------------------------------------------------------


def test_weights_of_another_model_fail_verification(directory: Path) -> None:
    workload = Workload(directory, 2, 2, 20, (4,))
    other = tiny_models.random_model("qwen3", seed=1, vocab_size=tiny_models.TEXT_VOCAB)
    with bench_report.open_engine(workload, {}) as engine:
        bench_rollouts.verify(engine, engine.module, workload)
        with pytest.raises(SystemExit, match="verification failed: greedy log-probs are up to") as stop:
            bench_rollouts.verify(engine, other, workload)
    assert isinstance(stop.value.code, str)  # printed, and the exit status is 1


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([7], [-1.0], "1 tokens instead of 2"),
        ([7, 8], [-1.0], "2 tokens instead of 2"),
        ([7, 8], [-1.0, 0.1], "above 0"),
        ([7, 8], [-1.0, float("nan")], "not finite"),
        ([7, 8], [-1.0, float("-inf")], "not finite"),
    ],
)
def test_wrong_completions_fail_verification(ids: list[int], logprobs: list[float], said: str) -> None:
    group = RolloutGroup([5], [Rollout(0, ids, logprobs, logprobs, None, "length", 0)], 0, 0)
    with pytest.raises(SystemExit, match=said):
        bench_report.check_groups([group], 1, [2])
    with pytest.raises(SystemExit, match="1 completions instead of 2"):
        bench_report.check_groups([group], 2, [2])


@pytest.mark.slow
def test_failing_peer_is_named_with_what_it_said(directory: Path) -> None:
    peer = f"{shlex.quote(sys.executable)} -c \"import sys; sys.exit('no such engine here')\""
    sizes = ["--prompts", "1", "--n", "1", "--prompt-len", "3", "--new", "2"]
    command = [sys.executable, str(SCRIPTS / "bench_rollouts.py"), "--model", str(directory), *sizes]
    done = subprocess.run(
        [*command, "--peer", f"broken={peer}"], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"peer broken: {peer}: ended with status 1\nno such engine here" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("code", ["pass", "print('fast')", "print('[1]')", "print('3')", "print('{}')"])
def test_peer_without_its_figure_is_an_error(code: str) -> None:
    command = f'{shlex.quote(sys.executable)} -c "{code}"'
    with pytest.raises(SystemExit, match=r"peer odd: .*not JSON with a number tok_per_s"):
        bench_report.make_peer("odd", command, "tok_per_s")(1)


def test_peer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match="peer gone: /no/such/command"):
        bench_report.make_peer("gone", "/no/such/command", "tok_per_s")(1)


@pytest.mark.parametrize(
    "options",
    [["--variant", "a=nosuch=1"], ["--variant", "a"], ["--peer", "=x"], ["--peer", "ours=x"], ["--new", "3,0"]],
)
def test_bad_options_end_with_status_2(run: Run, options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(bench_rollouts.main, (1, 1, 3, "2"), *options)
    assert stop.value.code == 2


def test_what_the_model_cannot_hold_is_an_error(run: Run) -> None:
    with pytest.raises(SystemExit, match="error: 602 tokens are more than the model's 512"):
        run(bench_rollouts.main, (1, 1, 600, "2"))


# -- seconds per step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "exact"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "off")])
def test_step_by_phase(run: Run, dtype: str, exact: str) -> None:
    options = ["--repeats", "2", "--dtype", dtype, "--exact", exact, "--micro-batch-tokens", "64"]
    report = run(bench_step.main, (3, 4, 20, "6"), *options, "--peer", f"fake={_peer('s_per_step', 2.5)}")
    assert report["completion_tokens"] == 3 * 4 * 6
    assert report["settings"]["dtype"] == dtype
    for figures in report["sides"]["ours"]["runs"]:
        phases = {name: seconds for name, seconds in figures.items() if name != "s_per_step"}
        assert set(phases) == {f"{p}_s" for p in ("rollout", "reward", "forward", "backward", "optimizer", "swap")}
        assert min(phases.values()) > 0
        assert 0.5 * figures["s_per_step"] < sum(phases.values()) <= figures["s_per_step"]
    median = statistics.median(_values(report, "ours", "s_per_step"))
    assert report["ratios"] == {"fake": pytest.approx(2.5 / median)}


def test_a_step_moves_the_weights_once(directory: Path) -> None:
    workload = Workload(directory, 2, 4, 9, (8,))
    with bench_report.open_engine(workload, {}) as engine:
        trainer = bench_step.make_trainer(engine, workload, 4096, lr=1e-2)
        bench_step.verify(trainer, workload)
        before = engine.module.get_output_embeddings().weight.detach().clone()
        trainer.step(1)
        assert engine.policy_version == 2
        assert not torch.equal(before, engine.module.get_output_embeddings().weight)
        other = tiny_models.random_model("qwen3", seed=1, vocab_size=tiny_models.TEXT_VOCAB)
        trainer.policy = training_view(other, engine.numerics, gradient_checkpointing=False)
        with pytest.raises(SystemExit, match="verification failed: the trainer's log-probs"):
            bench_step.verify(trainer, workload)
        trainer.optimizer.close()


# -- the profile --------------------------------------------------------------------------------------------------


def test_profile_counts_what_a_step_has_to_do(run: Run) -> None:
    prompts, n, length, new = 2, 3, 20, 4
    sizes = ["--megabytes", "16", "--matrix", "256"]
    report = run(profile_rollouts.main, (prompts, n, length, str(new)), "--dtype", "float32", *sizes)
    vocab, hidden = tiny_models.TEXT_VOCAB, 96
    linear = LAYERS * (hidden * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * hidden * 160)
    norms = LAYERS * (2 * hidden + 2 * HEAD_DIM) + hidden
    weights = 4 * (linear + norms + vocab * hidden)
    kv_per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    per_position = 4 * HEADS * HEAD_DIM * LAYERS

    decode = report["phases"]["decode"]
    seen = [length + place + 1 for place in range(new - 1)]  # by a decoding token, itself included
    shared = length // 16 * 16
    held = [prompts * (shared + n * (positions - shared)) for positions in seen]
    assert decode["steps"] == new - 1
    assert decode["tokens"] == prompts * n * (new - 1)
    assert decode["bytes_per_step"] == pytest.approx(weights + kv_per_token * statistics.mean(held))
    flops = prompts * n * (2 * (linear + vocab * hidden) + per_position * statistics.mean(seen))
    assert decode["flops_per_step"] == pytest.approx(flops)

    prefill = report["phases"]["prefill"]
    assert prefill["steps"] == 2  # the prompts, then the draw of all first tokens
    assert prefill["tokens"] == prompts * length
    assert prefill["bytes_per_step"] * 2 == pytest.approx(weights + kv_per_token * prompts * length)
    positions = prompts * length * (length + 1) // 2
    flops = 2 * prompts * (length * linear + vocab * hidden) + per_position * positions
    assert prefill["flops_per_step"] * 2 == pytest.approx(flops)

    machine = report["machine"]
    for figures in (prefill, decode):
        seconds = figures["ms_per_step"] / 1e3
        bandwidth, rate = machine["bytes_per_second"], machine["flops_per_second"]
        assert figures["bandwidth_share"] == pytest.approx(figures["bytes_per_step"] / seconds / bandwidth)
        assert figures["matrix_share"] == pytest.approx(figures["flops_per_step"] / seconds / rate)
        spent = figures["profiled_ms_by_category"]
        assert set(spent) == set(profile_rollouts.CATEGORIES)
        assert min(spent.values()) > 0
        assert 0.5 * figures["profiled_ms_per_step"] < sum(spent.values()) <= figures["profiled_ms_per_step"]


def test_operations_are_told_apart_by_what_they_happen_in() -> None:
    category = profile_rollouts._category
    assert category(["aten::mm", "aten::linear"]) == "products"
    assert category(["aten::bmm", "attention"]) == "attention"
    assert category(["aten::index_select", "attention"]) == "kv"
    assert category(["aten::index_copy_", "kv"]) == "kv"
    assert category(["aten::gather", "sampling"]) == "sampling"
    assert category(["aten::index_select", "aten::embedding"]) == "elementwise"
    assert category(["scheduler"]) == "scheduler"
    assert category([]) == "host"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernels_are_compared_with_operations_that_compute_the_same(dtype: torch.dtype) -> None:
    if not has_kernels():
        pytest.skip("no compiled kernels here")
    cases = (bench_kernels.linear_cases, bench_kernels.attention_cases, bench_kernels.row_cases)
    for case in (case for make in cases for case in make(dtype) if not case.name.startswith("write_rows")):
        ours, torchs = case.native(), case.torch()
        if isinstance(ours, tuple):  # attention, with its log-sum-exp
            ours, torchs = ours[0], torchs[0]  # type: ignore[index]
        assert isinstance(ours, torch.Tensor)
        assert isinstance(torchs, torch.Tensor)
        error = (ours.double() - torchs.double()).norm() / torchs.double().norm()
        assert error < (2e-6 if dtype == torch.float32 else 1e-2), case.name
        assert case.flops or case.num_bytes


# -- golden -------------------------------------------------------------------------------------------------------


def test_runs_that_differ_are_named_with_what_differs() -> None:
    before = {"a": {"ids": "1", "weights": "2"}, "b": {"ids": "3", "weights": "4"}, "only before": {"ids": "5"}}
    after = {"a": {"ids": "1", "weights": "9"}, "b": {"ids": "3"}, "only after": {"ids": "6"}}
    assert golden.differing(before, before) == []
    assert golden.differing(before, after) == ["a: weights", "b: weights"]


@pytest.mark.slow
def test_the_same_code_gives_the_same_digests_and_families_differ() -> None:
    runs = [golden.record(family, "float32", "torch") for family in ("qwen2", "qwen2", "llama")]
    assert runs[0] == runs[1]
    assert all(runs[0][what] != runs[2][what] for what in runs[0])
