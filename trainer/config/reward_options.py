"""Keys of each reward."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainer.config.setting import ConfigError, setting

POLICIES = ("on_error", "on_timeout", "on_none", "on_nan")


@dataclass
class RewardConfig:
    """What all rewards have; reward=task, exact_match and numeric have no more."""

    kind: str = setting("task")
    shuffle: bool = setting(False)
    # what they change is what becomes of a rollout that would have ended the run
    workers: int = setting(0, at_least=0, trajectory=False)
    timeout: float | None = setting(None, above=0, trajectory=False)
    on_error: str = setting("error", trajectory=False)
    on_timeout: str = setting("error", trajectory=False)
    on_none: str = setting("skip", trajectory=False)
    on_nan: str = setting("error", trajectory=False)


@dataclass
class CustomRewardConfig(RewardConfig):
    """reward=custom"""

    kind: str = setting("custom")
    path: str = setting(MISSING, needs="package.module:function or FILE.py:function")


@dataclass
class RegexRewardConfig(RewardConfig):
    """reward=regex"""

    kind: str = setting("regex")
    pattern: str = setting(MISSING, needs="a regular expression")
    match: str = setting("whole", choices=("whole", "search"))
    prefix: str = setting("")


@dataclass
class MathRewardConfig(RewardConfig):
    """reward=math"""

    kind: str = setting("math")
    workers: int = setting(2, at_least=0, trajectory=False)
    timeout: float | None = setting(10.0, above=0, trajectory=False)
    on_error: str = setting("0", trajectory=False)
    on_timeout: str = setting("0", trajectory=False)


@dataclass
class FunctionsRewardConfig(RewardConfig):
    """reward=functions"""

    kind: str = setting("functions")
    functions: list[Any] = setting(  # noqa: RUF009  it is no default, but makes one
        MISSING, needs="a list, as in reward.functions=[numeric,judge.py:score]"
    )


def score_for(policy: str) -> float | None:
    """What a policy gives in place of a score: a number; None for skip, and for error, which gives none."""
    return None if policy in ("error", "skip") else float(policy)


def check_reward_options(config: RewardConfig) -> None:
    """Refuse policies that are none, and a time limit where nothing can be ended. Raises ConfigError."""
    for name in POLICIES:
        policy = getattr(config, name)
        try:
            fits = math.isfinite(score_for(policy) or 0.0)
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(f"reward.{name}={policy!r}: use error, skip or a finite number to score")
    if config.timeout is not None and not config.workers:
        raise ConfigError(
            f"reward.timeout={config.timeout!r}: a function in the trainer's own process cannot be ended; give it"
            " processes of its own, as in reward.workers=2, or leave the limit out (null)"
        )


@dataclass(frozen=True)
class FunctionEntry:
    """An entry of reward.functions: a function by name or by path, and its weight."""

    key: str
    """Where it stands, for messages."""
    name: str | None
    """Of one that comes with the trainer; with a path, what it is called in metrics."""
    path: str | None
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def function_entries(functions: Sequence[Any], key: str = "reward.functions") -> list[FunctionEntry]:
    """The entries, each written as `NAME`, `FILE.py:function` or `package.module.function`, or as a mapping.

    A mapping has `name`, `path` or both, perhaps `weight`, and the options of a function that comes with the trainer.
    Names of those have neither dot nor colon. Raises ConfigError.
    """
    if not functions:
        raise ConfigError(f"{key}: is empty; give at least one function")
    return [_entry(given, f"{key}[{i}]") for i, given in enumerate(functions)]


def _entry(given: Any, key: str) -> FunctionEntry:
    if isinstance(given, str):
        is_path = "." in given or ":" in given
        return FunctionEntry(key, None if is_path else given, given if is_path else None)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given!r}: give a name, a path, or a mapping such as {{name: numeric, weight: 0.5}}")
    options = dict(given)
    name, path, weight = options.pop("name", None), options.pop("path", None), options.pop("weight", 1.0)
    for what, value in (("name", name), ("path", path)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{key}.{what}={value!r}: give text")
    if name is None and path is None:
        raise ConfigError(f"{key}: has neither name nor path; name a function")
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight={weight!r}: must be a finite number")
    if path is not None and options:
        raise ConfigError(f"{key}.{min(map(str, options))}: a function by path has name, path and weight, and no more")
    return FunctionEntry(key, name, path, float(weight), options)
