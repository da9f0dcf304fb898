"""What a step's completions are worth, by function and in all."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainer.data.rows import SHUFFLE_PURPOSE, permutation


@dataclass(frozen=True)
class Scores:
    """Of G groups of n completions. A completion is scored if one of the functions has scored it."""

    totals: Tensor
    """fp64 [G, n]: the weighted sum over the functions that have scored it; 0.0 where none has."""
    scored: Tensor
    """bool [G, n]"""
    parts: dict[str, Tensor]
    """By function, fp64 [G, n]: its values before weights, nan where it has not scored."""
    failures: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    """By function: group, index, and what the function did in place of scoring, where a policy let the run go on."""
    logged: dict[str, float] = field(default_factory=dict)
    """By name, the mean of what functions gave to log_metric."""
    extras: dict[str, list[list[Any]]] = field(default_factory=dict)
    """By column, what functions gave to log_extra, [G][n]; None where they gave nothing."""

    def metrics(self) -> dict[str, float]:
        """By TRL's names. Mean and standard deviation (n - 1) of a function are over what it has scored, and left out
        where they are of nothing."""
        metrics = dict(self.logged)
        for name, values in self.parts.items():
            scored = values[~values.isnan()].tolist()
            if scored:
                metrics[f"rewards/{name}/mean"] = statistics.mean(scored)
            if len(scored) > 1:
                metrics[f"rewards/{name}/std"] = statistics.stdev(scored)
            metrics[f"rewards/{name}/failed"] = float(len(self.failures.get(name, ())))
        metrics["rewards/unscored"] = float((~self.scored).sum())
        return metrics

    def chosen(self, groups: Sequence[int]) -> "Scores":
        """Those of some groups, by their places."""
        new = {g: k for k, g in enumerate(groups)}
        failures = {name: [(new[g], i, t) for g, i, t in some if g in new] for name, some in self.failures.items()}
        return Scores(
            self.totals[groups],
            self.scored[groups],
            {name: values[groups] for name, values in self.parts.items()},
            failures,
            self.logged,
            {name: [columns[g] for g in groups] for name, columns in self.extras.items()},
        )

    def joined(self, other: "Scores") -> "Scores":
        """These groups, then the other's of the same functions."""
        size, more = len(self.totals), len(other.totals)
        n = self.totals.shape[1]
        moved = {name: [(g + size, i, text) for g, i, text in some] for name, some in other.failures.items()}
        shares = [(self.logged, size), (other.logged, more)]
        logged = {}
        for name in self.logged | other.logged:
            given = [(values[name], count) for values, count in shares if name in values]
            logged[name] = sum(value * count for value, count in given) / max(sum(count for _, count in given), 1)
        columns = {}
        for name in self.extras | other.extras:
            first = self.extras.get(name, [[None] * n] * size)
            columns[name] = first + other.extras.get(name, [[None] * n] * more)
        return Scores(
            torch.cat([self.totals, other.totals]),
            torch.cat([self.scored, other.scored]),
            {name: torch.cat([values, other.parts[name]]) for name, values in self.parts.items()},
            {name: some + moved.get(name, []) for name, some in self.failures.items()},
            logged,
            columns,
        )

    def shuffled(self, seed: int, step: int) -> "Scores":
        """The same totals dealt out at random over all that are scored: a control in which nothing can be learned."""
        flat = self.totals[self.scored]
        totals = self.totals.clone()
        totals[self.scored] = flat[torch.from_numpy(permutation(len(flat), seed, SHUFFLE_PURPOSE, step))]
        return replace(self, totals=totals)
