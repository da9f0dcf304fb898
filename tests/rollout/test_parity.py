"""The engine against transformers: greedy ids of `generate`, and log-probs of an fp32 eager forward.

First that the models these comparisons rest on have an answer that a mistake would change.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import RolloutEngine, RolloutGroup, SamplingParams
from tiny_models import (
    ARCHITECTURES,
    LOGPROB_TOLERANCE,
    VOCAB,
    assert_greedy,
    chain_model,
    eager_logits,
    eager_logprobs,
    greedy,
    greedy_ids,
    random_model,
    random_prompts,
    shared_model,
    small_engine,
)

UNEVEN = (5, 1, 16, 33, 17, 64, 2, 71)
"""Prompt lengths on both sides of blocks and of an attention segment."""
NEW_TOKENS = 12


@cache
def reference_greedy(arch: str, prompt: tuple[int, ...]) -> list[int]:
    return greedy_ids(shared_model(arch), prompt, NEW_TOKENS)


def check_greedy(arch: str, prompts: Sequence[list[int]], n: int, engine: RolloutEngine) -> None:
    groups = engine.generate_rollouts(prompts, n, greedy(NEW_TOKENS))
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.prompt_ids == prompt
        assert len(group.rollouts) == n
        for rollout in group.rollouts:
            assert_greedy(shared_model(arch), prompt, rollout.completion_ids, reference_greedy(arch, tuple(prompt)))


def check_logprobs(model: PreTrainedModel, groups: Sequence[RolloutGroup], temperature: float) -> None:
    for group in groups:
        for rollout in group.rollouts:
            for ours, divisor in ((rollout.logprobs, temperature), (rollout.raw_logprobs, 1.0)):
                expected = eager_logprobs(model, group.prompt_ids, rollout.completion_ids, divisor)
                assert (torch.tensor(ours) - expected).abs().max() < LOGPROB_TOLERANCE


# -- the models of these tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_random_models_are_neither_certain_nor_uniform(arch: str, tied: bool) -> None:
    """Mean next-token entropy between 4 and 4.8 of log 211 = 5.35 nats."""
    model = random_model(arch, tie_word_embeddings=tied)
    logs = eager_logits(model, random_prompts([200])[0]).double().log_softmax(-1)
    assert 4.0 < float(-(logs.exp() * logs).sum(-1).mean()) < 4.8


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("place", [0, 3, 18])
def test_random_models_see_every_position(arch: str, place: int) -> None:
    """Another token 2, 17 or 20 places back moves the next log-probs by a thousand times the tolerance."""
    (prompt,) = random_prompts([21])
    other = [(token + (i == place)) % VOCAB for i, token in enumerate(prompt)]
    logs = [eager_logits(shared_model(arch), ids)[-1].log_softmax(-1) for ids in (prompt, other)]
    assert (logs[0] - logs[1]).abs().max() > 1000 * LOGPROB_TOLERANCE


def test_a_chain_has_the_probabilities_of_its_table() -> None:
    model = chain_model({1: 2, 2: {3: 1, 4: 3}})
    probs = eager_logits(model, [9, 1, 2]).softmax(-1)
    assert probs[1, 2].item() == pytest.approx(1.0, abs=1e-6)
    assert probs[2, [3, 4]].tolist() == pytest.approx([0.25, 0.75], abs=1e-6)
    assert probs[0].tolist() == pytest.approx([1 / 64] * 64, abs=1e-6)


# -- greedy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_greedy_ids_are_those_of_generate(arch: str, block_size: int, n: int) -> None:
    with small_engine(shared_model(arch), block_size=block_size, num_blocks=2000) as engine:
        check_greedy(arch, random_prompts(UNEVEN), n, engine)


@pytest.mark.parametrize("block_size", [2, 7, 32, 64, 100, 128])
def test_greedy_ids_at_other_block_sizes(block_size: int) -> None:
    """Sizes that divide a segment of 64, that do not, and that are larger."""
    with small_engine(shared_model("qwen3"), block_size=block_size) as engine:
        check_greedy("qwen3", random_prompts(UNEVEN), 3, engine)


def test_greedy_completions_are_scored_at_temperature_1() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        groups = engine.generate_rollouts(random_prompts([5, 20]), 2, greedy())
    check_logprobs(shared_model("qwen3"), groups, 1.0)


# -- log-probs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_those_of_an_eager_forward(arch: str, block_size: int, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS, seed=1)
    with small_engine(shared_model(arch), block_size=block_size, num_blocks=2000) as engine:
        groups = engine.generate_rollouts(random_prompts(UNEVEN), 4, sampling)
    check_logprobs(shared_model(arch), groups, temperature)


@pytest.mark.parametrize("prompt_length", range(1, 13))
@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_forks_of_a_partly_filled_block_do_not_meet(prompt_length: int, n: int) -> None:
    """At temperature 3 forks part at once; a tail that two of them write to gives at least one a wrong past."""
    engine = fork_engine()
    (prompt,) = random_prompts([prompt_length])
    sampling = SamplingParams(temperature=3.0, max_new_tokens=6, seed=prompt_length)
    groups = engine.generate_rollouts([prompt], n, sampling)
    check_logprobs(shared_model("llama"), groups, 3.0)
    assert len({rollout.completion_ids[0] for rollout in groups[0].rollouts}) > 1
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@cache
def fork_engine() -> RolloutEngine:
    return small_engine(shared_model("llama"), block_size=4)


def test_a_long_prompt_in_chunks_and_a_long_completion() -> None:
    """300 tokens in chunks of 64 and 100 more: several segments, alone and with siblings."""
    with small_engine(shared_model("llama"), max_num_batched_tokens=64) as engine:
        groups = engine.generate_rollouts(random_prompts([300, 190]), 3, SamplingParams(max_new_tokens=100, seed=0))
    check_logprobs(shared_model("llama"), groups, 1.0)


# -- kinds of models ----------------------------------------------------------------------------------------------

WINDOW = {"use_sliding_window": True, "max_window_layers": 1}
ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 48}),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
        ("llama", {"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 40}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}},
        ),
        ("qwen2", {"sliding_window": 8, **WINDOW}),
        ("qwen2", {"sliding_window": 64, **WINDOW}),
        ("qwen3", {"sliding_window": 20, **WINDOW, "max_window_layers": 0}),
        ("qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 1}),
        ("qwen3", {"vocab_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_configurations_within_a_family(arch: str, overrides: dict[str, Any]) -> None:
    model = random_model(arch, **overrides)
    prompts = random_prompts([3, 40, 90], vocab=model.config.vocab_size)
    with small_engine(model, max_num_seqs=6) as engine:
        groups = engine.generate_rollouts(prompts, 3, SamplingParams(max_new_tokens=50, seed=0))
        best = engine.generate_rollouts(prompts, 1, greedy())
    check_logprobs(model, groups, 1.0)
    for prompt, group in zip(prompts, best, strict=True):
        assert_greedy(model, prompt, group.rollouts[0].completion_ids, greedy_ids(model, prompt, 8))


# -- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("num_prompts", [1, 2, 7, 40])
@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_greedy_ids_and_logprobs_over_the_grid(arch: str, num_prompts: int, n: int, block_size: int) -> None:
    prompts = random_prompts([1 + 29 * i % 97 for i in range(num_prompts)], seed=num_prompts)
    with small_engine(shared_model(arch), block_size=block_size, num_blocks=8000) as engine:
        check_greedy(arch, prompts, n, engine)
        for temperature in (0.3, 1.0, 1.7):
            sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS, seed=1)
            check_logprobs(shared_model(arch), engine.generate_rollouts(prompts, n, sampling), temperature)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_models_of_other_seeds(seed: int) -> None:
    arch = ARCHITECTURES[seed % 3]
    model = random_model(arch, seed=100 + seed)
    prompts = random_prompts([7, 50, 1, 129], seed=seed)
    temperature = math.exp(seed / 10 - 1)
    with small_engine(model, block_size=4, num_blocks=2000) as engine:
        sampling = SamplingParams(temperature=temperature, max_new_tokens=30, seed=seed)
        check_logprobs(model, engine.generate_rollouts(prompts, 5, sampling), temperature)
        best = engine.generate_rollouts(prompts, 1, greedy(30))
    for prompt, group in zip(prompts, best, strict=True):
        assert_greedy(model, prompt, group.rollouts[0].completion_ids, greedy_ids(model, prompt, 30))
