"""What engines of this kind have got wrong before, tried on purpose."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.memory.device import device_bytes
from tiny_models import (
    BOS,
    EOS,
    LOGPROB_TOLERANCE,
    TEXT_VOCAB,
    assert_greedy,
    byte_tokenizer,
    chain_model,
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

B = 4
SAMPLING = SamplingParams(max_new_tokens=6, seed=3)


def contents(groups: Sequence[RolloutGroup], count: int | None = None) -> list[Any]:
    """Everything that was sampled, bit for bit."""
    return [[(r.completion_ids, r.logprobs, r.raw_logprobs) for r in group.rollouts[:count]] for group in groups]


def assert_right(model: PreTrainedModel, groups: Sequence[RolloutGroup], *, is_greedy: bool = False) -> None:
    """Log-probs, and the ids of greedy completions, are those of transformers' own forward on the weights of now."""
    for group in groups:
        for made in group.rollouts:
            if is_greedy:
                expected = greedy_ids(model, group.prompt_ids, len(made.completion_ids))
                assert_greedy(model, group.prompt_ids, made.completion_ids, expected)
            logprobs = eager_logprobs(model, group.prompt_ids, made.completion_ids)
            assert (torch.tensor(made.logprobs) - logprobs).abs().max() < LOGPROB_TOLERANCE


def assert_idle(engine: RolloutEngine) -> None:
    engine.pool.check_integrity([])
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


# -- weights and KV that belongs to them --------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("warm", [True, False])
def test_no_kv_of_older_weights_is_read_after_an_explicit_update(blocks: int, extra: int, warm: bool) -> None:
    model, prompts = random_model("qwen3"), random_prompts([blocks * B + extra])
    with small_engine(model, block_size=B, prefix_cache=warm) as engine:
        for seed in (1, 2):
            before = engine.generate_rollouts(prompts, 2, greedy())
            engine.update_weights(random_model("qwen3", seed=seed).state_dict())
            hits = engine.stats().cache_hit_tokens
            groups = engine.generate_rollouts(prompts, 2, greedy())
            assert engine.stats().cache_hit_tokens == hits
            assert completions(groups) != completions(before)
            assert_right(model, groups, is_greedy=True)


def test_a_module_may_be_trained_and_generated_from_in_turn() -> None:
    """No tensor of it comes out of inference mode, which a backward could not go through."""
    model, prompts = random_model("llama"), random_prompts([9, 16])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with small_engine(model, block_size=B) as engine:
        for _ in range(3):
            groups = engine.generate_rollouts(prompts, 2, greedy())
            assert_right(model, groups, is_greedy=True)
            assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
            ids = torch.tensor([groups[0].prompt_ids + groups[0].rollouts[0].completion_ids])
            (-model(ids).logits.log_softmax(-1)[..., 9].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.weights_updated()


def test_dropout_and_training_mode_are_not_for_generating() -> None:
    """Two greedy calls agree with each other and with transformers in eval mode; the caller's mode stays."""
    model, prompts = random_model("qwen3", attention_dropout=0.5).train(), random_prompts([20, 5])
    with small_engine(model) as engine:
        first, second = (engine.generate_rollouts(prompts, 2, greedy()) for _ in range(2))
        assert model.training
        assert not torch.equal(eager_logits(model, prompts[0]), eager_logits(model, prompts[0]))  # dropout is on
        with pytest.raises(RolloutError, match=r"attention_dropout=0\.5: set it to 0"):
            engine.training_view(gradient_checkpointing=True)
    assert contents(first) == contents(second)
    assert_right(model.eval(), first, is_greedy=True)


# -- whole blocks, small caches, many forks -----------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_twins_of_whole_blocks_are_the_same_cold_and_warm(blocks: int) -> None:
    """One after another, two at once, and with one token more: each as an engine without a cache makes it."""
    (prompt,) = random_prompts([blocks * B])
    longer = [*prompt, 5]
    with small_engine(shared_model("qwen3"), block_size=B, prefix_cache=False) as engine:
        cold = contents(engine.generate_rollouts([prompt, longer], 2, SAMPLING, keys=[0, 0]))
    with small_engine(shared_model("qwen3"), block_size=B) as engine:
        for prompts in ([prompt], [prompt], [prompt, prompt], [longer], [prompt, longer, prompt]):
            groups = engine.generate_rollouts(prompts, 2, SAMPLING, keys=[0] * len(prompts))
            assert contents(groups) == [cold[prompt is longer] for prompt in prompts]
            assert_idle(engine)
        assert engine.stats().cache_hit_tokens > 0
    with small_engine(shared_model("qwen3"), block_size=B) as engine:
        assert contents(engine.generate_rollouts([prompt, prompt], 2, SAMPLING, keys=[0, 0])) == [cold[0]] * 2


def test_a_cache_that_preempts_again_and_again_changes_nothing() -> None:
    prompts, sampling = random_prompts([5, 16, 9, 12, 1, 21]), SamplingParams(max_new_tokens=24, seed=1)
    with small_engine(shared_model("qwen3"), block_size=B) as engine:
        unlimited = engine.generate_rollouts(prompts, 4, sampling)
    with small_engine(shared_model("qwen3"), block_size=B, num_blocks=24) as engine:
        groups = engine.generate_rollouts(prompts, 4, sampling)
        assert engine.stats().preemptions > 5
        assert_idle(engine)
    assert contents(groups) == contents(unlimited)
    assert {len(r.completion_ids) for group in groups for r in group.rollouts} == {24}
    assert_right(shared_model("qwen3"), groups)


@pytest.mark.parametrize("options", [{"max_num_seqs": 8}, {"num_blocks": 5 + 10 * 2}, {"max_num_seqs": 1}], ids=str)
def test_64_forks_in_an_engine_for_few_are_those_of_a_wide_one(options: dict[str, Any]) -> None:
    """Slots for 8 or 1, or blocks for ten beside the prompt: all come back, the last as right as the first."""
    (prompt,) = random_prompts([21])
    sampling = SamplingParams(max_new_tokens=7, seed=2)
    with small_engine(shared_model("qwen3"), block_size=B, max_num_seqs=64) as engine:
        wide = engine.generate_rollouts([prompt], 64, sampling)
        assert engine.stats().peak_running == 64
    with small_engine(shared_model("qwen3"), block_size=B, **options) as engine:
        groups = engine.generate_rollouts([prompt], 64, sampling)
        assert engine.stats().peak_running <= 12
        assert_idle(engine)
    assert [made.index for made in groups[0].rollouts] == list(range(64))
    assert contents(groups) == contents(wide)
    assert_right(shared_model("qwen3"), groups)


def test_a_thousand_forks_of_one_token_each_follow_one_prefill() -> None:
    (prompt,) = random_prompts([10])
    with small_engine(shared_model("qwen3"), max_num_seqs=8) as engine:
        (group,) = engine.generate_rollouts([prompt], 1000, SamplingParams(max_new_tokens=1, seed=0))
        assert engine.stats().forward_steps == 1
        assert_idle(engine)
    logprobs = eager_logits(shared_model("qwen3"), prompt)[-1].log_softmax(-1)
    for made in group.rollouts:
        assert made.logprobs == pytest.approx([logprobs[made.completion_ids[0]].item()], abs=LOGPROB_TOLERANCE)
    assert len(group.rollouts) == 1000
    assert len({made.completion_ids[0] for made in group.rollouts}) > 5


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, B, B + 1])
def test_chunks_beside_decodes_are_the_unchunked_prompts(chunk: int) -> None:
    """Prompts of 1 to 3 blocks arrive while others decode: every token is computed once, none is left out."""
    prompts = random_prompts(range(1, 3 * B + 1))
    with small_engine(shared_model("qwen3"), block_size=B) as engine:
        whole = engine.generate_rollouts(prompts, 2, SAMPLING)
    with small_engine(shared_model("qwen3"), block_size=B, prefill_chunk_size=chunk, prefix_cache=False) as engine:
        handles = []
        for i, prompt in enumerate(prompts):
            handles.append(engine.submit(prompt, 2, SAMPLING, key=i))
            for _ in range(2):
                engine.step()
        while engine.has_work:
            engine.step()
        stats = engine.stats()
        assert_idle(engine)
    groups = [handle.group() for handle in handles]
    assert contents(groups) == contents(whole)
    assert_right(shared_model("qwen3"), groups)
    assert {len(r.completion_ids) for group in groups for r in group.rollouts} == {SAMPLING.max_new_tokens}
    assert (stats.prompt_tokens, stats.completion_tokens) == (sum(map(len, prompts)), 12 * 2 * 6)
    assert stats.peak_running > 2


# -- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_prompt_of_nothing_begins_at_bos_or_is_named(adds_bos: bool) -> None:
    """A normal call is right behind each of them."""
    model = random_model("qwen3", vocab_size=TEXT_VOCAB)
    empty: list[Any] = [[], *([] if adds_bos else [""])]
    with small_engine(model, byte_tokenizer(adds_bos=adds_bos, eos_token=None)) as engine:
        for prompt in empty:
            with pytest.raises(RolloutError, match=r"prompt 2: .* is empty"):
                engine.generate_rollouts(["a", " ", prompt], 2, greedy())
            assert_right(model, engine.generate_rollouts(["ab"], 2, greedy()), is_greedy=True)
        assert engine.generate_rollouts([], 2, greedy()) == []
        groups = engine.generate_rollouts(["", " ", "ab"] if adds_bos else [" ", "ab"], 2, greedy())
        assert_right(model, groups, is_greedy=True)
        assert_idle(engine)
    assert [group.prompt_ids[:1] == [BOS] for group in groups] == [adds_bos] * len(groups)
    assert len(groups[0].prompt_ids) == 1


def test_results_are_in_order_however_long_each_takes() -> None:
    """A chain counts down from a prompt's last token and ends by chance, so that what comes back says whose it is."""
    model = chain_model({i: {i - 1: 0.95, EOS: 0.05} for i in range(3, 62)} | {2: EOS}, eos_token_id=EOS)
    starts = random.Random(0).sample(range(2, 62), 20)
    results = []
    for options in ({}, {"max_num_seqs": 3}, {"block_size": B, "num_blocks": 20}):
        with small_engine(model, **options) as engine:
            sampling = SamplingParams(max_new_tokens=100, seed=0)
            groups = engine.generate_rollouts([[9, 9, start] for start in starts], 3, sampling)
        results.append(contents(groups))
        for start, group in zip(starts, groups, strict=True):
            assert group.prompt_ids == [9, 9, start]
            assert [made.index for made in group.rollouts] == [0, 1, 2]
            for *body, last in completions([group])[0]:
                assert [*body, last] == [*range(start - 1, start - 1 - len(body), -1), EOS]
    assert results[0] == results[1] == results[2]
    lengths = {len(ids) for group in completions(groups) for ids in group}
    assert min(lengths) < 3
    assert max(lengths) > 30


# -- memory -------------------------------------------------------------------------------------------------------


PER_BLOCK = 2 * 2 * 2 * 32 * 4 * 16
"""Bytes of 16 tokens: keys and values, 2 layers, 2 heads of 32, fp32."""


def worth(blocks: float) -> float:
    """The memory_fraction that so many blocks take."""
    return blocks * PER_BLOCK / device_bytes(torch.device("cpu"))


@pytest.mark.parametrize("blocks", [2.5, 3.5, 7.5, 100.5])
def test_the_pool_is_within_its_fraction_of_memory(blocks: float) -> None:
    """All of it, the block that padding writes to included, and no more than a block less than it may be."""
    with small_engine(shared_model("qwen3"), num_blocks=None, memory_fraction=worth(blocks)) as engine:
        assert (blocks - 1) * PER_BLOCK < engine.stats().pool_bytes <= blocks * PER_BLOCK
        assert_right(shared_model("qwen3"), engine.generate_rollouts(random_prompts([9]), 2, greedy()), is_greedy=True)


def test_an_explicit_number_of_blocks_wins_over_a_fraction_of_memory() -> None:
    with small_engine(shared_model("qwen3"), num_blocks=150, memory_fraction=worth(7.5)) as engine:
        assert engine.stats().num_blocks == 150


def test_a_fraction_of_memory_that_holds_no_block_beside_paddings_says_how_much_is_missing() -> None:
    with pytest.raises(RolloutError, match=rf"\({PER_BLOCK // 2} bytes are missing\)"):
        small_engine(shared_model("qwen3"), num_blocks=None, memory_fraction=worth(1.5))


def test_training_while_the_pool_is_released_is_seen_when_it_is_back() -> None:
    model, prompts = random_model("qwen3"), random_prompts([15, 16, 17])
    with small_engine(model, block_size=B) as engine:
        before = engine.generate_rollouts(prompts, 2, greedy())
        assert engine.release_memory() == 401 * PER_BLOCK // 16 * B
        model(input_ids=torch.tensor([prompts[1]])).logits.square().mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.05).step()
        engine.weights_updated()
        engine.restore_memory()
        groups = engine.generate_rollouts(prompts, 2, greedy())
        assert completions(groups) != completions(before)
        assert_right(model, groups, is_greedy=True)
        assert_idle(engine)
