"""From completions to one finite number each."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from rollout import RolloutError, RolloutGroup
from trainer.config import ConfigError, RewardConfig
from trainer.rows import SHUFFLE_PURPOSE, Row, permutation
from trainer.tasks import RewardFunction, Task, exact_match, numeric

# advantages are computed in fp32, where sums and squares of larger ones would not be finite
_LARGEST = 1e15


def make_reward(config: RewardConfig, task: Task) -> RewardFunction:
    """The reward function that the configuration names."""
    if config.kind == "custom":
        assert config.path is not None
        return load_reward(config.path)
    return {"task": task.reward, "exact_match": exact_match, "numeric": numeric}[config.kind]


def load_reward(path: str) -> RewardFunction:
    """A function of one's own: `package.module:function` (or `package.module.function`) or `FILE.py:function`."""
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"reward.path={path!r}: use package.module:function or FILE.py:function")
    if module_name.endswith(".py"):
        file = Path(module_name).expanduser()
        if not file.is_file():
            raise ConfigError(f"reward.path={path!r}: file {module_name!r} does not exist")
        spec = importlib.util.spec_from_file_location(f"cowroll_reward_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"reward.path={path!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward.path={path!r}: {module_name!r} has no function {name!r}")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"reward.path={path!r}: async functions are not supported")
    loaded: RewardFunction = function
    return loaded


def reward_name(function: Callable[..., Any]) -> str:
    """A name for messages and metrics; partials and instances have none of their own."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_arguments(function: RewardFunction, rows: Sequence[Row]) -> None:
    """Refuse a reward that wants an argument which no row has."""
    known = {"prompts", "completions", "completion_ids", "answer"} | {name for row in rows for name in row.columns}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in known and parameter.default is inspect.Parameter.empty and parameter.kind not in variable:
            raise ConfigError(f"reward: {reward_name(function)} wants {name!r}, which is no field of the rows")


def score(function: RewardFunction, rows: Sequence[Row], groups: Sequence[RolloutGroup]) -> list[list[float]]:
    """Rewards of every group's completions. Raises RolloutError if the function returns a wrong count or is not finite.

    The function gets copies, so that what it does to its arguments stays with it. It may take only the arguments it
    needs; a row's further fields come under their own names.
    """
    if not groups:
        return []
    arguments: dict[str, list[Any]] = {"prompts": [], "completions": [], "completion_ids": [], "answer": []}
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments |= {name: [] for name in names}
    for row, group in zip(rows, groups, strict=True):
        for rollout in group.rollouts:
            arguments["prompts"].append(deepcopy(row.prompt))
            arguments["completions"].append(rollout.text)
            arguments["completion_ids"].append(list(rollout.completion_ids))
            arguments["answer"].append(deepcopy(row.answer))
            for name in names:
                arguments[name].append(deepcopy(row.columns.get(name)))
    count = len(arguments["completions"])
    flat = _checked(function, function(**_accepted(function, arguments)), count)
    ends = np.cumsum([len(group.rollouts) for group in groups])
    return [flat[end - len(group.rollouts) : end] for group, end in zip(groups, ends, strict=True)]


def _accepted(function: RewardFunction, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _checked(function: RewardFunction, returned: Any, count: int) -> list[float]:
    name = reward_name(function)
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RolloutError(f"reward {name} returned {type(returned).__name__}; it must return a list of numbers")
    if len(values) != count:
        raise RolloutError(f"reward {name} returned {len(values)} values for {count} completions")
    for i, value in enumerate(values):
        if not _is_finite(value):
            raise RolloutError(
                f"reward {name} returned {value!r} for completion {i}; every reward must be a finite number"
            )
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    if not isinstance(value, int | float | np.number):
        return False
    try:
        return abs(float(value)) <= _LARGEST
    except OverflowError:  # an integer too large for any float
        return False


def shuffled(rewards: list[list[float]], seed: int, step: int) -> list[list[float]]:
    """The same rewards dealt out at random over all rollouts of a step: a control in which nothing can be learned."""
    flat = [value for group in rewards for value in group]
    order = permutation(len(flat), seed, SHUFFLE_PURPOSE, step)
    dealt = iter([flat[i] for i in order])
    return [[next(dealt) for _ in group] for group in rewards]
