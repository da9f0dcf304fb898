"""Problems that the reasoning-gym library makes, and its own scorers for them."""

import difflib
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer.config import ConfigError, ReasoningGymConfig
from trainer.data.rows import Row

logger = logging.getLogger(__name__)

_TRIES = 8
"""Problems looked at for each one to hold out."""


Entries = dict[tuple[str, int], tuple[Any, dict[str, Any]]]
"""A dataset of the library and one of its problems, by whether it is held out and its place."""


@dataclass(frozen=True)
class Problems:
    """Rows, and what their completions are worth."""

    train_rows: list[Row]
    eval_rows: list[Row]
    reward: "ReasoningGymScore"


def make_problems(config: ReasoningGymConfig) -> Problems:
    """task.size problems, and task.eval_rows others from other seeds, whose questions are all new.

    A row's columns `entry` and `dataset` say which problem of which dataset it is. Raises ConfigError if the library is
    missing, has no such dataset, refuses the options, or has too few questions.
    """
    reward, names = ReasoningGymScore(config), _names(config)
    rows = {
        at: Row(entry["question"], entry["answer"], {"entry": list(at), "dataset": _name(entry, names)})
        for at, (_, entry) in reward.entries.items()
    }
    train, held_out = ([row for (kind, _), row in rows.items() if kind == wanted] for wanted in ("train", "held-out"))
    return Problems(train, held_out, reward)


def _make_entries(config: ReasoningGymConfig) -> Entries:
    """The problems, in their order; some datasets have other ones in another order."""
    made = _create(config, config.seed, config.size)
    entries: Entries = {("train", place): (made, made[place]) for place in range(config.size)}
    asked = {entry["question"] for _, entry in entries.values()}
    # the library draws problem i from seed + i: these begin where the others end
    others = _create(config, (config.seed + config.size) % 2**32, max(1, config.eval_rows * _TRIES))
    found = 0
    for place in range(len(others) if config.eval_rows else 0):
        entry = others[place]
        if entry["question"] not in asked:
            asked.add(entry["question"])
            entries["held-out", place] = (others, entry)
            found += 1
        if found == config.eval_rows:
            break
    if found < config.eval_rows:
        raise ConfigError(
            f"task.eval_rows={config.eval_rows}: only {found} of {len(others)} further problems of"
            f" {', '.join(_names(config))} ask what is not trained on; hold out fewer, or train on fewer (task.size)"
        )
    return entries


@dataclass(frozen=True, eq=False)
class ReasoningGymScore:
    """The library's score of a completion, 0 to 1: of what its last <answer></answer> holds, or of all of it without.

    What a scorer cannot parse scores 0. A copy in another process makes the problems anew, from the configuration.
    """

    config: ReasoningGymConfig

    @cached_property
    def entries(self) -> Entries:
        return _make_entries(self.config)

    def __reduce__(self) -> tuple[type["ReasoningGymScore"], tuple[ReasoningGymConfig]]:
        return ReasoningGymScore, (self.config,)

    def __call__(self, completions: list[str], entry: list[list[Any]], **_: Any) -> list[float]:
        return [
            self._score(text, *self.entries[kind, place])
            for text, (kind, place) in zip(completions, entry, strict=True)
        ]

    def _score(self, text: str, made: Any, problem: dict[str, Any]) -> float:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        try:
            return float(made.score_answer(text.strip() if answer is None else answer, deepcopy(problem)))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # some scorers take it for granted that the answer can be parsed
            logger.debug("a completion scores 0: %s of %s: %s", type(error).__name__, type(made).__name__, error)
            return 0.0


def _names(config: ReasoningGymConfig) -> list[Any]:
    return config.name if isinstance(config.name, list) else [config.name]


def _name(entry: dict[str, Any], names: Sequence[str]) -> str:
    name: str = entry["metadata"]["source_dataset"] if len(names) > 1 else names[0]
    return name


def worked_example(config: ReasoningGymConfig, rows: Sequence[Row]) -> Callable[[Row, float], str] | None:
    """Completions to imitate: the answer, and for all but finished_fraction of them another problem's."""
    if any(not isinstance(row.answer, str) for row in rows):
        return None  # problems of many solutions may come without one

    def example(row: Row, uniform: float) -> str:
        if uniform < config.finished_fraction:
            return str(row.answer)
        return str(rows[int(uniform * 2**20) % len(rows)].answer)

    return example


def _create(config: ReasoningGymConfig, seed: int, size: int) -> Any:
    """A dataset of the library; several names are mixed in equal parts, each with the options under its own name."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task=reasoning_gym: {error}; install it with: pip install -c constraints.txt -e '.[tasks]'"
        ) from error
    known, names = sorted(DATASETS.keys() - {"composite"}), _names(config)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 3) or known[:3]
            raise ConfigError(
                f"task.name={name!r}: reasoning-gym has no dataset of that name (it has {len(known)}, among them"
                f" {', '.join(close)})"
            )
    options = {names[0]: config.options} if len(names) == 1 else config.options
    for name, given in options.items():
        if name not in names:
            raise ConfigError(f"task.options.{name}: several datasets have options by name, of {', '.join(names)}")
        if not isinstance(given, dict) or {"seed", "size"} & given.keys():
            raise ConfigError(f"task.options={given!r}: give a mapping; task.seed and task.size are keys of their own")
    try:
        if len(names) == 1:
            return reasoning_gym.create_dataset(names[0], seed=seed, size=size, **config.options)
        specs = [DatasetSpec(name, 1.0, dict(options.get(name, {}))) for name in names]
        return reasoning_gym.create_dataset("composite", seed=seed, size=size, datasets=specs)
    except (ValueError, TypeError, AssertionError, LookupError, AttributeError) as error:  # of its checks
        raise ConfigError(f"task.options={config.options!r}: {type(error).__name__}: {error}") from error
