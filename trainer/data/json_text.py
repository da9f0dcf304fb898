"""JSON as it is written: values keep their types and digits, and what is wrong is named by its line."""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from trainer.config import ConfigError

_LEVELS = 64
"""Of lists and objects within each other in a row: it is copied and written again, which takes a stack."""


class Record(NamedTuple):
    """One row of a file: its columns by name, and where it was read."""

    values: Any
    source: str
    filled: bool = False
    """Whether objects in it have the fields of all rows' objects, null where they had none themselves."""


def read_lines(lines: Iterable[bytes], path: str, key: str) -> list[Record]:
    """A row for each line that is not blank. Raises ConfigError with key, file and line."""
    records = []
    for number, raw in enumerate(lines, start=1):
        # utf-8-sig: a byte order mark is not part of the first key
        value = _decoded(raw, f"{key}: {path}:{number}", "utf-8-sig" if number == 1 else "utf-8")
        if value is not _BLANK:
            records.append(Record(value, f"{path}:{number}"))
    return records


def read_list(raw: bytes, path: str, key: str) -> list[Record]:
    """Rows of a file that is one JSON list; they are counted from 1. Raises ConfigError with key and file."""
    rows = _decoded(raw, f"{key}: {path}", "utf-8-sig")
    assert isinstance(rows, list)
    return [Record(value, f"{path}:{number}") for number, value in enumerate(rows, start=1)]


_BLANK = object()


def _decoded(raw: bytes, where: str, encoding: str) -> Any:
    try:
        text = raw.decode(encoding)
        if not text.strip():
            return _BLANK
        value = _DECODER.decode(text)
        rows = value if isinstance(value, list) else [value]
        if raw.count(b"[") + raw.count(b"{") > _LEVELS and any(_is_deeper(row, _LEVELS) for row in rows):
            raise RecursionError
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ConfigError(f"{where}: not JSON ({error.msg} at {line}column {error.colno})") from error
    except ValueError as error:  # from _DECODER's checks, or a number of more digits than Python reads
        raise ConfigError(f"{where}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: more than {_LEVELS} lists and objects within each other") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one object; which one counts?")
    return made


def _float(digits: str) -> float:
    if math.isinf(float(digits)):
        raise ValueError(f"{digits} is larger than any double; give it as text")
    return float(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; use null or text")


# strict=False: control characters in a text are taken as they are
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_no_constant, strict=False)


def _is_deeper(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inside is not None and (levels == 0 or any(_is_deeper(item, levels - 1) for item in inside))
