"""Rows of a task, and the order in which training sees them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_kernels.philox import uniform53
from trainer.config import ConfigError

DATA_PURPOSE, SHUFFLE_PURPOSE, SPLIT_PURPOSE, WARM_START_PURPOSE, STYLE_PURPOSE, MINIBATCH_PURPOSE = range(16, 22)
"""Keys of the counter-based generator, apart from those that rollouts draw from."""

_RESERVED = {"prompts", "completions", "completion_ids"}
_SHOWN = 60
"""Characters of a prompt in a message."""
_LEVELS = 64
"""Of lists and objects within each other in a row: it is copied and written again, which takes a stack."""


@dataclass(frozen=True)
class Row:
    """One problem: a prompt (text or chat messages), its answer, and whatever else a reward may want."""

    prompt: str | list[dict[str, Any]]
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False, repr=False)
    """Where it was read, FILE:LINE, for messages; empty for one that was made."""
    prompt_ids: Sequence[int] | None = field(default=None, compare=False, repr=False)
    """The prompt as the run rendered it, once."""

    def name(self) -> str:
        """Its source and the beginning of its prompt, for messages."""
        prompt = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)
        shown = repr(prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}...")
        return f"{self.source} ({shown})" if self.source else shown

    @property
    def engine_prompt(self) -> str | list[dict[str, Any]] | list[int]:
        """What the engine is given."""
        return self.prompt if self.prompt_ids is None else list(self.prompt_ids)


def uniforms(n: int, seed: int, purpose: int, epoch: int = 0) -> NDArray[np.float64]:
    """n numbers in [0, 1), a function of the arguments alone: nothing to save, nothing to restore."""
    zero = np.zeros(n, np.uint64)
    counter = (np.arange(n, dtype=np.uint64), zero + np.uint64(epoch), zero, zero)
    return uniform53(counter, (zero + np.uint64(seed), zero + np.uint64(purpose)))


def permutation(n: int, seed: int, purpose: int, epoch: int = 0) -> NDArray[np.int64]:
    """A random order of 0 .. n - 1."""
    return np.argsort(uniforms(n, seed, purpose, epoch), kind="stable")


class RowStream:
    """An endless stream over the rows, reshuffled every epoch; a batch may span two epochs, none is dropped."""

    def __init__(self, rows: Sequence[Row], seed: int, purpose: int = DATA_PURPOSE) -> None:
        self.rows = rows
        self.seed = seed
        self.purpose = purpose
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, start: int, count: int) -> list[Row]:
        """Rows at places start .. start + count - 1 of the stream."""
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Row:
        epoch, offset = divmod(place, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self.rows), self.seed, self.purpose, epoch)
        return self.rows[int(self._order[offset])]


def read_jsonl(path: str | Path, key: str) -> list[Row]:
    """Rows of a JSONL file with `prompt` and `answer`; other fields are columns. ConfigError names file and line."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}: file {str(path)!r} does not exist")
    rows = []
    # read as bytes, whose lines end at \n alone
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{key}: {path}:{number}"
            try:
                # utf-8-sig: a byte order mark is not part of the first key
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not line.strip():
                    continue
                value = _DECODER.decode(line)
                if raw.count(b"[") + raw.count(b"{") > _LEVELS and _is_deeper(value, _LEVELS):
                    raise RecursionError
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
            except ValueError as error:  # from _DECODER's checks, or a number of more digits than Python reads
                raise ConfigError(f"{where}: {error}") from error
            except RecursionError as error:
                raise ConfigError(f"{where}: more than {_LEVELS} lists and objects within each other") from error
            rows.append(_row(value, where, f"{path}:{number}"))
    if not rows:
        raise ConfigError(f"{key}: {path} has no rows")
    return rows


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


def _row(value: Any, where: str, source: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a row is an object with prompt and answer, not {type(value).__name__}")
    for name in ("prompt", "answer"):
        if value.get(name) is None:
            raise ConfigError(f"{where}: the row has no {name!r}")
    prompt = value["prompt"]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(f"{where}: prompt is neither text nor a list of messages with role and content")
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: prompt has half a surrogate pair, which is no character") from error
    columns = {name: given for name, given in value.items() if name not in ("prompt", "answer")}
    clash = sorted(_RESERVED & columns.keys())
    if clash:
        raise ConfigError(f"{where}: field {clash[0]!r} is what rewards are called with; rename it")
    return Row(prompt, value["answer"], columns, source)


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in prompt)
