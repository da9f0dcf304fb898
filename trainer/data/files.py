"""Where rows come from: a file of one of a few formats, a saved dataset, or one of the hub's."""

import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.arrow import read_directory, read_hub, read_parquet
from trainer.data.json_text import Record, read_lines, read_list

_FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst")
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A place of rows, as the configuration names it."""

    key: str
    """What messages begin with."""
    path: str
    split: str | None = None
    """Of a saved or a hub's dataset; None: its only one, or "train"."""
    subset: str | None = None
    """Of a hub's dataset."""
    lines: bool = False
    """It is a file of JSON lines, whatever its name ends in."""


def read_records(source: Source) -> list[Record]:
    """All rows of a place, in their order, with values as they are there; of CSV every value is text.

    Raises ConfigError, beginning with the key, for a place that is not there or cannot be read.
    """
    path, key = source.path, source.key
    file = Path(path).expanduser()
    form = "jsonl" if source.lines else _format(file)
    if source.lines or file.is_file() or (form is not None and not file.is_dir()):
        records = _read_file(source, file, form)
    elif file.is_dir():
        records = read_directory(path, file, key, source.split, source.subset)
    elif _HUB_ID.fullmatch(path):
        records = read_hub(path, key, source.split, source.subset)
    else:
        raise ConfigError(f"{key}: {path!r} is neither a file nor a directory, and no name of a dataset of the hub")
    if not records:
        raise ConfigError(f"{key}: {path} has no rows")
    return records


def _read_file(source: Source, file: Path, form: str | None) -> list[Record]:
    path, key = source.path, source.key
    if not file.is_file():
        raise ConfigError(f"{key}: file {path!r} does not exist")
    for name, value in (("split", source.split), ("subset", source.subset)):
        if value is not None:
            raise ConfigError(f"{_beside(key, name)}={value!r}: {path!r} is a file, and has none; name another file")
    if form is None:
        raise ConfigError(
            f"{key}: {path!r}: its name does not say what it is; let it end in {', '.join(_FORMATS)}, with or without"
            f" {' or '.join(_COMPRESSED)}"
        )
    if form == "parquet":
        return read_parquet(path, file, key)
    with _opened(file, path, key) as stream:
        if form == "jsonl":
            return read_lines(stream, path, key)
        if form == "csv":
            return _read_csv(stream.read(), path, key)
        raw = stream.read()
        begins_list = raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        # files of JSON lines are often called .json
        return read_list(raw, path, key) if begins_list else read_lines(io.BytesIO(raw), path, key)


def _beside(key: str, name: str) -> str:
    """The key that goes with another: task.eval_split with task.eval_path."""
    return "task.subset" if name == "subset" else key.replace("path", name)


def _format(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
        if suffixes and suffixes[-1] == ".parquet":  # is compressed inside
            return None
    return _FORMATS.get(suffixes[-1]) if suffixes else None


@contextmanager
def _opened(file: Path, path: str, key: str) -> Iterator[Any]:
    """Its bytes, decompressed; iterated over, its lines, which end at \\n alone."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".zst":
            import pyarrow

            with pyarrow.input_stream(str(file), compression="zstd") as stream:
                yield io.BytesIO(stream.read())
        elif suffix == ".gz":
            yield io.BytesIO(gzip.decompress(file.read_bytes()))
        else:
            with file.open("rb") as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error


def _read_csv(raw: bytes, path: str, key: str) -> list[Record]:
    """Rows under the names of the first line; every value is text, as it is written."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{key}: {path}:{line}: not UTF-8 ({error.reason})") from error
    lines = _csv_lines(text, path, key)
    names, number = next(lines, ([], 1))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or "" in names:
        shown = f"{twice!r} twice" if twice else "a name that is empty"
        raise ConfigError(f"{key}: {path}:{number}: the line of the columns' names has {shown}")
    records = []
    for values, number in lines:
        if len(values) != len(names):
            raise ConfigError(f"{key}: {path}:{number}: {len(values)} values for {len(names)} columns")
        records.append(Record(dict(zip(names, values, strict=True)), f"{path}:{number}"))
    return records


def _csv_lines(text: str, path: str, key: str) -> Iterator[tuple[list[str], int]]:
    """Rows that are not blank, each with the line that it begins at."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    limit = csv.field_size_limit(sys.maxsize)
    number = 1
    try:
        for values in reader:
            if values:
                yield values, number
            number = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{key}: {path}:{number}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)
