"""One set of rows, whatever it lies in: JSON, CSV, Parquet, compressed, or saved by datasets."""

import csv
import datetime
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pytest

from trainer.config import ConfigError, DatasetConfig
from trainer.data.rows import Row
from trainer.data.tasks import make_task
from trainer.storage.digests import rows_digest

ROWS = [
    {"prompt": "What is 1+1? é\u2028", "answer": "2", "level": 1, "meta": {"tags": ["a"]}},
    {"prompt": "2 lines\nhere, \"quoted\"", "answer": "007", "level": 2, "meta": {"tags": []}},
    {"prompt": "3", "answer": "1.50", "level": 9007199254740993, "meta": {"tags": ["b", "c"]}},
]  # fmt: skip
EXPECTED = [Row(row["prompt"], row["answer"], {"level": row["level"], "meta": row["meta"]}) for row in ROWS]  # type: ignore[arg-type]


def _rows(path: Path | str, **options: Any) -> list[Row]:
    return make_task(DatasetConfig(path=str(path), **options), 0).train_rows


def _lines() -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


def _table() -> datasets.Dataset:
    return datasets.Dataset.from_list(ROWS)


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_bytes(_lines()),
    "rows.v2.ndjson": lambda path: path.write_bytes(_lines()),
    "lines.json": lambda path: path.write_bytes(_lines()),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "bom.json": lambda path: path.write_bytes(b"\xef\xbb\xbf \r\n" + json.dumps(ROWS).encode()),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(_lines())),
    "rows.JSON.GZ": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "rows.jsonl.zst": lambda path: path.write_bytes(pyarrow.compress(_lines(), codec="zstd", asbytes=True)),
    "a=b.parquet": lambda path: _table().to_parquet(path),
    "saved": lambda path: _table().save_to_disk(path),
    "train only": lambda path: datasets.DatasetDict({"train": _table()}).save_to_disk(path),
    "one split": lambda path: datasets.DatasetDict({"other": _table()}).save_to_disk(path),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("name", WRITERS)
def test_same_rows_whatever_they_lie_in(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    rows = _rows(tmp_path / name)
    assert rows == EXPECTED
    assert [repr(row) for row in rows] == [repr(row) for row in EXPECTED]
    assert rows_digest(rows) == rows_digest(EXPECTED)
    assert all(row.source.startswith(f"{tmp_path / name}") for row in rows)


def test_csv_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = [["prompt", "answer", "level"], ["p,\nq", "007", "1.50"], ['"r"', "1e3", ""], ["\u2028", "NaN", "true"]]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(cells)
    expected = [Row(prompt, answer, {"level": level}) for prompt, answer, level in cells[1:]]
    assert _rows(path) == expected
    assert [row.source for row in _rows(path)] == [f"{path}:{line}" for line in (2, 4, 5)]
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n") + b"\n\n")
    assert _rows(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,1\nb\n", ":3: 1 values for 2 columns"),
        (b"prompt,answer\na,1,2\n", ":2: 3 values for 2 columns"),
        (b"prompt,answer\na,1\n\"b,2\n", ":3: not CSV"),
        (b"prompt,answer\na,1\ncaf\xe9,2\n", ":3: not UTF-8"),
        (b"prompt,prompt\na,1\n", ":1: the line of the columns' names has 'prompt' twice"),
        (b"prompt,answer,\na,1,\n", ":1: the line of the columns' names has a name that is empty"),
        (b"question,answer\na,1\n", ":2: the row has no 'prompt'; the columns are question, answer: name one by"),
        (b"prompt,answer\n", " has no rows"),
        (b"", " has no rows"),
    ],
)  # fmt: skip
def test_bad_csv_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        _rows(path)
    assert str(caught.value).startswith(f"task.path: {path}{message}")


def test_long_cells_are_read_and_the_limit_of_others_stays(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'p' * 10**6},1\n")
    before = csv.field_size_limit()
    assert len(_rows(tmp_path / "rows.csv")[0].prompt) == 10**6
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "a", "answer": 1}, 5]', ":2: a row is an object with prompt and answer, not int"),
        ("a.json", b'[{"prompt": "a", "answer": 1},\n {"prompt"', ": not JSON (Expecting ':' delimiter at line 2"),
        ("a.json", b'[{"prompt": "a", "answer": 1, "answer": 2}]', ": 'answer' is given twice"),
        ("a.json", b"[]", " has no rows"),
        ("a.json", b'{"data": [\n{"prompt": "a", "answer": 1}]}', ":1: not JSON"),
        ("a.json", b'[{"prompt": "a", "answer": ' + b"[" * 70 + b"]" * 70 + b"}]", ": more than 64 lists"),
        ("a.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], " cannot be read"),
        ("a.jsonl.gz", b"{}", " cannot be read: Not a gzipped file"),
        ("a.jsonl.zst", b"{}", " cannot be read"),
        ("a.parquet", b"PAR1", " cannot be read as Parquet"),
        ("a.parquet", b"", " cannot be read as Parquet"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        _rows(path)
    assert str(caught.value).startswith(f"task.path: {path}{message}")
    assert "\n" not in str(caught.value)


def test_long_lists_are_no_deep_ones(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a", "answer": [[i] for i in range(100)]}] * 100))
    assert len(_rows(tmp_path / "a.json")) == 100


# -- splits -------------------------------------------------------------------------------------------------------


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    parts = {"train": _table(), "test": _table().select([2, 0]), "small": _table().select([1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "splits")
    return tmp_path / "splits"


def test_splits_train_and_hold_out(splits: Path) -> None:
    assert _rows(splits) == EXPECTED
    assert _rows(splits, split="small") == EXPECTED[1:2]
    task = make_task(DatasetConfig(path=str(splits), split="small", eval_split="test"), 0)
    assert (task.train_rows, task.eval_rows) == (EXPECTED[1:2], [EXPECTED[2], EXPECTED[0]])
    assert [row.source for row in task.eval_rows] == [f"{splits}/test:{number}" for number in (1, 2)]
    other = DatasetConfig(path=str(splits), split="small", eval_path=str(splits), eval_split="test")
    assert make_task(other, 0) == task


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("splits", {"split": "val"}, r"^task\.split='val': .* has the splits train, test, small; name one"),
        ("splits", {"eval_split": "val"}, r"^task\.eval_split='val': .* has the splits train, test, small"),
        ("saved", {"split": "train"}, r"^task\.split='train': .* is one dataset without splits; leave it out"),
        ("saved", {"subset": "main"}, r"^task\.subset='main': is for a dataset of the hub"),
        ("rows.jsonl", {"split": "train"}, r"^task\.split='train': .* is a file, and has none"),
        ("rows.jsonl", {"eval_split": "test"}, r"^task\.eval_split='test': .* is a file, and has none"),
        ("rows.jsonl", {"subset": "main"}, r"^task\.subset='main': .* is a file, and has none"),
        ("rows.jsonl", {"split": "x", "kind": "jsonl"}, r"^task\.split='x': .* is a file, and has none"),
        ("rows.txt", {}, r"^task\.path: .*rows.txt': its name does not say what it is; let it end in \.json, \.jsonl"),
        ("rows", {}, r"^task\.path: .*rows': its name does not say what it is"),
        ("folder", {}, r"^task\.path: .* is a directory, but none that .* save_to_disk has written .*has: b\.jsonl"),
        ("/nosuch/folder/rows", {}, r"^task\.path: .* is neither a file nor a directory"),
        ("nosuch.parquet", {}, r"^task\.path: file .*nosuch\.parquet' does not exist"),
    ],
)
def test_what_is_not_there_is_named(
    splits: Path, tmp_path: Path, path: str, options: dict[str, str], message: str
) -> None:
    _table().save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    for name in ("rows.jsonl", "rows.txt", "rows", "folder/b.jsonl"):
        (tmp_path / name).write_bytes(_lines())
    with pytest.raises(ConfigError, match=message):
        _rows(tmp_path / path, **options)


def test_damaged_directory_is_named(tmp_path: Path) -> None:
    _table().save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"^task\.path: .*saved cannot be read: "):
        _rows(tmp_path / "saved")


@pytest.mark.parametrize("subset", [None, "main"])
def test_a_dataset_that_is_not_here_says_where_it_could_lie(subset: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        _rows("someone/gsm8k", subset=subset)
    message = str(caught.value)
    assert message.startswith("task.path: 'someone/gsm8k' is no file or directory here (")
    assert str(datasets.config.HF_DATASETS_CACHE) in message
    arguments = "'someone/gsm8k'" + (", 'main'" if subset else "")
    assert f"datasets.load_dataset({arguments}).save_to_disk('gsm8k')" in message
    assert "task.path=gsm8k" in message


def _repository(folder: Path) -> Path:
    """Two configurations of a dataset, as the hub has them."""
    for subset, table in (("main", _table()), ("few", _table().select([1]))):
        (folder / subset).mkdir(parents=True)
        table.to_parquet(folder / subset / "train-00000-of-00001.parquet")
    configs = [
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*" for name in ("main", "few")
    ]
    (folder / "README.md").write_text("---\nconfigs:\n" + "\n".join(configs) + "\n---\n")
    return folder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty; datasets' own lies beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_dataset_of_the_hub_comes_from_its_cache(caches: Path) -> None:
    folder, commit = caches / "datasets--someone--sums", "a" * 40
    _repository(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert _rows("someone/sums", subset="main") == EXPECTED
    assert _rows("someone/sums", subset="few", split="train") == EXPECTED[1:2]
    with pytest.raises(ConfigError, match=r"^task\.split='test': 'someone/sums' has the splits train; name one"):
        _rows("someone/sums", subset="few", split="test")
    for options in ({}, {"subset": "nosuch"}):
        with pytest.raises(ConfigError, match=r"^task\.path: 'someone/sums' .*main.*few"):
            _rows("someone/sums", **options)


def test_a_repository_of_the_hub_may_lie_in_a_directory(caches: Path, tmp_path: Path) -> None:
    assert _rows(_repository(tmp_path / "sums"), subset="main") == EXPECTED
    (tmp_path / "sums/main/train-00000-of-00001.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"^task\.path: .*sums cannot be read: "):
        _rows(tmp_path / "sums", subset="main")


# -- values -------------------------------------------------------------------------------------------------------


def test_values_of_parquet_keep_type_and_digits(tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {
        "n": [2**63 - 1, None],
        "d": [decimal.Decimal("1.50"), None],
        "t": [datetime.datetime(2026, 1, 2, 3), None],
        "b": [b"\x00", None],
        "s": [[1, None], []],
    }
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"], **values})
    table.to_parquet(tmp_path / "a.parquet")
    rows = _rows(tmp_path / "a.parquet")
    assert [row.columns for row in rows] == [{name: column[i] for name, column in values.items()} for i in (0, 1)]
    assert rows_digest(rows) == rows_digest(_rows(tmp_path / "a.parquet"))
    assert rows_digest(rows) != rows_digest([rows[0], Row("b", "2", rows[1].columns | {"b": b"\x01"})])


def test_a_saved_format_does_not_change_values(tmp_path: Path) -> None:
    _table().with_format("numpy", columns=["level"]).save_to_disk(tmp_path / "saved")
    assert _rows(tmp_path / "saved") == EXPECTED


def test_messages_of_a_table_have_only_the_fields_they_were_given(tmp_path: Path) -> None:
    """Arrow gives every message, and every schema of a tool, the fields of all."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "name": "sub", "strict": True}]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    other = [{"role": "user", "content": "v", "name": None}]
    made = datasets.Dataset.from_dict({"prompt": [chat, other], "answer": ["1", "2"], "tools": [tools, None]})
    made.save_to_disk(tmp_path / "saved")
    rows = _rows(tmp_path / "saved")
    del chat[1]["content"]
    assert [row.prompt for row in rows] == [chat, [{"role": "user", "content": "v"}]]
    assert [row.columns["tools"] for row in rows] == [tools, None]


def test_columns_that_are_no_values_are_named(tmp_path: Path) -> None:
    table = _table().add_column("photo", [{"bytes": b"x", "path": None}] * 3)
    features = table.features.copy()
    features["photo"] = datasets.Image()
    table.cast(features).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"column 'photo' holds values of the kind Image"):
        _rows(tmp_path / "saved")
