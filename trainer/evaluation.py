"""Held-out evaluation: greedy, with the training engine, from random numbers and keys that training never uses."""

import math
from dataclasses import replace

from rollout import RolloutEngine, SamplingParams
from rollout.forward import EVAL
from trainer.data.rows import Row
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.scorer import Scorer


def evaluate(
    engine: RolloutEngine,
    rows: list[Row],
    scorer: Scorer,
    sampling: SamplingParams,
    max_new_tokens: int,
    progress: TrainingProgress,
) -> dict[str, float]:
    """Mean reward of one greedy completion per row, and pass@1: the share with a reward of 1 or more.

    A row that gets no score, because the engine cannot take its prompt or no function scores it, counts as failed and
    as an error. With several functions there is the mean of each, too.
    """
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=max_new_tokens)
    groups = engine.generate_rollouts(
        [row.engine_prompt for row in rows],
        1,
        greedy,
        step=progress.global_step,
        purpose=EVAL,
        on_error="return",
        on_group=lambda place, group: scorer.submit(rows[place], group, progress),
    )
    good = [(row, group) for row, group in zip(rows, groups, strict=True) if group.error is None]
    scores = scorer.collect([row for row, _ in good], [group for _, group in good], progress)
    rewards = scores.totals[scores.scored].tolist()
    names = [f"rewards/{one.name}/mean" for one in scorer.functions] if len(scorer.functions) > 1 else []
    means = {f"eval/{name}": value for name, value in scores.metrics().items() if name in names}
    return means | {
        "eval/reward": math.fsum(rewards) / len(rows),
        "eval/pass@1": sum(value >= 1.0 for value in rewards) / len(rows),
        "eval/num_errors": float(len(rows) - len(rewards)),
    }
