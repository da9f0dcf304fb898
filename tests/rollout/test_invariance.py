"""A rollout is a function of its own inputs: whatever else differs between two engines, it keeps every bit.

Each way of differing is tried alone and mixed with the others, in both dtypes, under one and two threads. What is
right comes from an engine with room for everything, whose log-probs are compared with an eager forward once.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import RolloutEngine, RolloutGroup, SamplingParams
from tiny_models import ARCHITECTURES, LOGPROB_TOLERANCE, eager_logprobs, random_model, random_prompts, small_engine

Bits = list[tuple[list[int], list[float], list[float]]]

N = 3
SAMPLING = SamplingParams(max_new_tokens=24, seed=11)
STEM = random_prompts([66], seed=1)[0]
# a lone token, whole blocks of what others have further on, and three that share a segment, the last two more
PROMPTS = [[9], [6] * 32, STEM + [5] * 15, STEM + [6] * 40, STEM + [6] * 40 + [7]]
TIGHT = {"block_size": 4, "num_blocks": 33, "prefill_chunk_size": 20}
"""The longest prompt and its completion are 131 tokens: they take all 33 blocks."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@cache
def model_of(arch: str, dtype: str) -> PreTrainedModel:
    return random_model(arch, dtype=_DTYPES[dtype])


def bits(group: RolloutGroup, count: int = N) -> Bits:
    return [(r.completion_ids, r.logprobs, r.raw_logprobs) for r in group.rollouts[:count]]


@cache
def plenty(arch: str, dtype: str, num_threads: int) -> list[Bits]:
    """In a call of PROMPTS with room for everything, no chunks and no cache; run under num_threads already."""
    assert torch.get_num_threads() == num_threads
    with small_engine(model_of(arch, dtype), prefix_cache=False) as engine:
        groups = engine.generate_rollouts(PROMPTS, N, SAMPLING)
        assert engine.stats().preemptions == 0
    return [bits(group) for group in groups]


def places(engine: RolloutEngine, order: Sequence[int], n: int = N) -> dict[int, Bits]:
    """What the engine makes of those of PROMPTS, under the keys that they have in a call of all."""
    groups = engine.generate_rollouts([PROMPTS[i] for i in order], n, SAMPLING, keys=order)
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return {place: bits(group) for place, group in zip(order, groups, strict=True)}


# -- one difference at a time -------------------------------------------------------------------------------------

ALL = range(len(PROMPTS))


def just_enough_blocks(model: PreTrainedModel) -> dict[int, Bits]:
    with small_engine(model, **TIGHT) as engine:
        made = places(engine, ALL)
        assert engine.stats().preemptions > 3
    return made


def shuffled(model: PreTrainedModel) -> dict[int, Bits]:
    with small_engine(model) as engine:
        return places(engine, [3, 0, 4, 2, 1])


def other_mates(model: PreTrainedModel) -> dict[int, Bits]:
    """Strangers with parameters of their own before, between and behind two of the prompts."""
    strangers = random_prompts([9, 70, 3], seed=2)
    params = [SamplingParams(temperature=0.0, max_new_tokens=40), SamplingParams(top_k=4), SamplingParams(top_p=0.5)]
    prompts = [strangers[0], PROMPTS[0], strangers[1], PROMPTS[3], strangers[2]]
    with small_engine(model) as engine:
        mixed = [params[0], SAMPLING, params[1], SAMPLING, params[2]]
        groups = engine.generate_rollouts(prompts, N, mixed, keys=[9, 0, 8, 3, 7])
    return {0: bits(groups[1]), 3: bits(groups[3])}


def alone(model: PreTrainedModel) -> dict[int, Bits]:
    with small_engine(model) as engine:
        return places(engine, [4], n=1) | places(engine, [1], n=1)


def more_siblings(model: PreTrainedModel) -> dict[int, Bits]:
    with small_engine(model) as engine:
        return places(engine, ALL, n=2 * N + 1)


def warm_cache(model: PreTrainedModel) -> dict[int, Bits]:
    """The second call finds all of every prompt's full blocks but those of the last token, which is computed again."""
    with small_engine(model, block_size=4) as engine:
        places(engine, ALL)
        cold = engine.stats().cache_hit_tokens
        made = places(engine, ALL)
        assert engine.stats().cache_hit_tokens - cold == sum((len(p) - 1) // 4 * 4 for p in PROMPTS)
    return made


def products_apart(model: PreTrainedModel) -> dict[int, Bits]:
    """Siblings attend the segments that they share each for itself."""
    with small_engine(model) as engine:
        assert engine._core.runner is not None
        engine._core.runner.group_siblings = False
        return places(engine, ALL)


def chunks_of(size: int | None) -> Callable[[PreTrainedModel], dict[int, Bits]]:
    def chunked(model: PreTrainedModel) -> dict[int, Bits]:
        with small_engine(model, prefill_chunk_size=size) as engine:
            return places(engine, ALL)

    return chunked


def mixed(seed: int) -> Callable[[PreTrainedModel], dict[int, Bits]]:
    """Everything at once, drawn from `seed`: sizes of all kinds, order, company, an engine that has been used."""

    def of(model: PreTrainedModel) -> dict[int, Bits]:
        draw = random.Random(seed)
        block_size = draw.choice([1, 3, 4, 16, 64])
        seqs = draw.choice([1, 2, 5, 64])
        options: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": -(-131 // block_size) + draw.choice([0, 3, 100]),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + draw.choice([0, 5, 60, 2000]),
            "prefill_chunk_size": draw.choice([1, 7, 64, None]),
            "prefix_cache": draw.random() < 0.7,
        }
        with small_engine(model, **options) as engine:
            assert engine._core.runner is not None
            engine._core.runner.group_siblings = draw.random() < 0.5
            places(engine, draw.sample(ALL, 2))
            return places(engine, draw.sample(ALL, draw.randint(1, len(ALL))), n=draw.choice([1, N, 2 * N]))

    return of


ONE = {f.__name__: f for f in (just_enough_blocks, shuffled, other_mates, alone, more_siblings, warm_cache)}
ONE |= {"products_apart": products_apart} | {f"chunks_of_{size}": chunks_of(size) for size in (1, 7, 64, None)}
MIXED = {f"mixed_{seed}": mixed(seed) for seed in range(20)}


def check(arch: str, dtype: str, num_threads: int, way: Callable[[PreTrainedModel], dict[int, Bits]]) -> None:
    torch.set_num_threads(num_threads)
    expected = plenty(arch, dtype, num_threads)
    for place, made in way(model_of(arch, dtype)).items():
        assert made == expected[place][: len(made)], f"prompt {place}"


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize(("dtype", "num_threads"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("way", ONE)
def test_a_rollout_keeps_every_bit(dtype: str, num_threads: int, way: str) -> None:
    check("qwen3", dtype, num_threads, ONE[way])


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("way", list(MIXED)[:2])
def test_a_rollout_keeps_every_bit_whatever_differs_at_once(way: str) -> None:
    check("qwen3", "fp32", 2, MIXED[way])


@pytest.mark.slow
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("way", [*ONE, *MIXED])
def test_a_rollout_keeps_every_bit_over_the_grid(arch: str, dtype: str, num_threads: int, way: str) -> None:
    check(arch, dtype, num_threads, (ONE | MIXED)[way])


@pytest.mark.usefixtures("restore_threads")
def test_what_the_others_are_compared_with_is_right() -> None:
    torch.set_num_threads(1)
    for prompt, group in zip(PROMPTS, plenty("qwen3", "fp32", 1), strict=True):
        for ids, logprobs, _ in group:
            assert len(ids) == SAMPLING.max_new_tokens
            expected = eager_logprobs(model_of("qwen3", "fp32"), prompt, ids)
            assert (torch.tensor(logprobs) - expected).abs().max() < LOGPROB_TOLERANCE
