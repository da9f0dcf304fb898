"""Draws and their log-probs: temperature, cuts, seeds and stops.

Chains have probabilities that are known; for random models the reference is numpy over transformers' eager logits.
Statistical tests draw from fixed seeds: they cannot flake, and their odds are those of a right sampler failing them
after a change of seed.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollout import RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.forward.sampler import EVAL, TRAIN
from tiny_models import (
    LOGPROB_TOLERANCE,
    assert_greedy,
    chain_model,
    chi_square_p,
    completions,
    eager_logits,
    eager_logprobs,
    greedy,
    greedy_ids,
    random_model,
    random_prompts,
    shared_model,
    small_engine,
)

PROMPTS = random_prompts([6, 11])
COIN = {token: {2: 1, 3: 3} for token in (1, 2, 3)}
"""Whatever came last: 2 with probability 1/4, 3 with 3/4."""


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return small_engine(shared_model("qwen3"), max_num_seqs=256)


def all_rollouts(groups: list[RolloutGroup]) -> list[tuple[list[int], list[int], list[float], list[float]]]:
    return [(g.prompt_ids, r.completion_ids, r.logprobs, r.raw_logprobs) for g in groups for r in g.rollouts]


# -- log-probs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_logprobs_of_a_coin(temperature: float) -> None:
    """Odds of 1 : 3 at temperature T are 1 : 3^(1/T); raw log-probs stay at 1/4 and 3/4."""
    share = {2: 1.0, 3: 3.0 ** (1 / temperature)}
    with small_engine(chain_model(COIN)) as engine:
        groups = engine.generate_rollouts([[1]], 8, SamplingParams(temperature=temperature, max_new_tokens=5, seed=0))
    seen = set()
    for _, ids, logprobs, raw in all_rollouts(groups):
        seen.update(ids)
        assert logprobs == pytest.approx([math.log(share[i] / sum(share.values())) for i in ids], abs=1e-5)
        assert raw == pytest.approx([math.log({2: 0.25, 3: 0.75}[i]) for i in ids], abs=1e-5)
    assert seen == {2, 3}


def test_a_logprob_belongs_to_the_token_that_was_drawn(engine: RolloutEngine) -> None:
    """At temperature 2 that is rarely the likeliest one."""
    groups = engine.generate_rollouts(PROMPTS, 4, SamplingParams(temperature=2.0, max_new_tokens=8, seed=0))
    differs = 0
    for prompt, ids, logprobs, _ in all_rollouts(groups):
        expected = eager_logprobs(shared_model("qwen3"), prompt, ids, 2.0)
        assert (torch.tensor(logprobs) - expected).abs().max() < LOGPROB_TOLERANCE
        assert max(logprobs) <= 0.0
        best = eager_logits(shared_model("qwen3"), prompt + ids)[len(prompt) - 1 : -1].argmax(-1)
        differs += int((best != torch.tensor(ids)).sum())
    assert differs > 32


def test_logprobs_lists_are_as_long_as_the_ids() -> None:
    """200 batches of random size, some of which end by an end token."""
    rng = np.random.default_rng(0)
    model = chain_model({token: {**dict.fromkeys(range(2, 8), 1), 1: 1} for token in range(8)}, eos_token_id=1)
    with small_engine(model) as engine:
        for _ in range(200):
            prompts = [[int(token)] for token in rng.integers(2, 8, size=rng.integers(1, 6))]
            groups = engine.generate_rollouts(prompts, int(rng.integers(1, 5)), SamplingParams(max_new_tokens=9))
            for _, ids, logprobs, raw in all_rollouts(groups):
                assert 1 <= len(ids) == len(logprobs) == len(raw) <= 9
                assert 1 not in ids[:-1]
                assert logprobs == pytest.approx([math.log(1 / 7)] * len(ids), abs=1e-5)


# -- cuts ---------------------------------------------------------------------------------------------------------


def cut_logprobs(logits: NDArray[np.float64], options: dict[str, Any]) -> NDArray[np.float64]:
    """Log-probs of one row after temperature, then top_k, top_p and min_p; -inf for what is cut. In fp64."""
    z = logits / options.get("temperature", 1.0)
    order = np.argsort(-z, kind="stable")
    order = order[: options.get("top_k") or len(order)]
    probs = np.exp(z[order] - z[order[0]])
    probs /= probs.sum()
    order = order[: int(np.searchsorted(np.cumsum(probs), options.get("top_p", 1.0) - 1e-12)) + 1]
    order = order[np.exp(z[order] - z[order[0]]) >= options.get("min_p", 0.0)]
    out = np.full(len(z), -np.inf)
    out[order] = z[order] - z[order[0]] - np.log(np.exp(z[order] - z[order[0]]).sum())
    return out


CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.1, "temperature": 0.7},
    {"top_p": 0.9, "temperature": 1.7},
]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_cut_logprobs_equal_a_numpy_reference(engine: RolloutEngine, options: dict[str, Any]) -> None:
    """Raw log-probs are over the whole vocabulary at temperature 1 all the same."""
    groups = engine.generate_rollouts(PROMPTS, 6, SamplingParams(max_new_tokens=8, seed=0, **options))
    for prompt, ids, logprobs, raw in all_rollouts(groups):
        logits = eager_logits(shared_model("qwen3"), prompt + ids)[len(prompt) - 1 : -1].double().numpy()
        expected = [cut_logprobs(row, options)[token] for row, token in zip(logits, ids, strict=True)]
        assert logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        whole = [cut_logprobs(row, {})[token] for row, token in zip(logits, ids, strict=True)]
        assert raw == pytest.approx(whole, abs=LOGPROB_TOLERANCE)


def test_each_prompt_is_cut_by_its_own_parameters(engine: RolloutEngine) -> None:
    """All of them in one batch, with prompts that are not cut at all among them."""
    options = [{}, *CUTS, {}]
    params = [SamplingParams(max_new_tokens=4, seed=0, **each) for each in options]
    groups = engine.generate_rollouts(random_prompts([5] * len(options)), 2, params)
    for group, each in zip(groups, options, strict=True):
        for prompt, ids, logprobs, _ in all_rollouts([group]):
            logits = eager_logits(shared_model("qwen3"), prompt + ids)[len(prompt) - 1 : -1].double().numpy()
            expected = [cut_logprobs(row, each)[token] for row, token in zip(logits, ids, strict=True)]
            assert logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


# -- frequencies --------------------------------------------------------------------------------------------------


def first_tokens(engine: RolloutEngine, **options: Any) -> Counter[int]:
    sampling = SamplingParams(max_new_tokens=1, seed=1, **options)
    return Counter(r.completion_ids[0] for r in engine.generate_rollouts(PROMPTS[:1], 2000, sampling)[0].rollouts)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_first_tokens_of_2000_forks_follow_the_distribution(engine: RolloutEngine, options: dict[str, Any]) -> None:
    """Chi-square; odds of a right sampler failing: 1 in 1,000 each."""
    logits = eager_logits(shared_model("qwen3"), PROMPTS[0])[-1].double().numpy()
    probs = np.exp(cut_logprobs(logits, options))
    counts = first_tokens(engine, **options)
    assert set(counts) <= set(np.flatnonzero(probs).tolist())
    assert chi_square_p([counts[token] for token in range(len(probs))], (2000 * probs).tolist()) > 1e-3


def test_successive_tokens_and_neighbouring_forks_are_independent() -> None:
    """2,000 forks of 4 tosses of a 1 : 3 coin: pairs along and across; odds 1 in 1,000 each."""
    with small_engine(chain_model(COIN), max_num_seqs=256) as engine:
        (group,) = engine.generate_rollouts([[1]], 2000, SamplingParams(max_new_tokens=4, seed=0))
    tosses = np.array([r.completion_ids for r in group.rollouts])
    shares = {(a, b): pa * pb for a, pa in ((2, 0.25), (3, 0.75)) for b, pb in ((2, 0.25), (3, 0.75))}
    along = [(tosses[:, i], tosses[:, i + 1]) for i in range(3)]
    across = [(tosses[:-1:2, i], tosses[1::2, i]) for i in range(4)]
    for left, right in along + across:
        counts = Counter(zip(left.tolist(), right.tolist(), strict=True))
        assert chi_square_p([counts[pair] for pair in shares], [len(left) * p for p in shares.values()]) > 1e-3


# -- seeds --------------------------------------------------------------------------------------------------------


def draws(engine: RolloutEngine, sampling: SamplingParams | None = None, **keywords: Any) -> list[list[list[int]]]:
    sampling = sampling or SamplingParams(max_new_tokens=6, seed=1)
    return completions(engine.generate_rollouts(PROMPTS, 8, sampling, **keywords))


def test_a_seed_gives_the_same_rollouts_again(engine: RolloutEngine) -> None:
    assert draws(engine) == draws(engine)


def test_the_members_of_a_group_differ(engine: RolloutEngine) -> None:
    """Eight completions of six tokens at 4 nats each; two equal ones would come once in 1e9 seeds."""
    for group in draws(engine):
        assert len(set(map(tuple, group))) == 8


@pytest.mark.parametrize(
    "keywords",
    [
        {"sampling": SamplingParams(max_new_tokens=6, seed=2)},
        {"step": 1},
        {"keys": [5, 6]},
        {"keys": [1, 0]},
        {"purpose": EVAL},
    ],
    ids=["seed", "step", "keys", "swapped keys", "purpose"],
)
def test_whatever_a_draw_hangs_on_changes_it(engine: RolloutEngine, keywords: dict[str, Any]) -> None:
    """No completion of six tokens comes twice; it would once in 1e8 seeds."""
    plain, other = draws(engine), draws(engine, **keywords)
    assert not {tuple(ids) for group in plain for ids in group} & {tuple(ids) for group in other for ids in group}
    assert draws(engine, purpose=TRAIN, step=0, keys=[0, 1]) == plain


def test_equal_prompts_in_one_call_have_numbers_of_their_own(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_new_tokens=6, seed=1)
    first, second = completions(engine.generate_rollouts([PROMPTS[0]] * 2, 4, sampling))
    assert first != second
    assert (
        completions(engine.generate_rollouts([PROMPTS[0]] * 2, 4, sampling, keys=[3, 3]))
        == [draws_of_key(engine, 3)] * 2
    )


def draws_of_key(engine: RolloutEngine, key: int) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=6, seed=1)
    return completions(engine.generate_rollouts([PROMPTS[0]], 4, sampling, keys=[key]))[0]


def test_without_a_seed_one_is_drawn_and_reported(engine: RolloutEngine) -> None:
    """Two calls draw other seeds, but once in 4e9; the reported one gives the same rollouts again."""
    sampling = SamplingParams(max_new_tokens=6)
    first, second = (engine.generate_rollouts(PROMPTS, 4, sampling) for _ in range(2))
    assert first[0].seed == first[1].seed != second[0].seed
    again = engine.generate_rollouts(PROMPTS, 4, SamplingParams(max_new_tokens=6, seed=first[0].seed))
    assert completions(again) == completions(first) != completions(second)


def test_groups_carry_their_keys_and_seeds(engine: RolloutEngine) -> None:
    params = [SamplingParams(max_new_tokens=1, seed=seed) for seed in (0, 2**32 - 1)]
    groups = engine.generate_rollouts(PROMPTS, 1, params, keys=[2**32 - 1, 4])
    assert [(group.key, group.seed) for group in groups] == [(2**32 - 1, 0), (4, 2**32 - 1)]


# -- greedy and nearly so -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-10])
def test_temperature_0_and_nearly_0_take_the_likeliest(engine: RolloutEngine, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=8, seed=0)
    for prompt, ids, logprobs, raw in all_rollouts(engine.generate_rollouts(PROMPTS, 4, sampling)):
        assert_greedy(shared_model("qwen3"), prompt, ids, greedy_ids(shared_model("qwen3"), prompt, 8))
        expected = eager_logprobs(shared_model("qwen3"), prompt, ids, temperature or 1.0).tolist()
        assert logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert raw == pytest.approx(eager_logprobs(shared_model("qwen3"), prompt, ids).tolist(), abs=LOGPROB_TOLERANCE)


def test_a_small_temperature_is_stable(engine: RolloutEngine) -> None:
    """Logits in the thousands: finite log-probs, near 0 where one token leads by far."""
    sampling = SamplingParams(temperature=1e-3, max_new_tokens=8, seed=0)
    for _, _, logprobs, _ in all_rollouts(engine.generate_rollouts(PROMPTS, 4, sampling)):
        assert all(math.isfinite(x) and x <= 0.0 for x in logprobs)


def test_a_tie_goes_to_the_lower_id() -> None:
    """Greedy, and sampled from the one likeliest: the same of two equal tokens."""
    with small_engine(chain_model({1: {7: 1, 4: 1}}, num_hidden_layers=1)) as engine:
        params = [greedy(1), SamplingParams(top_k=1, max_new_tokens=1), SamplingParams(top_p=0.1, max_new_tokens=1)]
        assert completions(engine.generate_rollouts([[1]] * 3, 2, params)) == [[[4]] * 2] * 3


# -- stops --------------------------------------------------------------------------------------------------------

LINE = {1: 2, 2: 3, 3: 9, 9: 5, 5: 6}


@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({}, [2, 3, 9], "stop"),
        ({"ignore_eos": True}, [2, 3, 9, 5, 6], "length"),
        ({"stop_token_ids": (3,)}, [2, 3], "stop"),
        ({"stop_token_ids": [2, 6]}, [2], "stop"),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [2, 3, 9, 5], "stop"),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [2, 3, 9], "stop"),
        ({"stop_token_ids": (60,)}, [2, 3, 9], "stop"),
    ],
    ids=str,
)
def test_what_ends_a_completion(options: dict[str, Any], expected: list[int], reason: str) -> None:
    """The chain 2, 3, 9, 5, 6 with 9 for its end token: the token that ends it is the last of its ids."""
    with small_engine(chain_model(LINE, eos_token_id=9)) as engine:
        (made,) = engine.generate_rollouts([[1]], 1, greedy(5, **options))[0].rollouts
    assert (made.completion_ids, made.finish_reason) == (expected, reason)


# -- bad values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e-11}, "temperature=1e-11"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0: must lie in"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        SamplingParams(**options)


def test_a_model_of_another_seed_samples_otherwise(engine: RolloutEngine) -> None:
    """The draws of these tests hang on the model: with the same numbers another one makes other tokens."""
    with small_engine(random_model("qwen3", seed=1)) as other:
        assert draws(other) != draws(engine)
