"""Log-probs, kept sets and draws against fp64 formulas and a plain-Python reference."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout_kernels.logprobs import entropy, kept_tokens, sample_inverse_cdf, scaled_logits, token_logprobs
from rollout_kernels.ops import choose
from tiny_models import chi_square_p

CPU = torch.device("cpu")
INF = math.inf
LARGEST_UNIFORM = 1.0 - 2.0**-53

DRAWS = pytest.mark.usefixtures("implementation")


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def log_softmax_fp64(z: Tensor, kept: Tensor | None = None) -> Tensor:
    z = z.double() if kept is None else z.double().masked_fill(~kept, -INF)
    shifted = z - z.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def kept_reference(z: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The kept set by its definition, one token after the other."""
    ranked = sorted(range(len(z)), key=lambda token: (-z[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    weights = [math.exp(z[token] - z[ranked[0]]) for token in ranked]
    total = math.fsum(weights)
    kept: set[int] = set()
    reached = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if reached >= top_p:
            break
        kept.add(token)
        reached += weight / total
    return {token for token in kept if math.exp(z[token] - z[ranked[0]]) >= min_p}


def kept_of(z: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[set[int]]:
    rows = z.shape[0]
    kept = kept_tokens(z, torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p))
    return [set(row.nonzero()[:, 0].tolist()) for row in kept]


# -- log-probs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_temperature_divides_logits_before_they_are_normalised(temperature: float) -> None:
    z = scaled_logits(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([temperature]))
    expected = 2 / temperature - math.log(sum(math.exp(x / temperature) for x in (2.0, 1.0, 0.0)))
    assert token_logprobs(z, torch.tensor([0])).item() == pytest.approx(expected, abs=1e-6)


def test_each_row_has_its_own_temperature() -> None:
    z = scaled_logits(torch.tensor([[1.0, 3.0], [1.0, 3.0]]).bfloat16(), torch.tensor([0.5, 2.0]))
    assert z.dtype == torch.float32
    assert z.tolist() == [[2.0, 6.0], [0.5, 1.5]]


@pytest.mark.parametrize(("vocab", "scale"), [(1, 3.0), (211, 3.0), (211, 30.0), (152_064, 0.01)])
def test_token_logprobs_equal_the_fp64_formula(vocab: int, scale: float) -> None:
    """A flat row of 152,064 is where an fp32 log-softmax is off by 3e-4."""
    z = random_logits(16, vocab, scale=scale)
    tokens = torch.arange(16) * 7919 % vocab
    expected = log_softmax_fp64(z).gather(-1, tokens[:, None])[:, 0]
    assert (token_logprobs(z, tokens) - expected).abs().max() < 4e-6 * max(1.0, scale / 3)


def test_token_logprobs_are_taken_over_the_kept_tokens() -> None:
    z = torch.tensor([[0.0, math.log(2), math.log(3), 5.0]])
    kept = torch.tensor([[True, True, True, False]])
    assert token_logprobs(z, torch.tensor([2]), kept).item() == pytest.approx(math.log(3 / 6), abs=1e-6)


def test_the_sampled_token_always_counts_as_kept() -> None:
    z = torch.zeros(1, 4)
    kept = torch.tensor([[True, True, False, False]])
    assert token_logprobs(z, torch.tensor([3]), kept).item() == pytest.approx(math.log(1 / 3), abs=1e-6)
    assert kept.tolist() == [[True, True, False, False]]


def test_token_logprobs_are_differentiable() -> None:
    """d log p(token) / dz = onehot(token) - p, and 0 for tokens that are not kept."""
    z, kept = random_logits(4, 211).requires_grad_(), random_logits(4, 211, seed=1) > 0
    tokens = kept.int().argmax(-1)
    token_logprobs(z, tokens, kept).sum().backward()
    probs = log_softmax_fp64(z.detach(), kept).exp()
    expected = torch.nn.functional.one_hot(tokens, 211) - probs
    assert z.grad is not None
    assert (z.grad - expected).abs().max() < 1e-6
    assert not z.grad[~kept].any()


@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 211), (2, 211), (9, 211), (16, 211), (17, 211), (2, 33_001), (9, 33_001), (16, 33_001)]
)
def test_bits_do_not_depend_on_the_number_of_rows(threads: int, rows: int, vocab: int) -> None:
    z, tokens = random_logits(211, vocab), torch.arange(211)
    whole, part = token_logprobs(z, tokens), token_logprobs(z[-rows:].clone(), tokens[-rows:])
    assert torch.equal(whole[-rows:], part)


def test_entropy_equals_the_fp64_formula() -> None:
    z, kept = random_logits(17, 211), random_logits(17, 211, seed=1) > 0
    for mask in (None, kept):
        logs = log_softmax_fp64(z, mask)
        expected = -(logs.exp() * logs.clamp_min(-1e9)).sum(-1)
        assert (entropy(z, mask) - expected).abs().max() < 5e-6


def test_entropy_of_known_distributions() -> None:
    z = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, -INF, -INF, -INF]])
    assert entropy(z).tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)


# -- kept sets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.61}, {0, 1, 2}),
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.5}, {0, 1, 2}),
        ({"min_p": 0.6}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.6}, {1}),
    ],
)
def test_kept_sets_worked_by_hand(options: dict[str, float], expected: set[int]) -> None:
    """Probabilities 0.2, 0.4, 0.2, 0.15, 0.05: the two tokens of 0.2 rank by id, and 0.4 / 0.6 reaches 0.6."""
    z = torch.tensor([[0.2, 0.4, 0.2, 0.15, 0.05]], dtype=torch.float64).log().float()
    assert kept_of(z, **options) == [expected]  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 40, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.97, 0.5, 0.03])
@pytest.mark.parametrize("min_p", [0.0, 0.001, 0.1, 0.9])
def test_kept_sets_equal_the_plain_reference(top_k: int, top_p: float, min_p: float) -> None:
    """Logits are rounded to quarters, so that most tokens have equals."""
    z = (random_logits(20, 61, seed=top_k) * 4).round() / 4
    rounded_p = torch.tensor(top_p).item()
    expected = [kept_reference(row, top_k, rounded_p, min_p) for row in z.tolist()]
    assert kept_of(z, top_k, top_p, min_p) == expected


def test_each_row_is_cut_by_its_own_options() -> None:
    z = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4, 1)
    kept = kept_tokens(
        z, torch.tensor([0, 1, 0, 0]), torch.tensor([1.0, 1.0, 0.7, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.5])
    )
    assert kept.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]


def test_a_row_that_is_not_cut_keeps_even_the_least_likely() -> None:
    z = torch.tensor([[0.0, -30.0, -45.0, -60.0, -80.0]])
    assert kept_of(z) == [{0, 1, 2, 3, 4}]


# -- draws --------------------------------------------------------------------------------------------------------


def draw(z: Tensor, uniform: list[float], kept: Tensor | None = None) -> list[int]:
    rows = len(uniform)
    mask = None if kept is None else kept.expand(rows, -1)
    return sample_inverse_cdf(
        choose(CPU, torch.float32), z.expand(rows, -1), torch.tensor(uniform, dtype=torch.float64), mask
    ).tolist()


@DRAWS
def test_a_draw_takes_the_token_whose_share_holds_the_number() -> None:
    """Shares 0.5, 0.25, 0, 0.25: each begins at its lower end and stops short of its upper one."""
    z = torch.tensor([[math.log(2), 0.0, -INF, 0.0]])
    assert draw(z, [0.0, 0.49, 0.51, 0.74, 0.76, LARGEST_UNIFORM]) == [0, 0, 1, 1, 3, 3]


@DRAWS
@pytest.mark.parametrize("impossible", [-INF, -200.0])
def test_a_token_of_probability_0_is_never_drawn(impossible: float) -> None:
    """exp(-200) is 0 in fp32. Such tokens lie first, last and in between, where the edges of [0, 1) would hit them."""
    z = torch.tensor([[impossible, impossible, 0.0, impossible, 0.0, impossible, impossible]])
    edges = [0.0, 5e-324, 2.0**-53, 0.5 - 2.0**-54, 0.5, 0.5 + 2.0**-53, LARGEST_UNIFORM]
    assert draw(z, edges) == [2, 2, 2, 2, 4, 4, 4]


@DRAWS
def test_a_token_that_is_not_kept_is_never_drawn() -> None:
    """Kept tokens have the lowest logits; any number has to find one of them."""
    z = torch.arange(211.0)[None].flip(-1)
    kept = torch.zeros(1, 211, dtype=torch.bool)
    kept[0, [50, 77, 200]] = True
    drawn = draw(z, [0.0, *np.linspace(0, 1, 200)[:-1].tolist(), LARGEST_UNIFORM], kept)
    assert set(drawn) <= {50, 77, 200}


@DRAWS
@pytest.mark.parametrize("edge", [0.0, LARGEST_UNIFORM])
def test_edges_of_a_peaked_and_of_a_flat_row(edge: float) -> None:
    flat, peaked = torch.zeros(1, 50_257), torch.zeros(1, 50_257)
    peaked[0, 31_000] = 100.0
    assert draw(flat, [edge]) == [0 if edge == 0.0 else 50_256]
    assert draw(peaked, [edge]) == [31_000 if edge else draw(peaked, [0.0])[0]]


@DRAWS
def test_every_token_of_a_large_vocabulary_can_be_drawn() -> None:
    """The middle of a token's share finds it, behind one likely token; fp32 sums would leave most unreachable."""
    z = random_logits(1, 152_064, scale=0.1) - 19.0
    z[0, 0] = 0.0
    probs = log_softmax_fp64(z)[0].exp().numpy()
    tokens = np.random.default_rng(0).integers(len(probs), size=64)
    middles = np.cumsum(probs)[tokens] - probs[tokens] / 2
    assert draw(z, middles.tolist()) == tokens.tolist()


@DRAWS
def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over 40,000 draws; the numbers are fixed, and 1 generator seed in 1e4 would fail a right sampler."""
    z = random_logits(1, 61, scale=1.5)
    uniform = np.random.default_rng(0).random(40_000)
    counts = np.bincount(draw(z, uniform.tolist()), minlength=61)
    assert chi_square_p(counts.tolist(), (log_softmax_fp64(z)[0].exp() * 40_000).tolist()) > 1e-4


@DRAWS
def test_a_draw_does_not_depend_on_its_neighbours(threads: int) -> None:
    z, uniform = random_logits(50, 211), torch.rand(50, dtype=torch.float64)
    whole = sample_inverse_cdf(choose(CPU, torch.float32), z, uniform)
    alone = [sample_inverse_cdf(choose(CPU, torch.float32), z[i : i + 1], uniform[i : i + 1]) for i in range(50)]
    assert torch.equal(whole, torch.cat(alone))
