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
    logged: dict[str, list[float]] = field(default_factory=dict)
    """By name, what functions gave to log_metric."""
    extras: dict[str, list[list[Any]]] = field(default_factory=dict)
    """By column, what functions gave to log_extra, [G][n]; None where they gave nothing."""

    def metrics(self) -> dict[str, float]:
        """By TRL's names, with the mean of what was logged under each.

        Mean and standard deviation (n - 1) of a function are over what it has scored, and left out where they are of
        nothing.
        """
        metrics = {name: statistics.fmean(values) for name, values in self.logged.items()}
        for name, values in self.parts.items():
            scored = values[~values.isnan()].tolist()
            if scored:
                metrics[f"rewards/{name}/mean"] = statistics.mean(scored)
            if len(scored) > 1:
                metrics[f"rewards/{name}/std"] = statistics.stdev(scored)
            metrics[f"rewards/{name}/failed"] = float(len(self.failures.get(name, ())))
        metrics["rewards/unscored"] = float((~self.scored).sum())
        return metrics

    def chosen(self, places: Sequence[int]) -> "Scores":
        """Of those groups; what was logged is still of all."""
        rows = list(places)
        failures = {
            name: [(rows.index(g), i, text) for g, i, text in of_one if g in rows]
            for name, of_one in self.failures.items()
        }
        parts = {name: values[rows] for name, values in self.parts.items()}
        extras = {name: [columns[g] for g in rows] for name, columns in self.extras.items()}
        return Scores(self.totals[rows], self.scored[rows], parts, failures, self.logged, extras)

    def joined(self, other: "Scores") -> "Scores":
        """These groups and then those of another collection by the same functions."""
        if not len(self.totals) or not len(other.totals):
            return self if len(self.totals) else other
        first, n = self.totals.shape
        failures = {
            name: [*self.failures.get(name, []), *((first + g, i, text) for g, i, text in other.failures.get(name, []))]
            for name in self.parts
        }
        absent = {name: [[None] * n] for name in self.extras | other.extras}
        return Scores(
            torch.cat([self.totals, other.totals]),
            torch.cat([self.scored, other.scored]),
            {name: torch.cat([values, other.parts[name]]) for name, values in self.parts.items()},
            failures,
            {name: self.logged.get(name, []) + other.logged.get(name, []) for name in self.logged | other.logged},
            {
                name: self.extras.get(name, empty * first) + other.extras.get(name, empty * len(other.totals))
                for name, empty in absent.items()
            },
        )

    def shuffled(self, seed: int, step: int) -> "Scores":
        """The same totals dealt out at random over all that are scored: a control in which nothing can be learned."""
        flat = self.totals[self.scored]
        totals = self.totals.clone()
        totals[self.scored] = flat[torch.from_numpy(permutation(len(flat), seed, SHUFFLE_PURPOSE, step))]
        return replace(self, totals=totals)
