"""Held-out evaluation, with the training engine, from random numbers and keys that training never uses."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from rollout import RolloutEngine, RolloutGroup, SamplingParams
from rollout.forward import EVAL
from trainer.config import ConfigError, EvalConfig
from trainer.data.rows import Row
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.scorer import Scorer
from trainer.tracking.tracking import Metrics


def eval_sampling(config: EvalConfig, training: SamplingParams) -> SamplingParams:
    """How an evaluation draws: ends and seed are training's, all else its own."""
    return replace(
        training,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens or training.max_new_tokens,
    )


def check_by(config: EvalConfig, rows: Sequence[Row]) -> None:
    """Refuse a column that the held-out rows do not have. Raises ConfigError with those that they have."""
    columns = sorted({name for row in rows for name in row.columns})
    if config.by is not None and rows and config.by not in columns:
        known = f"they have {', '.join(columns)}" if columns else "they have no further columns"
        raise ConfigError(f"eval.by={config.by!r}: the held-out rows have no such column; {known}")


def evaluate(
    engine: RolloutEngine,
    rows: list[Row],
    scorer: Scorer,
    config: EvalConfig,
    sampling: SamplingParams,
    progress: TrainingProgress,
) -> Metrics:
    """What config.samples completions of each row are worth, drawn with `sampling`.

    A completion passes with a reward of config.pass_reward or more. One without a score, because the engine cannot take
    its prompt or no function scores it, counts as failed and as an error. With several functions there is the mean of
    each, too; with config.by the same figures for the rows of each value of that column.
    """
    groups = engine.generate_rollouts(
        [row.engine_prompt for row in rows],
        config.samples,
        sampling,
        step=progress.global_step,
        purpose=EVAL,
        on_error="return",
        on_group=lambda place, group: scorer.submit(rows[place], group, progress),
    )
    good = [i for i, group in enumerate(groups) if group.error is None]
    scores = scorer.collect([rows[i] for i in good], [groups[i] for i in good], progress)
    rewards: list[list[float]] = [[] for _ in rows]
    for i, values, scored in zip(good, scores.totals.tolist(), scores.scored.tolist(), strict=True):
        rewards[i] = [value for value, counts in zip(values, scored, strict=True) if counts]
    names = [f"rewards/{one.name}/mean" for one in scorer.functions] if len(scorer.functions) > 1 else []
    metrics = {f"eval/{name}": value for name, value in scores.metrics().items() if name in names}
    metrics |= _figures("eval", rewards, groups, config)
    if config.by is not None:
        for value in dict.fromkeys(str(row.columns.get(config.by)) for row in rows):
            places = [i for i, row in enumerate(rows) if str(row.columns.get(config.by)) == value]
            chosen = [rewards[i] for i in places], [groups[i] for i in places]
            metrics |= _figures(f"eval/{value}", *chosen, config)
    return metrics


def _figures(
    prefix: str, rewards: Sequence[Sequence[float]], groups: Sequence[RolloutGroup], config: EvalConfig
) -> Metrics:
    n, total = config.samples, config.samples * len(rewards)
    passed = [sum(value >= config.pass_reward for value in values) for values in rewards]
    drawn = [rollout for group in groups if group.error is None for rollout in group.rollouts]
    metrics = {
        f"{prefix}/reward": math.fsum(value for values in rewards for value in values) / total,
        f"{prefix}/num_errors": float(total - sum(map(len, rewards))),
    }
    if drawn:
        metrics[f"{prefix}/mean_length"] = statistics.fmean(len(rollout.completion_ids) for rollout in drawn)
        metrics[f"{prefix}/clipped_ratio"] = statistics.fmean(rollout.finish_reason == "length" for rollout in drawn)
    for k in sorted({*(2**i for i in range(n.bit_length())), n}):
        metrics[f"{prefix}/pass@{k}"] = statistics.fmean(pass_at(k, n, count) for count in passed)
    return metrics


def pass_at(k: int, n: int, passed: int) -> float:
    """The chance that one of k completions passes, by n of which `passed` did: 1 - C(n - passed, k) / C(n, k).

    Without bias (arXiv 2107.03374).
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
