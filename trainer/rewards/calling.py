"""One call of a reward function, in whatever process: how TRL calls them, what may come back, and how it may fail.

Imports no torch: a worker process starts in a fraction of a second.
"""

import asyncio
import atexit
import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from trainer.data.tasks import RewardFunction
from trainer.rewards.code import users_code
from trainer.rewards.loading import LOG_EXTRA, LOG_METRIC, described, raised_at

LARGEST = 1e30
"""Of a reward, in size: an advantage may be as large, and is fp32, as is what is computed from it."""
_SHOWN = 500
"""Characters of a value in a message."""

FailureKind = Literal["error", "timeout"]


@dataclass(frozen=True)
class TrainingProgress:
    """Where training is: what a reward function gets as `trainer_state`, by the names of transformers.TrainerState."""

    global_step: int
    """Optimizer steps done."""
    max_steps: int


@dataclass(frozen=True)
class Reply:
    """What a call came to, in plain numbers and texts."""

    values: list[float | None]
    """One per completion; None: not scored. nan where `unfit` says what came instead of a number."""
    unfit: dict[int, str]
    """How a value looks that is no finite number of at most LARGEST, by its place."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """What was given to log_metric."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """What was given to log_extra: columns of one value per completion."""


@dataclass(frozen=True)
class Failure:
    """A call that came to nothing."""

    kind: FailureKind
    text: str
    """What the function did, to follow its name: `raised ValueError: ...`."""
    cause: BaseException | None = None
    """The exception, where it was raised in this process."""


def call(
    function: RewardFunction, name: str, arguments: Mapping[str, Any], wanted: Sequence[str], count: int
) -> Reply | Failure:
    """The function's values for `count` completions. KeyboardInterrupt passes, whatever else it raises is a Failure.

    arguments: columns. wanted: which of log_extra and log_metric it takes. An async function is awaited, always on the
    process's one event loop.
    """
    metrics: list[tuple[str, float]] = []
    extras: dict[str, list[Any]] = {}

    def log_metric(name: str, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a finite number")
        metrics.append((str(name), float(value)))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != count:
            raise ValueError(f"log_extra({column!r}, ...): {len(values)} values for {count} completions")
        extras.setdefault(str(column), [])[:] = [_plain_extra(value) for value in values]

    logs = {LOG_METRIC: log_metric, LOG_EXTRA: log_extra}
    try:
        with users_code(name):
            returned = function(**arguments, **{log: logs[log] for log in wanted})
            if inspect.isawaitable(returned):
                returned = _event_loop().run(_awaited(returned))
            values = _plain(returned)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        place = raised_at(error)
        return Failure("error", f"raised {described(error)}" + (f" at {place}" if place else ""), error)
    checked = _checked(values, count)
    return checked if isinstance(checked, Failure) else replace(checked, metrics=metrics, extras=extras)


@cache
def _event_loop() -> asyncio.Runner:
    """One for all calls, so that what a function keeps of it (a session, a lock) lives on to the next."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


def _plain(returned: Any) -> Any:
    """A list of plain values, if it is a sequence, or a tensor or an array of one dimension or more."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return returned
    # a number may be a tensor or an array of its own
    return [
        value.item() if getattr(value, "shape", None) == () and not isinstance(value, np.generic) else value
        for value in values
    ]


def _plain_extra(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else shown(value)


def _checked(values: Any, count: int) -> Reply | Failure:
    if not isinstance(values, list):
        return Failure("error", f"returned {type(values).__name__}; it must return a list of numbers")
    if len(values) != count:
        return Failure("error", f"returned {len(values)} values for {count} completions")
    unfit = {i: shown(value) for i, value in enumerate(values) if value is not None and not _is_finite(value)}
    return Reply([math.nan if i in unfit else _number(value) for i, value in enumerate(values)], unfit)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return False
    try:
        return abs(float(value)) <= LARGEST
    except OverflowError:  # an integer too large for any float
        return False


def shown(value: Any) -> str:
    """A value in a message, whatever its type makes of repr()."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of more digits than Python writes, or a user's own type
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
