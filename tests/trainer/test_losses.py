"""The policy loss and advantages against hand-worked numbers and an fp64 formula."""

import math

import pytest
import torch

from trainer.advantages import group_advantages
from trainer.losses import policy_loss


def _loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, n: int, **kw: object
):
    return policy_loss(logprobs, old, advantages, mask, n, **({"clip_low": 0.2, "clip_high": 0.2} | kw))  # type: ignore[arg-type]


def test_first_step_is_minus_the_mean_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    out = _loss(logprobs, logprobs.detach(), advantages, torch.ones(3, dtype=torch.bool), 3)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 / 3)
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
    assert torch.allclose(out.kl.double(), (-x).exp() - 1 + x, atol=1e-6)
    assert torch.allclose(logprobs.grad.double(), 0.1 * (1 - (-x).exp()) / 2, atol=1e-7)


def test_masked_tokens_count_for_nothing_even_at_infinite_ratios() -> None:
    logprobs = torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, -1e30, -torch.inf])
    out = _loss(logprobs, old, torch.ones(3), torch.tensor([True, False, False]), 1)
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert torch.equal(logprobs.grad, torch.tensor([-1.0, 0.0, 0.0]))


def test_everything_masked_is_zero() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    out = _loss(logprobs, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), 0)
    out.loss.backward()
    assert out.loss.item() == 0.0
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


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [10.0, 10.0, 11.0]])
    # mean 1/3, deviation with n - 1: sqrt(1/3)
    deviation = math.sqrt(1 / 3) + 1e-4
    expected = torch.tensor([[-1 / 3, -1 / 3, 2 / 3]] * 2)
    assert torch.allclose(group_advantages(rewards), expected / deviation, atol=1e-5)
    assert torch.allclose(group_advantages(rewards, "none"), expected, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_teach_nothing(value: float) -> None:
    """The fp32 mean of seven equal numbers may be another number; the advantage is exactly 0 all the same."""
    assert torch.equal(group_advantages(torch.full((2, 7), value)), torch.zeros(2, 7))
