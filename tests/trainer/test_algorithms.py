"""Every algorithm's loss and gradient against its formula, written out in fp64, rollout by rollout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import Rollout, RolloutGroup
from rollout.forward import TokenScores
from rollout.model import LayerGroup
from rollout_kernels.shapes import ROW_MULTIPLE
from trainer.algorithm.aggregation import AGGREGATIONS
from trainer.algorithm.batch import StepTokens, StepTotals, TrainingBatch, micro_batches
from trainer.algorithm.compose import make_loss
from trainer.algorithm.losses import PolicyLoss, policy_loss
from trainer.algorithm.objectives import clipped
from trainer.config.algorithm_options import ALGORITHMS, AlgorithmConfig, ClippedConfig

LAYER, CPU = LayerGroup(1, 1, 1, 16, torch.float32), torch.device("cpu")
MAX_LENGTH = 9


@dataclass
class Case:
    """Groups of equal size; per rollout lists of equal length."""

    logprobs: list[list[float]]
    old: list[list[float]]
    drawn: list[list[float]]
    reference: list[list[float]]
    advantages: list[float]
    mask: list[list[bool]]
    n: int = 2

    def step(self) -> StepTokens:
        rollouts = [
            Rollout(i, [1] * len(drawn), drawn, drawn, None, "stop", 0, mask)
            for i, (drawn, mask) in enumerate(zip(self.drawn, self.mask, strict=True))
        ]
        groups = [RolloutGroup([1], rollouts[i : i + self.n], 0, 0) for i in range(0, len(rollouts), self.n)]
        step = StepTokens.of(groups, exact=False)
        flat = [torch.tensor([v for values in lists for v in values]) for lists in (self.old, self.reference)]
        spread = step.spread(torch.tensor(self.advantages))
        return replace(step, advantages=spread, old_logprobs=flat[0], ref_logprobs=flat[1])


def random_case(lengths: list[int], *, n: int = 2, spread: float = 0.4, masked: float = 0.2, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)

    def near(values: list[list[float]]) -> list[list[float]]:
        return [(torch.tensor(v) + spread * torch.randn(len(v), generator=g)).tolist() for v in values]

    logprobs = [(-2.0 * torch.rand(length, generator=g)).tolist() for length in lengths]
    mask = [(torch.rand(length, generator=g) >= masked).tolist() for length in lengths]
    advantages = torch.randn(len(lengths), generator=g).tolist()
    old = near(logprobs)
    return Case(logprobs, old, near(old), near(logprobs), advantages, mask, n)


CASES = {
    "usual": random_case([3, 5, 1, 9, 4, 4]),
    "one token": random_case([1, 1], masked=0.0),
    "all masked": random_case([3, 2], masked=1.1),
    "a rollout masked": replace(
        random_case([3, 2, 4, 4], masked=0.0), mask=[[False] * 3, [True] * 2, *[[True] * 4] * 2]
    ),
    "group of one": random_case([2, 6, 3], n=1),
    "equal rewards": replace(random_case([4, 4, 2, 2]), advantages=[0.0] * 4),
    "far ratios": random_case([3, 5, 6, 2], spread=8.0, seed=3),
}


# -- the formulas -------------------------------------------------------------------------------------------------


def token_value(kind: str, config: Any, r: Tensor, logp: Tensor, advantage: float) -> Tensor:
    value: Tensor
    if kind == "reinforce":
        return advantage * logp
    if kind == "cispo":
        value = min(r.item(), config.ratio_cap) * advantage * logp
        return value
    if kind == "sapo":
        tau = config.tau_positive if advantage > 0 else config.tau_negative
        value = 4.0 / tau / (1.0 + torch.exp(-tau * (r - 1.0))) * advantage
        return value
    inside = min(max(r.item(), 1.0 - config.clip_low), 1.0 + config.clip_high)
    value = r * advantage
    if inside * advantage < r.item() * advantage:
        value = 0.0 * r + inside * advantage
    if config.dual_clip is not None and advantage < 0 and value.item() < config.dual_clip * advantage:
        value = 0.0 * r + config.dual_clip * advantage
    return value


def ratio(kind: str, logps: list[Tensor], olds: list[float], t: int) -> Tensor:
    logs = [logp - old for logp, old in zip(logps, olds, strict=True)]
    mean = sum(logs, torch.zeros((), dtype=torch.float64)) / max(len(logs), 1)
    if kind == "sequence":
        return mean.exp()
    if kind == "sequence_token":
        return mean.exp().detach() * (logps[t] - logps[t].detach()).exp()
    return logs[t].exp()


def weight(config: AlgorithmConfig, olds: list[float], drawn: list[float], t: int) -> float:
    logs = [a - b for a, b in zip(olds, drawn, strict=True)]
    rho = math.exp(sum(logs) if config.correction.startswith("sequence") else logs[t])
    if config.correction.endswith("truncate"):
        return min(rho, config.correction_high)
    if config.correction.endswith("mask"):
        return rho if config.correction_low <= rho <= config.correction_high else 0.0
    return 1.0


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x * x,
    "k3": lambda x: torch.exp(-x) - 1 + x,
}


def formula(config: Any, case: Case) -> tuple[float, list[list[float]]]:
    """Loss and its gradient with respect to every token's log-prob, in fp64."""
    leaves = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values] for values in case.logprobs]
    sums: list[tuple[Tensor, int]] = []
    for i, mask in enumerate(case.mask):
        kept = [t for t, counts in enumerate(mask) if counts]
        logps = [leaves[i][t] for t in kept]
        olds, drawn, refs = ([values[i][t] for t in kept] for values in (case.old, case.drawn, case.reference))
        total = torch.zeros((), dtype=torch.float64)
        for t in range(len(kept)):
            r = ratio(getattr(config, "ratio", "token"), logps, olds, t)
            value = token_value(config.kind, config, r, logps[t], case.advantages[i])
            total = total - weight(config, olds, drawn, t) * value
            if config.kl_in == "loss":
                total = total + config.kl_coef * KL[config.kl_estimator](logps[t] - refs[t])
        if kept:
            sums.append((total, len(kept)))
    tokens, rollouts = sum(count for _, count in sums), len(sums)
    denominators: dict[str, Callable[[int], int]] = {
        "token_mean": lambda count: tokens,
        "sequence_mean": lambda count: count * rollouts,
        "sequence_sum": lambda count: rollouts,
        "constant_length": lambda count: rollouts * MAX_LENGTH,
    }
    loss = sum((s / denominators[config.aggregation](n) for s, n in sums), torch.zeros((), dtype=torch.float64))
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return loss.item(), [[0.0 if v.grad is None else float(v.grad) for v in values] for values in leaves]


def ours(config: AlgorithmConfig, case: Case, max_tokens: int = 10_000) -> tuple[float, list[float]]:
    step = case.step()
    totals = StepTotals.of(step, max_length=MAX_LENGTH)
    logprobs = torch.tensor([v for values in case.logprobs for v in values], requires_grad=True)
    loss, total = make_loss(config), 0.0
    for batch in micro_batches(step, LAYER, CPU, max_tokens=max_tokens, row_multiple=ROW_MULTIPLE):
        part = loss(TokenScores(logprobs[batch.tokens], torch.zeros(len(batch.loss_mask))), batch, totals).loss
        torch.autograd.backward(part)
        total += part.item()
    assert logprobs.grad is not None
    return total, logprobs.grad.tolist()


def check(config: AlgorithmConfig, case: Case, max_tokens: int = 10_000) -> None:
    loss, gradient = formula(config, case)
    our_loss, our_gradient = ours(config, case, max_tokens)
    scale = max(1.0, abs(loss))
    assert our_loss == pytest.approx(loss, rel=2e-5, abs=2e-6 * scale)
    flat = [v for values in gradient for v in values]
    assert our_gradient == pytest.approx(flat, rel=2e-4, abs=2e-6 * max(map(abs, flat)))


SHIPPED: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence_mean"},
    "dr_grpo": {"scale_rewards": "none", "aggregation": "constant_length"},
    "dapo": {"clip_high": 0.28},
    "rloo": {"aggregation": "sequence_sum", "kl_in": "reward"},
    "reinforce": {"aggregation": "sequence_sum"},
    "reinforce_pp": {"kl_in": "return"},
    "reinforce_pp_baseline": {"kl_coef": 0.05, "kl_estimator": "k2"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "gspo_token": {"ratio": "sequence_token", "clip_low": 0.1, "clip_high": 0.1, "aggregation": "sequence_mean"},
    "cispo": {"ratio_cap": 1.5},
    "sapo": {"aggregation": "sequence_mean"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", SHIPPED)
def test_loss_and_gradient_are_those_of_the_formula(name: str, case: Case) -> None:
    check(ALGORITHMS[name](kind=name, **SHIPPED[name]), case)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("max_tokens", [1, 7, 13, 10_000])
def test_the_split_changes_neither_loss_nor_gradient(aggregation: str, max_tokens: int) -> None:
    check(ALGORITHMS["grpo"](aggregation=aggregation, kl_coef=0.1), CASES["usual"], max_tokens)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_order_of_groups_changes_neither_loss_nor_gradient(name: str) -> None:
    case, order = CASES["usual"], [4, 5, 2, 3, 0, 1]
    lists = (case.logprobs, case.old, case.drawn, case.reference, case.advantages, case.mask)
    moved = Case(*([values[i] for i in order] for values in lists))  # type: ignore[arg-type]
    config = ALGORITHMS[name](kind=name, **SHIPPED[name])
    (loss, gradient), (other, permuted) = ours(config, case), ours(config, moved)
    lengths = [len(values) for values in case.logprobs]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    back = [v for i in order for v in gradient[starts[i] : starts[i] + lengths[i]]]
    assert other == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert permuted == pytest.approx(back, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("case", ["usual", "far ratios"])
def test_corrections_weigh_by_the_policy_that_drew(correction: str, case: str) -> None:
    check(ClippedConfig(correction=correction, correction_low=0.6, correction_high=1.4), CASES[case])


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_rollouts_of_the_very_policy_need_no_correction(correction: str) -> None:
    case = replace(CASES["usual"], drawn=CASES["usual"].old)
    assert ours(ALGORITHMS["grpo"](correction=correction), case) == ours(ALGORITHMS["grpo"](), case)


@pytest.mark.parametrize("dual", [1.2, 3.0])
def test_dual_clip_bounds_what_a_bad_token_may_cost(dual: float) -> None:
    check(ClippedConfig(dual_clip=dual), CASES["far ratios"])
    case = Case([[3.0]], [[0.0]], [[0.0]], [[0.0]], [-1.0], [[True]], n=1)
    loss, gradient = ours(ClippedConfig(dual_clip=dual), case)
    assert loss == pytest.approx(dual)
    assert gradient == [0.0]


@pytest.mark.parametrize("estimator", KL)
def test_a_divergence_in_the_loss_is_that_estimators(estimator: str) -> None:
    check(ALGORITHMS["grpo"](kl_coef=0.3, kl_estimator=estimator), CASES["usual"])


def test_extreme_ratios_give_no_nan() -> None:
    """exp() of them overflows: what is clipped stays finite, and masked tokens take no part."""
    case = Case([[0.0, 0.0]], [[-1e4, -1e30]], [[0.0, 0.0]], [[0.0, 0.0]], [1.0], [[True, False]], n=1)
    loss, gradient = ours(ALGORITHMS["grpo"](), case)
    assert loss == pytest.approx(-1.2)
    assert gradient == [0.0, 0.0]


def test_the_entropy_bonus_has_its_own_gradient() -> None:
    step = CASES["usual"].step()
    (batch,) = micro_batches(step, LAYER, CPU, max_tokens=10_000, row_multiple=ROW_MULTIPLE)
    logprobs = torch.tensor([v for values in CASES["usual"].logprobs for v in values])
    entropy = torch.rand(len(logprobs)).requires_grad_()
    loss = make_loss(ALGORITHMS["dapo"](entropy_coef=0.25))
    loss(TokenScores(logprobs, entropy), batch, StepTotals.of(step)).loss.backward()
    expected = torch.where(batch.loss_mask, -0.25 / int(batch.loss_mask.sum()), 0.0)
    assert entropy.grad is not None
    assert torch.allclose(entropy.grad, expected)


def test_tokens_that_do_not_teach_count_in_the_denominator() -> None:
    """arXiv 2506.01939: the objective is that of the tokens of high entropy, the mean that of all."""
    case = replace(CASES["usual"], advantages=[1.0] * 6)
    teaches = torch.arange(26) % 3 == 0
    step = replace(case.step(), teaches=teaches)
    logprobs = torch.tensor([v for values in case.old for v in values], requires_grad=True)
    (batch,) = micro_batches(step, LAYER, CPU, max_tokens=10_000, row_multiple=ROW_MULTIPLE)
    make_loss(ALGORITHMS["dapo"]())(
        TokenScores(logprobs, logprobs.detach()), batch, StepTotals.of(step)
    ).loss.backward()
    counted = batch.loss_mask & teaches
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.where(counted, -1.0 / int(batch.loss_mask.sum()), 0.0))


def test_a_loss_of_ones_own_is_made_of_the_parts() -> None:
    def squared(scores: TokenScores, batch: TrainingBatch, totals: StepTotals) -> PolicyLoss:
        """Clipped, with the square of the log-ratio to the old policy as a penalty of its own."""
        base: Callable[..., PolicyLoss] = partial(policy_loss, objective=partial(clipped, low=0.2, high=0.2))
        loss = base(scores, batch, totals)
        penalty = (scores.logprobs - batch.old_logprobs).square()
        return replace(loss, loss=loss.loss + 0.1 * AGGREGATIONS["token_mean"](penalty, batch, totals))

    step, case = CASES["usual"].step(), CASES["usual"]
    (batch,) = micro_batches(step, LAYER, CPU, max_tokens=10_000, row_multiple=ROW_MULTIPLE)
    logprobs = torch.tensor([v for values in case.logprobs for v in values])
    out = squared(TokenScores(logprobs, logprobs), batch, StepTotals.of(step))
    pairs = [
        (a - b) ** 2
        for row in zip(case.logprobs, case.old, case.mask, strict=True)
        for a, b, counts in zip(*row, strict=True)
        if counts
    ]
    expected = formula(ALGORITHMS["dapo"](), case)[0] + 0.1 * math.fsum(pairs) / len(pairs)
    assert out.loss.item() == pytest.approx(expected, rel=1e-5)
