"""From the configuration to functions with weights, checked against the rows before anything loads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import (
    ConfigError,
    CustomRewardConfig,
    FunctionEntry,
    FunctionsRewardConfig,
    RegexRewardConfig,
    RewardConfig,
    function_entries,
)
from trainer.data.tasks import RewardFunction, Task, check_answers
from trainer.rewards.builtin import BUILTIN
from trainer.rewards.loading import check_arguments, load_reward, needs, reward_name, takes


@dataclass(frozen=True)
class WeightedFunction:
    """One function of a reward."""

    name: str
    """In metrics and messages; no two of a reward have the same."""
    function: RewardFunction
    weight: float
    path: str | None
    """Where a worker process loads it from; None: it gets a pickled copy."""
    plain_text: bool
    """Whether it takes completions as text where the prompt is a list of messages too, as our own functions do."""
    takes: frozenset[str] | None
    """Names of the arguments that it is given; None: all that there are."""
    needs: frozenset[str]
    """Those without a default, which are None where no row of a call has them."""


def weighted(
    function: Callable[..., Any],
    name: str | None = None,
    weight: float = 1.0,
    *,
    path: str | None = None,
    plain_text: bool = False,
) -> WeightedFunction:
    """A function that stands by itself. name: None: its own."""
    return WeightedFunction(
        name or reward_name(function), function, weight, path, plain_text, takes(function), needs(function)
    )


def make_functions(config: RewardConfig, task: Task) -> list[WeightedFunction]:
    """The functions that the configuration names. Raises ConfigError for one that is not there or cannot be used."""
    if isinstance(config, FunctionsRewardConfig):
        return _with_own_names([_function(entry, task) for entry in function_entries(config.functions)])
    if isinstance(config, CustomRewardConfig):
        return [weighted(load_reward(config.path), path=config.path)]
    options = {}
    if isinstance(config, RegexRewardConfig):
        options = {"pattern": config.pattern, "match": config.match, "prefix": config.prefix}
    return [_built_in(config.kind, options, task, "reward")]


def check_functions(functions: Sequence[WeightedFunction], task: Task) -> None:
    """Refuse functions that cannot score all rows, those to train on and those held out, with the field or the row."""
    for kind, rows in (("training", task.train_rows), ("held-out", task.eval_rows)):
        for one in functions if rows else ():
            check_arguments(one.function, rows, kind, one.name)
            check_answers(one.function, rows)


def _function(entry: FunctionEntry, task: Task) -> WeightedFunction:
    if entry.path is not None:
        function = load_reward(entry.path, f"{entry.key}.path")
        return weighted(function, entry.name, entry.weight, path=entry.path)
    assert entry.name is not None
    return _built_in(entry.name, entry.options, task, entry.key, entry.weight)


def _built_in(name: str, options: Mapping[str, Any], task: Task, key: str, weight: float = 1.0) -> WeightedFunction:
    makers = {"task": lambda: task.reward, **BUILTIN}
    if name not in makers:
        raise ConfigError(f"{key}.name={name!r}: use one of {', '.join(makers)}, or a path such as judge.py:score")
    known = getattr(makers[name], "__dataclass_fields__", {})
    for option in options:
        if option not in known:
            has = f"has {', '.join(['name', 'weight', *known])}"
            raise ConfigError(f"{key}.{option}={options[option]!r}: is no option of {name}, which {has}")
    try:
        function = makers[name](**options)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error
    # a task's own function keeps its name: the arithmetic's final_answer, say
    return weighted(function, None if name == "task" else name, weight, plain_text=True)


def _with_own_names(functions: Sequence[WeightedFunction]) -> list[WeightedFunction]:
    """The second of a name gets `_2` behind it, and so on."""
    named: dict[str, WeightedFunction] = {}
    for one in functions:
        name, number = one.name, 1
        while name in named:
            number += 1
            name = f"{one.name}_{number}"
        named[name] = replace(one, name=name)
    return list(named.values())
