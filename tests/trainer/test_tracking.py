"""Where metrics go: each step once in metrics.jsonl, and a dashboard that may fail without taking the run with it."""

import json
import logging
import os
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import TrackingConfig, WandbConfig, parse_config
from trainer.loop import train
from trainer.run import prepare
from trainer.storage.lines import StepFile
from trainer.tracking.tracking import Progress, SafeTracker, make_tracker, read_metrics

# -- metrics.jsonl ------------------------------------------------------------------------------------------------


def _steps(path: Path) -> list[float]:
    return [line["step"] for line in read_metrics(path)]


def _write(path: Path, steps: Sequence[int], rest: str = "") -> Path:
    path.write_text("".join(json.dumps({"step": step, "reward": step / 10}) + "\n" for step in steps) + rest)
    return path


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(0, [0]), (2, [0, 1, 2]), (4, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_lines_past_the_checkpoint_are_dropped(tmp_path: Path, resume_step: int, kept: list[int]) -> None:
    file = StepFile(_write(tmp_path / "metrics.jsonl", range(5)), resume_step)
    assert read_metrics(file.path) == [{"step": step, "reward": step / 10} for step in kept]
    for step in range(resume_step + 1, 7):
        file.append({"step": step})
    assert _steps(file.path) == sorted({*kept, *range(resume_step + 1, 7)})


@pytest.mark.parametrize("cut", ["{", '{"step": 3, "rew', '{"step": 3, "reward": 0.3}'])
def test_line_cut_short_by_a_crash_is_left_out(tmp_path: Path, cut: str) -> None:
    path = _write(tmp_path / "metrics.jsonl", range(3), cut)
    assert _steps(path) == [0, 1, 2]
    file = StepFile(path, 2)
    file.append({"step": 3, "reward": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()][2:] == [
        {"step": 2, "reward": 0.2},
        {"step": 3, "reward": 1.0},
    ]


def test_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert StepFile(tmp_path / "metrics.jsonl", 0).path.read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# -- the console --------------------------------------------------------------------------------------------------


def test_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 130.5, 190.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress(start=4, total=10)
    metrics = {"reward": 0.25, "completions/mean_length": 7.25, "entropy": 1.5, "grad_norm": 0.125}
    metrics |= {"logprob_gap_max": 0.0, "rollout/tokens_per_second": 1234.6, "loss": 3.0}
    # 10 s for two steps, so 20 s for the four that are left
    expected = {"step 6/10", "reward 0.250", "length 7.2", "entropy 1.500", "grad 0.125", "gap 0", "1235 tok/s"}
    assert set(progress.line(metrics, 6).split("  ")) == expected | {"20 s left"}
    # 30.5 s for four steps, so 15.25 s for two
    with_eval = progress.line(metrics | {"eval/pass@1": 0.5}, 8).split("  ")
    assert {"step 8/10", "eval pass@1 0.500", "16 s left"} < set(with_eval)
    # a step whose prompts were all skipped has no reward
    assert progress.line({"num_prompts": 0.0}, 10).split("  ") == ["step 10/10", "0 s left"]


# -- a tracker that fails -----------------------------------------------------------------------------------------


class _Failing:
    """Fails in one method; counts calls."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.method:
            raise ConnectionError("no network")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("log")

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._call("log_completions")

    def finish(self) -> None:
        self._call("finish")

    def fail(self, exit_code: int) -> None:
        self._call("fail")


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("log", ["log"]),
        ("log_completions", ["log", "log_completions"]),
        ("finish", ["log", "log_completions", "log", "log_completions", "finish"]),
        ("", ["log", "log_completions", "log", "log_completions", "finish", "finish"]),
    ],
)
def test_tracker_is_dropped_at_its_first_failure(
    method: str, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tracker = _Failing(method)
    safe = SafeTracker(tracker)
    for step in (1, 2):
        safe.log({"reward": 1.0}, step)
        safe.log_completions([{"step": step}], step)
    safe.finish()
    safe.finish()
    assert tracker.calls == calls
    assert [(r.levelname, "no network" in r.message) for r in caplog.records] == [("WARNING", True)] * bool(method)


def test_no_completions_are_no_table() -> None:
    tracker = _Failing("log_completions")
    SafeTracker(tracker).log_completions([], 1)
    assert tracker.calls == []


def test_interrupt_is_not_taken_for_a_failure() -> None:
    tracker = _Failing("")
    tracker.finish = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        SafeTracker(tracker).finish()


# -- wandb, by a module of its name that writes down what it is called with ----------------------------------------


class _FakeWandb(types.ModuleType):
    def __init__(self, fail_at: int | None = None, fail_to_start: bool = False) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.tables: list[_FakeTable] = []
        self.finished = 0
        self.fail_at, self.fail_to_start = fail_at, fail_to_start

    def init(self, **options: Any) -> "_FakeWandb":
        if self.fail_to_start:
            raise RuntimeError("api_key not configured")
        self.inits.append(options)
        return self

    def Table(self, columns: list[str], data: list[list[Any]]) -> "_FakeTable":  # noqa: N802  wandb's own name
        self.tables.append(_FakeTable(columns, data))
        return self.tables[-1]

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if step == self.fail_at:
            raise ConnectionError("no network")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


class _FakeTable:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.columns, self.data = columns, data


def _train(run_dir: Path, fake: types.ModuleType | None, *overrides: str) -> list[dict[str, float]]:
    """Two small steps with tracking=wandb; the lines of metrics.jsonl."""
    chosen = [
        "experiment=smoke", "tracking=wandb", f"run_dir={run_dir}", "steps=2", "model.warm_start_steps=0",
        "algorithm.prompts_per_step=3", "algorithm.group_size=2", "sampling.max_new_tokens=4", "task.eval_rows=2",
        "checkpoint.every=0", "rollout.num_blocks=64", "tracking.completions=2", *overrides,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        patch.setitem(sys.modules, "wandb", fake)
        patch.setenv("WANDB_SILENT", os.environ.get("WANDB_SILENT", "true"))
        run = prepare(parse_config(compose("config", chosen)))
        try:
            train(run)
        finally:
            run.close()
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[_FakeWandb, list[dict[str, float]]]:
    fake = _FakeWandb()
    return fake, _train(tmp_path_factory.mktemp("tracked") / "run", fake, "name='${task.kind}-x'", "seed=5")


Tracked = tuple[_FakeWandb, list[dict[str, float]]]


def test_wandb_starts_offline_with_a_plain_configuration(tracked: Tracked) -> None:
    (options,) = tracked[0].inits
    assert (options["mode"], options["project"], options["name"]) == ("offline", "cowroll", "arithmetic-x")
    assert options["dir"].name == "run"
    config = options["config"]
    assert json.loads(json.dumps(config)) == config
    assert (config["seed"], config["steps"], config["name"]) == (5, 2, "arithmetic-x")
    assert config["rollout"]["num_blocks"] == 64
    assert config["sampling"]["stop_token_ids"] == []


def test_wandb_gets_what_metrics_jsonl_gets(tracked: Tracked) -> None:
    fake, lines = tracked
    logged = [(step, values) for step, values in fake.logged if "completions" not in values]
    assert [step for step, _ in logged] == [0, 1, 2]
    for (step, values), line in zip(logged, lines, strict=True):
        assert {"step": step} | {name.removeprefix("train/"): value for name, value in values.items()} == line
        assert all(name.startswith("train/") for name in values)


def test_wandb_gets_a_new_table_every_step(tracked: Tracked) -> None:
    fake, _ = tracked
    given = [(step, values["completions"]) for step, values in fake.logged if "completions" in values]
    assert [step for step, _ in given] == [1, 2]
    assert [table for _, table in given] == fake.tables
    assert fake.tables[0] is not fake.tables[1]
    for step, table in given:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.data]
        assert [row["step"] for row in rows] == [step, step]
        assert all(row["prompt"].endswith("=") and isinstance(row["completion"], str) for row in rows)
        assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert fake.finished == 1


def test_run_goes_on_when_the_dashboard_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = _FakeWandb(fail_at=1)
    lines = _train(tmp_path / "run", fake, "eval.every=1")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [step for step, _ in fake.logged] == [0]
    assert [r.message for r in caplog.records if "tracking" in r.message] == [
        "tracking failed and is off from now on: no network"
    ]


@pytest.mark.parametrize("fake", [None, _FakeWandb(fail_to_start=True)], ids=["not installed", "does not start"])
def test_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fake: types.ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with caplog.at_level(logging.WARNING):
        tracker = make_tracker(WandbConfig(), tmp_path, "name", {})
        tracker.log({"reward": 1.0}, 1)
        tracker.finish()
    (record,) = caplog.records
    assert record.message.startswith("tracking=wandb could not start, training goes on without it: ")
    assert ("api_key not configured" in record.message) is (fake is not None)


@pytest.mark.parametrize("mode", ["offline", "online", "disabled"])
def test_mode_and_project_are_the_configured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    # the configuration has the last word, not the environment
    monkeypatch.setenv("WANDB_MODE", "online")
    make_tracker(WandbConfig(mode=mode, project="p"), tmp_path, "n", {"a": 1})
    assert fake.inits == [{"project": "p", "name": "n", "dir": tmp_path, "mode": mode, "config": {"a": 1}}]


def test_no_tracker_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = make_tracker(TrackingConfig(), tmp_path, "n", {})
    tracker.log({"reward": 1.0}, 1)
    tracker.log_completions([{"step": 1}], 1)
    tracker.finish()
    assert (fake.inits, fake.logged, fake.finished) == ([], [], 0)
