"""Held-out evaluation: greedy, with the training engine, from random numbers and keys that training never uses."""

import math
from dataclasses import replace

from rollout import RolloutEngine, SamplingParams
from rollout.forward import EVAL
from trainer.data.rows import Row
from trainer.data.tasks import RewardFunction
from trainer.rewards.rewards import score


def evaluate(
    engine: RolloutEngine,
    rows: list[Row],
    reward: RewardFunction,
    sampling: SamplingParams,
    max_new_tokens: int,
    step: int,
) -> dict[str, float]:
    """Mean reward of one greedy completion per row, and pass@1: the share with a reward of 1 or more.

    A row whose prompt the engine cannot take counts as failed.
    """
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=max_new_tokens)
    groups = engine.generate_rollouts(
        [row.engine_prompt for row in rows], 1, greedy, step=step, purpose=EVAL, on_error="return"
    )
    good = [(row, group) for row, group in zip(rows, groups, strict=True) if group.error is None]
    rewards = [group[0] for group in score(reward, [row for row, _ in good], [group for _, group in good])]
    return {
        "eval/reward": math.fsum(rewards) / len(rows),
        "eval/pass@1": sum(value >= 1.0 for value in rewards) / len(rows),
        "eval/num_errors": float(len(rows) - len(good)),
    }
