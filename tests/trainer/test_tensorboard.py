"""Event files as TensorBoard's own reader reads them, also those of a run that was resumed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import TensorboardConfig, parse_config
from trainer.loop import train
from trainer.run import prepare
from trainer.tracking.events import EventFile, crc32c, record
from trainer.tracking.tensorboard import FOLDER, TensorboardTracker
from trainer.tracking.tracking import make_tracker, read_metrics


def _loaded(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return reader.Reload()


def _curve(reader: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def _table(reader: EventAccumulator, tag: str) -> dict[int, list[list[str]]]:
    """By step, the cells of a text."""
    return {
        event.step: [[cell.decode() for cell in row] for row in make_ndarray(event.tensor_proto)]
        for event in reader.Tensors(tag)
    }


# -- the format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"\x00" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksum_is_that_of_the_standard(data: bytes, crc: int) -> None:
    """Vectors of RFC 3720, B.4, and the check value of the catalogue of parametrised CRC algorithms."""
    assert crc32c(data) == crc


def test_record_is_length_data_and_their_checksums() -> None:
    assert record(b"abc")[:8] == (3).to_bytes(8, "little")
    assert record(b"abc")[12:15] == b"abc"
    assert len(record(b"abc")) == 19


def test_scalars_read_back_as_float32(tmp_path: Path) -> None:
    values = {"a": 0.1, "b/c": -1e-30, "zero": 0.0, "huge": 1e300, "low": -1e300, "nan": math.nan, "w\u00f6rt": 3.0}
    file = EventFile(tmp_path)
    for step in (0, 1, 127, 128, 300, 2**31, 2**40):
        file.add_scalars(values, step)
    file.close()
    reader = _loaded(tmp_path)
    assert set(reader.Tags()["scalars"]) == values.keys()
    for tag, value in values.items():
        with np.errstate(over="ignore"):
            expected = float(np.float32(value))
        read = reader.Scalars(tag)
        assert [event.step for event in read] == [0, 1, 127, 128, 300, 2**31, 2**40]
        assert all(event.value == expected or math.isnan(expected) for event in read)
    assert all(abs(event.wall_time - file.path.stat().st_mtime) < 60 for event in reader.Scalars("a"))


def test_table_reads_back_as_a_text(tmp_path: Path) -> None:
    rows = [["prompt", "reward"], ["\u20ac\n# no heading", "1.0"], ["lone \ud800", ""]]
    file = EventFile(tmp_path)
    file.add_table("t", rows, 5)
    file.close()
    reader = _loaded(tmp_path)
    assert _table(reader, "t") == {5: [*rows[:2], ["lone ?", ""]]}
    assert reader.SummaryMetadata("t").plugin_data.plugin_name == "text"


def test_every_event_can_be_read_as_soon_as_it_is_added(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for step in range(3):
        file.add_scalars({"a": float(step)}, step)
        events = list(LegacyEventFileLoader(str(file.path)).Load())
        assert [event.step for event in events[2:]] == list(range(step + 1))
    file.close()


# -- the tracker --------------------------------------------------------------------------------------------------


def _run(run_dir: Path, *overrides: str) -> None:
    chosen = [
        "experiment=smoke", f"run_dir={run_dir}", "name=n", "steps=4", "model.warm_start_steps=0", "eval.every=2",
        "algorithm.prompts_per_step=2", "algorithm.group_size=2", "sampling.max_new_tokens=4", "checkpoint.every=2",
        "rollout.num_blocks=64", "tracking=tensorboard", "tracking.completions=2", *overrides,
    ]  # fmt: skip
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        run = prepare(parse_config(compose("config", chosen)))
    try:
        train(run)
    finally:
        run.close()


def _assert_as_in_metrics(run_dir: Path) -> None:
    reader, lines = _loaded(run_dir / FOLDER), read_metrics(run_dir / "metrics.jsonl")
    names = {name for line in lines for name in line if name != "step"}
    assert set(reader.Tags()["scalars"]) == names
    for name in names:
        steps, values = zip(*((line["step"], line[name]) for line in lines if name in line), strict=True)
        curve = _curve(reader, name)
        assert [step for step, _ in curve] == list(steps)
        assert [value for _, value in curve] == pytest.approx(values, rel=1e-6)


def test_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    _assert_as_in_metrics(tmp_path / "run")
    first = _table(_loaded(tmp_path / "run" / FOLDER), "completions")
    watching = _loaded(tmp_path / "run" / FOLDER)
    _run(tmp_path / "run", f"resume={tmp_path / 'run/checkpoints/step-000002'}", "steps=5")
    _assert_as_in_metrics(tmp_path / "run")
    again = _table(_loaded(tmp_path / "run" / FOLDER), "completions")
    assert list(again) == [1, 2, 3, 4, 5]
    assert {step: again[step] for step in first} == first
    assert [path.stat().st_size > 0 for path in sorted((tmp_path / "run" / FOLDER).iterdir())] == [False, True]
    # one that has looked at the earlier file all the while
    assert [step for step, _ in _curve(watching.Reload(), "reward")] == [1, 2, 3, 4, 5]


def test_run_from_another_runs_checkpoint_has_the_earlier_steps_too(tmp_path: Path) -> None:
    _run(tmp_path / "a", "tracking=none", "tracking.completions=1", "steps=2")
    _run(tmp_path / "b", f"resume={tmp_path / 'a/checkpoints/step-000002'}")
    _assert_as_in_metrics(tmp_path / "b")
    tables = _table(_loaded(tmp_path / "b" / FOLDER), "completions")
    assert {step: len(rows) - 1 for step, rows in tables.items()} == {1: 1, 2: 1, 3: 2, 4: 2}


def test_configuration_and_completions_are_texts(tmp_path: Path) -> None:
    values: dict[str, Any] = {"name": "n", "optim": {"lr": 1e-5}, "empty": {}, "ids": [1, 2], "none": None}
    tracker = TensorboardTracker(tmp_path, values)
    tracker.log_completions([{"step": 3, "prompt": "p", "reward": None}, {"step": 3, "prompt": "a\n# b", "x": 1}], 3)
    tracker.finish()
    reader = _loaded(tmp_path / FOLDER)
    shown = [["key", "value"], ["name", "    n"], ["optim.lr", "    1e-05"], ["empty", "    {}"]]
    assert _table(reader, "config") == {0: [*shown, ["ids", "    [1, 2]"], ["none", "    null"]]}
    rows = [["prompt", "reward", "x"], ["    p", "    ", "    "], ["    a\n    # b", "    ", "    1"]]
    assert _table(reader, "completions") == {3: rows}


def test_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("mine")
    tracker = make_tracker(TensorboardConfig(), tmp_path, "n", {})
    tracker.log({"reward": 1.0}, 1)
    tracker.finish()
    (record_of,) = caplog.records
    assert record_of.message.startswith("tracking=tensorboard could not start, training goes on without it: ")
    assert (tmp_path / FOLDER).read_text() == "mine"
