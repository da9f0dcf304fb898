"""The policy loss and advantages against hand-worked numbers and an fp64 formula."""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import partial

import pytest
import torch

from rollout import Rollout, RolloutGroup
from rollout.forward import TokenScores
from rollout.forward.packing import build_pack
from rollout.model.kv_cache import LayerGroup
from rollout_kernels.shapes import ROW_MULTIPLE
from trainer.algorithm.advantages import group_advantages
from trainer.algorithm.batch import StepTotals, TrainingBatch
from trainer.algorithm.losses import PolicyLoss, policy_loss
from trainer.algorithm.objectives import clipped
from trainer.tracking.metrics import completion_metrics

CPU = torch.device("cpu")


def _batch(
    old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int] = (), **fields: torch.Tensor
) -> TrainingBatch:
    """Of one pack; lengths: how many tokens each rollout has; one rollout if left out."""
    lengths = lengths or [len(old)]
    layer, completions = LayerGroup(1, 1, 1, 16, torch.float32), [[1] * length for length in lengths]
    pack = build_pack([([1], completions)], layer, CPU, row_multiple=ROW_MULTIPLE)
    rollout_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return TrainingBatch(pack, rollout_ids, old, old, advantages, mask, **fields)


def _loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    n: int,
    kl_coef: float = 0.0,
    **fields: torch.Tensor,
) -> PolicyLoss:
    batch = _batch(old, advantages, mask, (), **fields)
    scores = TokenScores(logprobs, torch.zeros_like(logprobs))
    objective = partial(clipped, low=0.2, high=0.2)
    return policy_loss(scores, batch, StepTotals(n, 1), objective=objective, kl_coef=kl_coef)


def test_first_step_is_minus_the_mean_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    out = _loss(logprobs, logprobs.detach(), advantages, torch.ones(3, dtype=torch.bool), 3)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 / 3)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages / 3)  # at ratio 1 the gradient is that of -A * logprob


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "moves"),
    [
        (0.5, 1.0, -1.2, False),  # too likely already: clipped
        (0.5, -1.0, math.exp(0.5), True),  # too likely and bad: not clipped
        (-0.5, -1.0, 0.8, False),  # too unlikely already: clipped
        (-0.5, 1.0, -math.exp(-0.5), True),  # unlikely and good: not clipped
    ],
)
def test_clipping_is_one_sided(log_ratio: float, advantage: float, expected: float, moves: bool) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    out = _loss(logprobs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool), 1)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected)
    assert bool(logprobs.grad != 0) is moves
    assert bool(out.clipped_low | out.clipped_high) is not moves


def test_kl_is_k3_and_its_gradient_that_of_the_formula() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    reference = torch.tensor([-2.0, -2.5])
    mask = torch.ones(2, dtype=torch.bool)
    out = _loss(logprobs, logprobs.detach(), torch.zeros(2), mask, 2, ref_logprobs=reference, kl_coef=0.1)
    out.loss.backward()
    x = torch.tensor([1.0, -0.5], dtype=torch.float64)
    assert out.kl is not None
    assert torch.allclose(out.kl.double(), (-x).exp() - 1 + x, atol=1e-6)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad.double(), 0.1 * (1 - (-x).exp()) / 2, atol=1e-7)


def test_masked_tokens_count_for_nothing_even_at_infinite_ratios() -> None:
    logprobs = torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, -1e30, -torch.inf])
    out = _loss(logprobs, old, torch.ones(3), torch.tensor([True, False, False]), 1)
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.tensor([-1.0, 0.0, 0.0]))


def test_everything_masked_is_zero() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    out = _loss(logprobs, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), 0)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_long_and_short_completions_weigh_by_their_tokens() -> None:
    """Lengths 1, 1, 8, 8 with losses 1, 1, 3, 3 per token: the token mean is 2.78, the mean of means would be 2."""
    values = torch.tensor([1.0] * 2 + [3.0] * 16)
    parts = [slice(0, 1), slice(1, 10), slice(10, 18)]
    losses = [
        _loss(torch.zeros(18)[s], torch.zeros(18)[s], -values[s], torch.ones(18, dtype=torch.bool)[s], 18)
        for s in parts
    ]
    assert sum(part.loss.item() for part in losses) == pytest.approx(50 / 18)


def advantages_of(rewards: torch.Tensor, scale: str = "group") -> torch.Tensor:
    return group_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool), scale=scale)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [10.0, 10.0, 11.0]])
    # mean 1/3, deviation with n - 1: sqrt(1/3)
    deviation = math.sqrt(1 / 3) + 1e-4
    expected = torch.tensor([[-1 / 3, -1 / 3, 2 / 3]] * 2)
    assert torch.allclose(advantages_of(rewards), expected / deviation, atol=1e-5)
    assert torch.allclose(advantages_of(rewards, "none"), expected, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_teach_nothing(value: float) -> None:
    """The fp32 mean of seven equal numbers may be another number; the advantage is exactly 0 all the same."""
    assert torch.equal(advantages_of(torch.full((2, 7), value)), torch.zeros(2, 7))


GROUPS = {
    "large offset": [1e15, 1e15 + 0.125, 1e15 + 0.5, 1e15 + 0.125],
    "offset whose mean is no double": [2.0**53, 2.0**53 + 2, 2.0**53, 2.0**53],
    "below fp32": [1.0, 1.0 + 1e-12, 1.0 - 1e-12, 1.0],
    "neighbouring doubles": [0.1, math.nextafter(0.1, 1), 0.1, 0.1],
    "cancelling": [1e16, 1.0, -1e16, 1.0],
    "large": [1e30, -1e30, 1e30, 0.0],
    "tiny": [5e-324, 0.0, 0.0, 1e-310],
    "plain": [0.1, 0.7, 0.3, 0.2],
}


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_advantages_are_the_exact_statistics_of_the_given_doubles(group: list[float], scale: str) -> None:
    with localcontext(prec=2000):  # every sum, square and quotient below has fewer digits, or is cut behind them
        values = [Decimal(value) for value in group]
        mean = sum(values, Decimal()) / len(values)
        deviation = (sum(((value - mean) ** 2 for value in values), Decimal()) / (len(values) - 1)).sqrt()
        divisor = deviation + Decimal("1e-4") if scale == "group" else Decimal(1)
        expected = torch.tensor([float((value - mean) / divisor) for value in values], dtype=torch.float64)
    got = advantages_of(torch.tensor([group], dtype=torch.float64), scale)
    assert got.dtype == torch.float32
    # half a unit in the last place of fp32, and none at all where it has no digits
    assert torch.allclose(got.double(), expected, rtol=2**-24 * 1.001, atol=1e-45)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e15 + 0.125, 1e30, 5e-324, -0.7])
@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_equal_doubles_give_exact_zeros(value: float, n: int) -> None:
    for scale in ("group", "none"):
        assert torch.equal(advantages_of(torch.full((2, n), value, dtype=torch.float64), scale), torch.zeros(2, n))


def test_a_common_offset_changes_no_bit_of_an_advantage() -> None:
    rewards = torch.tensor([[0.0, 0.25, 0.5, 1.0]], dtype=torch.float64)
    assert torch.equal(advantages_of(rewards + 2.0**50), advantages_of(rewards))


def test_no_groups_have_no_advantages() -> None:
    assert advantages_of(torch.zeros(0, 4, dtype=torch.float64)).shape == (0, 4)


def test_reward_metrics_keep_small_differences_at_a_large_offset() -> None:
    group = RolloutGroup([1], [Rollout(i, [1], [-1.0], [-1.0], "", "stop", 0) for i in range(4)], 0, 0)
    rewards = torch.tensor([[1e15, 1e15 + 0.25, 1e15 + 0.25, 1e15 + 0.5], [0.1] * 4], dtype=torch.float64)
    metrics = completion_metrics([group, group], rewards, torch.ones_like(rewards, dtype=torch.bool))
    # deviations -1/4, 0, 0, 1/4: their squares' sum 1/8, over 3
    assert metrics["reward_std"] == pytest.approx(math.sqrt(1 / 24) / 2, rel=1e-15)
    assert metrics["frac_reward_zero_std"] == 0.5
