"""From completions to one finite number each."""

import inspect
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from rollout import RolloutError, RolloutGroup
from trainer.config import CustomRewardConfig, RewardConfig
from trainer.data.rows import SHUFFLE_PURPOSE, Row, permutation
from trainer.data.tasks import RewardFunction, Task, check_answers, exact_match, numeric
from trainer.rewards.code import users_code
from trainer.rewards.loading import check_arguments, described, load_reward, raised_at, reward_name

# an advantage may be as large, and is fp32, as is what is computed from it
_LARGEST = 1e30
_SHOWN = 500
"""Characters of a value in a message."""


def make_reward(config: RewardConfig, task: Task) -> RewardFunction:
    """The reward function that the configuration names."""
    if isinstance(config, CustomRewardConfig):
        return load_reward(config.path)
    return {"task": task.reward, "exact_match": exact_match, "numeric": numeric}[config.kind]


def check_reward(function: RewardFunction, task: Task) -> None:
    """Refuse a reward that cannot score all rows, those to train on and those held out, with the field or the row."""
    for kind, rows in (("training", task.train_rows), ("held-out", task.eval_rows)):
        if rows:
            check_arguments(function, rows, kind)
            check_answers(function, rows)


def score(function: RewardFunction, rows: Sequence[Row], groups: Sequence[RolloutGroup]) -> list[list[float]]:
    """Rewards of every group's completions.

    The function gets copies, so that what it does to its arguments stays with it. It may take only the arguments it
    needs; a row's further fields come under their own names. Raises RolloutError, with the function and the row, if it
    returns a wrong count or what is not finite, and for whatever it raises but KeyboardInterrupt: `exit()` in a reward
    ends a run no better than an error does. What it sets of torch, and the working directory, are put back.
    """
    if not groups:
        return []
    values = _called(function, rows, groups)
    owners = [row for row, group in zip(rows, groups, strict=True) for _ in group.rollouts]
    flat = _checked(function, values, owners)
    ends = np.cumsum([len(group.rollouts) for group in groups])
    return [flat[end - len(group.rollouts) : end] for group, end in zip(groups, ends, strict=True)]


def _arguments(
    function: RewardFunction, rows: Sequence[Row], groups: Sequence[RolloutGroup], names: Iterable[str]
) -> dict[str, list[Any]]:
    """Those that the function takes, each with one entry per completion. names: of the rows' further fields."""
    arguments: dict[str, list[Any]] = {"prompts": [], "completions": [], "completion_ids": [], "answer": []}
    arguments |= {name: [] for name in names}
    for row, group in zip(rows, groups, strict=True):
        for rollout in group.rollouts:
            arguments["prompts"].append(deepcopy(row.prompt))
            arguments["completions"].append(rollout.text)
            arguments["completion_ids"].append(list(rollout.completion_ids))
            arguments["answer"].append(deepcopy(row.answer))
            for name in names:
                arguments[name].append(deepcopy(row.columns.get(name)))
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return arguments
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: arguments[p.name] for p in parameters if p.kind in by_name and p.name in arguments}


def _called(function: RewardFunction, rows: Sequence[Row], groups: Sequence[RolloutGroup]) -> Any:
    """What the function returns, as a list if it is a sequence, or a tensor or an array of one dimension or more."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments = _arguments(function, rows, groups, names)
    try:
        with users_code(reward_name(function)):
            return _plain(function(**arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code may raise anything
        place = raised_at(error)
        where = f" at {place}" if place else ""
        rows_named = _failing(function, rows, groups, names)
        raise RolloutError(f"reward {reward_name(function)} raised {described(error)}{where}, {rows_named}") from error


def _failing(
    function: RewardFunction, rows: Sequence[Row], groups: Sequence[RolloutGroup], names: Iterable[str]
) -> str:
    """Which row a failed call fails for, found by calling the function again with one row's completions at a time."""
    for row, group in zip(rows, groups, strict=True):
        try:
            with users_code(reward_name(function)):
                _plain(function(**_arguments(function, [row], [group], names)))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - whatever it is, it is this row's
            return f"for row {row.name()}"
    return f"for {len(rows)} rows together, from {rows[0].name()} to {rows[-1].name()}; for none of them alone"


def _plain(returned: Any) -> Any:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return returned
    # a number may be a tensor or an array of its own
    return [
        value.item() if getattr(value, "shape", None) == () and not isinstance(value, np.generic) else value
        for value in values
    ]


def _checked(function: RewardFunction, values: Any, owners: Sequence[Row]) -> list[float]:
    name = reward_name(function)
    if not isinstance(values, list):
        raise RolloutError(f"reward {name} returned {type(values).__name__}; it must return a list of numbers")
    if len(values) != len(owners):
        raise RolloutError(f"reward {name} returned {len(values)} values for {len(owners)} completions")
    for i, (value, row) in enumerate(zip(values, owners, strict=True)):
        if not _is_finite(value):
            raise RolloutError(
                f"reward {name} returned {_shown(value)} for completion {i}; every reward must be a finite number of at"
                f" most {_LARGEST:g} (row {row.name()})"
            )
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return False
    try:
        return abs(float(value)) <= _LARGEST
    except OverflowError:  # an integer too large for any float
        return False


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of more digits than Python writes, or a user's own type
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shuffled(rewards: list[list[float]], seed: int, step: int) -> list[list[float]]:
    """The same rewards dealt out at random over all rollouts of a step: a control in which nothing can be learned."""
    flat = [value for group in rewards for value in group]
    order = permutation(len(flat), seed, SHUFFLE_PURPOSE, step)
    dealt = iter([flat[i] for i in order])
    return [[next(dealt) for _ in group] for group in rewards]
