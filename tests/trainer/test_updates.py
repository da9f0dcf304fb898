"""What a step learns from: epochs and minibatches, groups that are replaced, tokens that are left out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from rollout import Rollout, RolloutConfig, RolloutEngine, RolloutGroup
from rollout.forward import TokenScores
from rollout.types import FinishReason
from runs import hf_overrides, metrics_of, run_once, weights_of, write_rows
from trainer.algorithm.advantages import (
    batch_advantages,
    equal_groups,
    group_advantages,
    leave_one_out_advantages,
    plain_rewards,
    whiten,
)
from trainer.algorithm.batch import StepTokens, StepTotals, TrainingBatch
from trainer.algorithm.compose import make_loss
from trainer.algorithm.credit import token_advantages
from trainer.algorithm.losses import PolicyLoss
from trainer.config import ClippedConfig, OptimConfig, SamplingConfig, TrainerConfig
from trainer.data.rows import Row, RowStream
from trainer.rewards.functions import weighted
from trainer.rewards.scorer import Scorer
from trainer.step import Trainer
from trainer.weights.optimizer import MasterAdamW

Seen = list[tuple[TokenScores, TrainingBatch, StepTotals, PolicyLoss]]


def first_token(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def make(
    *, reward: Callable[..., list[Any]] = first_token, num_rows: int = 6, sampling: Any = None, **algorithm: Any
) -> tuple[Trainer, Seen]:
    """A trainer of 4 prompts and 3 completions a step, and what its loss has seen."""
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    engine = RolloutEngine(model, tiny_models.byte_tokenizer(), RolloutConfig(num_blocks=64))
    chosen = {"prompts_per_step": 4, "group_size": 3, "micro_batch_tokens": 20} | algorithm
    config = TrainerConfig(
        algorithm=ClippedConfig(**chosen),
        sampling=SamplingConfig(max_new_tokens=5, ignore_eos=True) if sampling is None else sampling,
        optim=OptimConfig(lr=1e-2),
    )
    seen: Seen = []
    loss = make_loss(config.algorithm)

    def watched(scores: TokenScores, batch: TrainingBatch, totals: StepTotals) -> PolicyLoss:
        out = loss(scores, batch, totals)
        seen.append((scores, batch, totals, out))
        return out

    rows = RowStream([Row("abc"[: 1 + i % 3] + str(i), i) for i in range(num_rows)], seed=0)
    optimizer = MasterAdamW(model.named_parameters(), config.optim)
    return Trainer(config, engine, optimizer, rows, Scorer([weighted(reward)]), loss=watched), seen


# -- epochs and minibatches ---------------------------------------------------------------------------------------


def test_every_epoch_learns_from_every_token_once_beside_the_log_probs_that_drew_it() -> None:
    trainer, seen = make(epochs=3, minibatches=2)
    result = trainer.step(0)
    drawn = [v for group in result.groups for r in group.rollouts for v in r.logprobs]
    tokens = [b.tokens for _, b, _, _ in seen]
    updates = [totals.num_rollouts for _, _, totals, _ in seen]
    assert sorted(torch.cat([t for t in tokens if t is not None]).tolist()) == sorted(3 * list(range(len(drawn))))
    assert set(updates) == {6}
    for _, batch, _, _ in seen:
        assert batch.tokens is not None
        assert torch.equal(batch.old_logprobs, torch.tensor(drawn)[batch.tokens])
    trainer.optimizer.close()


def test_ratios_are_exactly_one_before_the_first_update_and_not_after_it() -> None:
    trainer, seen = make(epochs=2)
    result = trainer.step(0)
    half = len(seen) // 2
    assert all(torch.equal(out.ratio, torch.ones_like(out.ratio)) for _, _, _, out in seen[:half])
    assert all(bool((out.ratio != 1.0).any()) for _, _, _, out in seen[half:])
    assert result.metrics["logprob_gap_max"] == 0.0
    assert result.metrics["sampling/importance_sampling_ratio/max"] > 1.0
    trainer.optimizer.close()


def test_minibatches_are_dealt_out_anew_every_epoch_and_the_same_in_every_run() -> None:
    def deal(i: int) -> list[list[int]]:
        trainer, _ = make(epochs=3, minibatches=2)
        trainer.optimizer.close()
        return [groups or [] for groups in trainer._minibatches(4, i)]

    dealt = deal(0)
    assert [sorted(a + b) for a, b in zip(dealt[::2], dealt[1::2], strict=True)] == [[0, 1, 2, 3]] * 3
    assert dealt == deal(0)
    assert len({str(deal(i)) for i in range(4)}) > 1


def test_where_log_probs_differ_the_trainers_own_are_measured_before_the_first_update() -> None:
    trainer, seen = make(epochs=2)
    trainer.engine.fall_back("for this test")
    collected = trainer.collector.collect(0)
    wrong = [
        replace(g, rollouts=[replace(r, logprobs=[v - 1.0 for v in r.logprobs]) for r in g.rollouts])
        for g in collected.groups
    ]
    right = [v for group in collected.groups for r in group.rollouts for v in r.logprobs]
    trainer.update(trainer.prepare(replace(collected, groups=wrong)), 0)
    for _, batch, _, _ in seen:
        assert batch.tokens is not None
        assert torch.equal(batch.old_logprobs, torch.tensor(right)[batch.tokens])
    trainer.optimizer.close()


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    trainer, _ = make(epochs=3)
    loss, calls = trainer.loss, iter([1.0, math.nan])

    def sometimes_nan(scores: TokenScores, batch: TrainingBatch, totals: StepTotals) -> PolicyLoss:
        out = loss(scores, batch, totals)
        return replace(out, loss=out.loss * next(calls, 1.0))

    trainer.loss = sometimes_nan
    result = trainer.step(0)
    assert result.metrics["skipped_updates"] == 1.0
    assert math.isfinite(result.metrics["grad_norm"])
    assert all(bool(p.isfinite().all()) for p in trainer.engine.module.parameters())
    trainer.optimizer.close()


# -- what is left out ---------------------------------------------------------------------------------------------


def odd_keys_differ(answer: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal rewards for rows whose answer is even."""
    return [float(ids[0]) if want % 2 else 0.5 for want, ids in zip(answer, completion_ids, strict=True)]


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts() -> None:
    trainer, _ = make(reward=odd_keys_differ, num_rows=20, dynamic_sampling=True)
    stream = trainer.collector.rows.take(0, 40)
    result = trainer.step(0)
    odd = [row for row in stream if row.answer % 2]
    assert [row.answer for row in result.rows] == [row.answer for row in odd[:4]]
    assert not equal_groups(result.scores.totals, result.scores.scored).any()
    taken = 4 + trainer.collector.num_refilled
    assert result.metrics["dropped_groups"] == taken - 4
    again = trainer.step(1)  # goes on behind the last prompt that was taken
    assert [row.answer for row in again.rows] == [row.answer for row in stream[taken:] if row.answer % 2][:4]
    trainer.optimizer.close()


def test_refills_are_bounded_and_a_step_without_anything_to_learn_moves_nothing() -> None:
    trainer, seen = make(reward=lambda completions: [1.0] * len(completions), dynamic_sampling=True, max_refills=3)
    before = [p.detach().clone() for p in trainer.engine.module.parameters()]
    result = trainer.step(0)
    assert (result.metrics["refills"], result.metrics["dropped_groups"], len(result.groups)) == (3.0, 16.0, 0)
    assert result.metrics["reward"] == 1.0
    assert not seen
    assert all(map(torch.equal, before, trainer.engine.module.parameters()))
    trainer.optimizer.close()


def test_a_rollout_that_nothing_scored_is_in_no_mean_and_in_no_loss() -> None:
    """The first of each group; TRL's convention is None."""
    trainer, _ = make(
        reward=lambda completion_ids: [None if i % 3 == 0 else float(ids[0]) for i, ids in enumerate(completion_ids)]
    )
    collected = trainer.collector.collect(0)
    assert (~collected.scores.scored).sum() == 4
    tokens = trainer.prepare(collected)
    assert torch.equal(tokens.loss_mask, tokens.spread(collected.scores.scored))
    expected = group_advantages(collected.scores.totals[:, 1:], torch.ones(4, 2, dtype=torch.bool))
    spread = tokens.advantages.split(tokens.lengths.tolist())
    assert [float(part[0]) for part in spread] == pytest.approx([v for a, b in expected.tolist() for v in (0.0, a, b)])
    trainer.optimizer.close()


@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_what_the_length_limit_cut_is_masked_and_its_reward_counts(truncated: str) -> None:
    trainer, seen = make(sampling=SamplingConfig(max_new_tokens=3), truncated=truncated)
    model_ends = trainer.collector.collect(0)
    rollouts = [r for g in model_ends.groups for r in g.rollouts]
    # let every third rollout look as if it had ended by itself
    reasons: list[FinishReason] = ["stop" if i % 3 == 0 else "length" for i in range(len(rollouts))]
    groups = [
        replace(g, rollouts=[replace(r, finish_reason=reasons[3 * k + r.index]) for r in g.rollouts])
        for k, g in enumerate(model_ends.groups)
    ]
    tokens = trainer.prepare(replace(model_ends, groups=groups))
    kept = torch.tensor([reason == "stop" or truncated == "keep" for reason in reasons])
    assert torch.equal(tokens.loss_mask, kept.repeat_interleave(tokens.lengths))
    expected = group_advantages(model_ends.scores.totals, model_ends.scores.scored)
    assert torch.equal(tokens.advantages, tokens.spread(expected))
    assert not seen
    trainer.optimizer.close()


def test_tokens_of_the_highest_entropy_teach() -> None:
    trainer, _ = make(top_entropy=0.25)
    collected = trainer.collector.collect(0)
    tokens = trainer.prepare(collected)
    entropies = []
    for group in collected.groups:
        for rollout in group.rollouts:
            logits = tiny_models.eager_logits(trainer.engine.module, group.prompt_ids + rollout.completion_ids)
            logp = logits[len(group.prompt_ids) - 1 : -1].double().log_softmax(-1)
            entropies += (-(logp.exp() * logp).sum(-1)).tolist()
    highest = sorted(range(len(entropies)), key=lambda t: -entropies[t])[: round(0.25 * len(entropies))]
    assert tokens.teaches is not None
    assert tokens.teaches.nonzero().flatten().tolist() == sorted(highest)
    trainer.optimizer.close()


# -- advantages ---------------------------------------------------------------------------------------------------

ALL = torch.ones(2, 3, dtype=torch.bool)
REWARDS = torch.tensor([[0.0, 0.0, 1.0], [10.0, 10.0, 11.0]], dtype=torch.float64)


def test_advantages_of_each_baseline_by_hand() -> None:
    out = leave_one_out_advantages(REWARDS, ALL)
    assert torch.allclose(out, torch.tensor([[-0.5, -0.5, 1.0]] * 2))
    mean = 32 / 6
    assert torch.allclose(batch_advantages(REWARDS, ALL), (REWARDS - mean).float())
    assert torch.equal(plain_rewards(REWARDS, ALL), REWARDS.float())
    scaled = group_advantages(REWARDS, ALL, scale="batch")
    deviation = float(REWARDS.flatten().numpy().std(ddof=1)) + 1e-4
    assert torch.allclose(scaled.double(), torch.tensor([[-1 / 3, -1 / 3, 2 / 3]] * 2).double() / deviation)


@pytest.mark.parametrize("baseline", [group_advantages, leave_one_out_advantages, batch_advantages, plain_rewards])
def test_a_rollout_without_a_reward_is_in_no_mean(baseline: Callable[..., Tensor]) -> None:
    scored = torch.tensor([[True, True, False], [True, True, True]])
    rewards = torch.tensor([[0.0, 1.0, math.nan], [2.0, 3.0, 4.0]], dtype=torch.float64)
    out = baseline(rewards, scored, scale="none")
    expected = {
        group_advantages: [-0.5, 0.5, 0.0],
        leave_one_out_advantages: [-1.0, 1.0, 0.0],
        batch_advantages: [-2.0, -1.0, 0.0],
        plain_rewards: [0.0, 1.0, 0.0],
    }
    assert out[0].tolist() == expected[baseline]
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_lone_reward_is_worth_nothing_beside_its_group(scale: str) -> None:
    scored = torch.tensor([[True, False, False], [False, False, False]])
    for baseline in (group_advantages, leave_one_out_advantages):
        assert torch.equal(baseline(REWARDS, scored, scale=scale), torch.zeros(2, 3))


def test_whitening_is_over_the_tokens_that_count() -> None:
    values, mask = torch.tensor([1.0, 2.0, 4.0, 100.0]), torch.tensor([True, True, True, False])
    deviation = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    expected = [(v - 7 / 3) / (deviation + 1e-8) for v in (1, 2, 4)] + [0.0]
    assert whiten(values, mask).tolist() == pytest.approx(expected)
    assert whiten(torch.full((4,), 0.1), mask).tolist() == [0.0] * 4


def step_of(lengths: list[int], log_ratios: list[float]) -> StepTokens:
    """Rollouts whose tokens have these log-ratios to the reference."""
    parts = torch.tensor(log_ratios).split(lengths)
    rollouts = [Rollout(i, [1] * len(p), p.tolist(), p.tolist(), None, "stop", 0) for i, p in enumerate(parts)]
    step = StepTokens.of([RolloutGroup([1], rollouts, 0, 0)], exact=True)
    return replace(step, ref_logprobs=torch.zeros(sum(lengths)))


def test_a_penalty_in_the_reward_is_summed_before_the_baseline() -> None:
    step = step_of([2, 1], [0.5, 1.5, -1.0])
    rewards, scored = torch.tensor([[3.0, 1.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    out = token_advantages(step, rewards, scored, leave_one_out_advantages, penalty=lambda x: 0.5 * x)
    # 3 - 0.5 * 2 = 2 and 1 + 0.5 = 1.5
    assert out.tolist() == pytest.approx([0.5, 0.5, -0.5])


def test_a_penalty_in_the_return_is_what_a_token_and_those_behind_it_cost() -> None:
    step = step_of([3, 2], [1.0, 2.0, 4.0, -1.0, 3.0])
    rewards, scored = torch.tensor([[10.0, 20.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    out = token_advantages(step, rewards, scored, plain_rewards, penalty=lambda x: x, penalise="return")
    assert out.tolist() == pytest.approx([10 - 7, 10 - 6, 10 - 4, 20 - 2, 20 - 3])


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=dapo", "algorithm.max_refills=2"],
        ["algorithm=gspo", "algorithm.epochs=2", "algorithm.minibatches=2"],
        ["algorithm=rloo", "algorithm.kl_coef=0.05", "algorithm.correction=token_truncate", "rollout.exact=off"],
        pytest.param(
            ["algorithm=reinforce_pp", "algorithm.kl_coef=0.1", "algorithm.top_entropy=0.5"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["algorithm=cispo", "algorithm.entropy_coef=0.01", "algorithm.truncated=mask"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path, overrides: list[str]) -> None:
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS)
    given = [*hf_overrides(tmp_path, model, write_rows(tmp_path / "rows.jsonl")), *overrides, "eval.every=0"]
    whole = run_once(tmp_path / "whole", *given, "steps=4")
    run_once(tmp_path / "half", *given, "steps=2", "checkpoint.every=2")
    rest = run_once(tmp_path / "half", *given, "steps=4", "resume=auto", "checkpoint.every=2")
    assert all(map(torch.equal, weights_of(whole), weights_of(rest)))
    assert metrics_of(whole) == metrics_of(rest)
