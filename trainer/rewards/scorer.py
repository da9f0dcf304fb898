"""From completions to scores: functions with weights, in this process or in others, while rollouts still run."""

import logging
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from rollout import Rollout, RolloutError, RolloutGroup
from trainer.config import RewardConfig, score_for
from trainer.data.rows import Row
from trainer.rewards.calling import LARGEST, Failure, Reply, TrainingProgress, call
from trainer.rewards.functions import WeightedFunction
from trainer.rewards.loading import LOG_EXTRA, LOG_METRIC, STATE
from trainer.rewards.pool import WorkerPool
from trainer.rewards.scores import Scores

logger = logging.getLogger(__name__)

Completion = tuple[Row, Rollout]
"""What is judged, and what it answers."""
Pending = Callable[[], Reply | Failure]
"""A call that has been made, or is made when its reply is asked for."""


@dataclass(frozen=True)
class Outcome:
    """What a function came to for one completion."""

    value: float | None
    """None: not scored."""
    failure: str | None = None
    """What it did in place of scoring, where a policy let the run go on."""
    extras: dict[str, Any] | None = None


class Scorer:
    """Judges completions by the sum of weighted functions.

    With config.workers each prompt's completions are one call of each function, which begins when they are handed
    over, in another process. Without, all completions of a step are one call, made when the scores are collected. So a
    function should judge a completion by what comes with it, whatever else is in the call. Functions get copies: what
    they do to their arguments stays with them.

    What is done when a function raises, takes too long, gives None or no finite number is config's to say. By default
    the first three end the run by a RolloutError that names function and row, and None is no score. A call that failed
    is made again for less, to find which row or completion it is.
    """

    def __init__(self, functions: Sequence[WeightedFunction], config: RewardConfig | None = None) -> None:
        self.functions = list(functions)
        self.config = config or RewardConfig()
        workers = self.config.workers
        self._pool = WorkerPool(self.functions, workers, self.config.timeout) if workers else None
        self._pending: dict[int, list[Pending]] = {}
        self._told: set[str] = set()

    def submit(self, row: Row, group: RolloutGroup, progress: TrainingProgress) -> None:
        """Hand a whole group over, in any order of groups; groups that are collected together differ in their keys."""
        if self._pool is not None:
            completions = [(row, rollout) for rollout in group.rollouts]
            self._pending[group.key] = [self._begin(k, completions, progress) for k in range(len(self.functions))]

    def collect(self, rows: Sequence[Row], groups: Sequence[RolloutGroup], progress: TrainingProgress) -> Scores:
        """The scores of groups of equal size, in the order given here; those not handed over before are so now.

        Raises RolloutError, with the function and the row, as the configuration says, and for whatever a function
        raises but KeyboardInterrupt: `exit()` in a reward ends a run no better than an error does.
        """
        by_group = [[(row, rollout) for rollout in group.rollouts] for row, group in zip(rows, groups, strict=True)]
        if self._pool is not None:
            for row, group in zip(rows, groups, strict=True):
                if group.key not in self._pending:
                    self.submit(row, group, progress)
            calls = [(some, self._pending[group.key]) for some, group in zip(by_group, groups, strict=True)]
        else:
            everything = [completion for some in by_group for completion in some]
            begun = [self._begin(k, everything, progress) for k in range(len(self.functions))]
            calls = [(everything, begun)] if everything else []
        step = _Step(progress, {})
        try:
            outcomes = [
                [outcome for some, pending in calls for outcome in self._settled(k, some, pending[k](), step)]
                for k in range(len(self.functions))
            ]
        finally:
            self._pending.clear()
        return self._scores(rows, len(by_group[0]) if by_group else 1, outcomes, step)

    def close(self) -> None:
        """End the worker processes, and whatever runs in them."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, k: int, completions: Sequence[Completion], progress: TrainingProgress) -> Pending:
        one = self.functions[k]
        given = arguments(one, completions, progress)
        wanted = [log for log in (LOG_EXTRA, LOG_METRIC) if one.takes is None or log in one.takes]
        if self._pool is not None:
            return self._pool.submit(k, given, wanted, len(completions)).result
        return lambda: call(one.function, one.name, given, wanted, len(completions))

    def _settled(
        self, k: int, completions: Sequence[Completion], reply: Reply | Failure, step: "_Step"
    ) -> list[Outcome]:
        """An outcome for each completion; a call that failed is made again row by row, then for each alone."""
        if isinstance(reply, Reply):
            for name, value in reply.metrics:
                step.logged.setdefault(name, []).append(value)
            return [self._outcome(k, i, row, reply) for i, (row, _) in enumerate(completions)]
        policy = getattr(self.config, f"on_{reply.kind}")
        rows = _by_row(completions)
        if len(completions) == 1 or (policy == "error" and len(rows) == 1):
            return [self._failed(k, reply.kind, reply.text, f"for row {completions[0][0].name()}", reply.cause)]
        smaller = rows if len(rows) > 1 else [[completion] for completion in completions]
        again = [(some, self._begin(k, some, step.progress)) for some in smaller]
        outcomes = [outcome for some, pending in again for outcome in self._settled(k, some, pending(), step)]
        if policy == "error":
            first, last = completions[0][0].name(), completions[-1][0].name()
            which = f"for {len(rows)} rows together, from {first} to {last}; for none of them alone"
            self._failed(k, reply.kind, reply.text, which, reply.cause)
        return outcomes

    def _outcome(self, k: int, i: int, row: Row, reply: Reply) -> Outcome:
        extras = {column: values[i] for column, values in reply.extras.items()}
        if i in reply.unfit:
            text = (
                f"returned {reply.unfit[i]} for completion {i}; every reward must be a finite number of at most"
                f" {LARGEST:g}"
            )
            return self._failed(k, "nan", text, f"(row {row.name()})")
        value = reply.values[i]
        if value is None and self.config.on_none == "error":
            return self._failed(k, "none", f"returned None for completion {i}", f"(row {row.name()})")
        return Outcome(score_for(self.config.on_none) if value is None else value, extras=extras)

    def _failed(self, k: int, kind: str, text: str, which: str, cause: BaseException | None = None) -> Outcome:
        """What the policy gives in place of a score; RolloutError if that is an error."""
        name, policy = self.functions[k].name, getattr(self.config, f"on_{kind}")
        text = f"reward {name} {text}"
        joined = f"{text} {which}" if which.startswith("(") else f"{text}, {which}"
        if policy == "error":
            raise RolloutError(joined) from cause
        if name not in self._told:
            self._told.add(name)
            done = "it is not scored" if policy == "skip" else f"it is scored {policy}"
            more = f"further failures are counted in rewards/{name}/failed"
            logger.warning("%s; %s, as reward.on_%s says, and %s", joined, done, kind, more)
        return Outcome(score_for(policy), text)

    def _scores(self, rows: Sequence[Row], n: int, outcomes: Sequence[Sequence[Outcome]], step: "_Step") -> Scores:
        """outcomes: by function, then by completion in order of groups."""
        totals, scored = [], []
        for i, of_one in enumerate(zip(*outcomes, strict=True)):
            both = zip(self.functions, of_one, strict=True)
            terms = [one.weight * outcome.value for one, outcome in both if outcome.value is not None]
            total = math.fsum(terms) if all(abs(term) <= LARGEST for term in terms) else math.inf
            if abs(total) > LARGEST:
                raise RolloutError(
                    f"reward: the weighted sum of {terms} is larger than {LARGEST:g}; give smaller weights"
                    f" (row {rows[i // n].name()})"
                )
            totals.append(total)
            scored.append(bool(terms))
        shape = (len(rows), n)
        by_name = dict(zip((one.name for one in self.functions), outcomes, strict=True))
        parts = {name: [math.nan if o.value is None else o.value for o in some] for name, some in by_name.items()}
        return Scores(
            torch.tensor(totals, dtype=torch.float64).view(shape),
            torch.tensor(scored, dtype=torch.bool).view(shape),
            {name: torch.tensor(values, dtype=torch.float64).view(shape) for name, values in parts.items()},
            {
                name: [(i // n, i % n, o.failure) for i, o in enumerate(some) if o.failure is not None]
                for name, some in by_name.items()
            },
            step.logged,
            _columns(outcomes, n),
        )


@dataclass(frozen=True)
class _Step:
    """What a collection is of, and what functions logged in it."""

    progress: TrainingProgress
    logged: dict[str, list[float]]


def arguments(one: WeightedFunction, completions: Sequence[Completion], progress: TrainingProgress) -> dict[str, Any]:
    """Those that the function takes, as TRL gives them: lists of one entry per completion.

    Where a prompt is a list of messages, its completion is a list of one.
    """
    given: dict[str, Any] = {"prompts": [], "completions": [], "completion_ids": [], "answer": []}
    names = dict.fromkeys(name for row, _ in completions for name in row.columns)
    names |= dict.fromkeys(one.needs - given.keys() - {STATE, LOG_EXTRA, LOG_METRIC})
    given |= {name: [] for name in names}
    for row, rollout in completions:
        chat = not isinstance(row.prompt, str) and not one.plain_text
        given["prompts"].append(deepcopy(row.prompt))
        given["completions"].append([{"role": "assistant", "content": rollout.text}] if chat else rollout.text)
        given["completion_ids"].append(list(rollout.completion_ids))
        given["answer"].append(deepcopy(row.answer))
        for name in names:
            given[name].append(deepcopy(row.columns.get(name)))
    given[STATE] = progress
    return {name: value for name, value in given.items() if one.takes is None or name in one.takes}


def _by_row(completions: Sequence[Completion]) -> list[list[Completion]]:
    """Runs of completions of the same row."""
    runs: list[list[Completion]] = []
    for completion in completions:
        if runs and runs[-1][0][0] is completion[0]:
            runs[-1].append(completion)
        else:
            runs.append([completion])
    return runs


def _columns(outcomes: Sequence[Sequence[Outcome]], n: int) -> dict[str, list[list[Any]]]:
    """Columns of log_extra, [G][n]; a later function's replaces an earlier one's of the same name."""
    names = dict.fromkeys(name for some in outcomes for outcome in some for name in outcome.extras or ())
    columns = {}
    for name in names:
        flat: list[Any] = [None] * len(outcomes[0])
        for some in outcomes:
            flat = [(o.extras or {}).get(name, kept) for o, kept in zip(some, flat, strict=True)]
        columns[name] = [flat[start : start + n] for start in range(0, len(flat), n)]
    return columns
