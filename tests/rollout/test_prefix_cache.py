"""The prefix cache: found by tokens under a key, evicted leaf first, and never seen in a result."""

import random

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.schedule.block_pool import BlockPool, BlockTable
from tiny_models import (
    assert_greedy,
    greedy,
    greedy_ids,
    random_model,
    random_prompts,
    scramble,
    shared_model,
    small_engine,
)

KEY = (0, None)


def _store(pool: BlockPool, tokens: list[int], key: object = KEY) -> BlockTable:
    """A sequence that computes `tokens` behind what is cached of them."""
    size = pool.block_size
    found = pool.cache.match(key, tokens, len(tokens))
    for block in found:
        pool.share(block)
    table = BlockTable(pool, list(found))
    table.make_writable(len(found) * size, len(tokens))
    node = pool.cache.node(found[-1]) if found else None
    for i in range(len(found), len(tokens) // size):
        node = pool.cache.extend(key, node, tuple(tokens[i * size : (i + 1) * size]), table.blocks[i])
    return table


def test_a_prefix_is_found_by_whole_blocks_and_up_to_a_limit() -> None:
    pool = BlockPool(8, 2)
    table = _store(pool, [1, 2, 3, 4, 5])
    match = pool.cache.match
    assert match(KEY, [1, 2, 3, 4, 5, 6], 6) == table.blocks[:2]
    assert match(KEY, [1, 2, 3, 4], 3) == table.blocks[:1]
    assert match(KEY, [1, 2, 9, 4], 4) == table.blocks[:1]
    assert match(KEY, [2, 1, 3, 4], 4) == match((1, None), [1, 2], 2) == match((0, "salt"), [1, 2], 2) == []


def test_blocks_nobody_holds_are_free_and_still_found() -> None:
    pool = BlockPool(4, 2)
    table = _store(pool, [1, 2, 3, 4])
    blocks = list(table.blocks)
    table.free()
    assert pool.num_free_blocks == 4
    again = _store(pool, [1, 2, 3, 4])
    assert again.blocks == blocks
    assert pool.num_free_blocks == 2
    pool.check_integrity([again])


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Two chains of two blocks fill the pool; the second is used again, so the first loses its end, then its start."""
    pool = BlockPool(4, 1)
    first, second = _store(pool, [1, 2]), _store(pool, [3, 4])
    first.free()
    second.free()
    _store(pool, [3, 4]).free()
    expected = [([1, 2], 1), ([1, 2], 0), ([3, 4], 1)]
    held = []
    for tokens, left in expected:
        table = BlockTable(pool)
        table.make_writable(0, 1)
        held.append(table)
        assert len(pool.cache.match(KEY, tokens, 2)) == left
    pool.check_integrity(held)


def test_descendants_of_a_forgotten_block_are_reclaimed() -> None:
    """The start of a chain goes while its end is in use (it was computed twice): what is left cannot be found."""
    pool = BlockPool(4, 1)
    one = _store(pool, [1])
    twin = BlockTable(pool)
    twin.make_writable(0, 2)
    pool.cache.extend(KEY, pool.cache.node(one.blocks[0]), (2,), twin.blocks[1])
    one.free()
    taken = BlockTable(pool)
    taken.make_writable(0, 2)
    assert pool.cache.match(KEY, [1, 2], 2) == []
    pool.check_integrity([twin, taken])
    for table in (twin, taken):
        table.free()
    assert pool.num_free_blocks == 4
    pool.check_integrity([])


def test_forgetting_frees_what_nobody_holds_and_finds_nothing() -> None:
    pool = BlockPool(6, 1)
    held, idle = _store(pool, [1, 2]), _store(pool, [3, 4])
    idle.free()
    pool.forget_cached()
    assert pool.cache.match(KEY, [1, 2], 2) == pool.cache.match(KEY, [3, 4], 2) == []
    pool.check_integrity([held])
    held.free()
    assert pool.num_free_blocks == 6


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed: int) -> None:
    """Tokens of two values, so that prefixes meet often; what is found always holds the tokens asked for."""
    draw, pool = random.Random(seed), BlockPool(12, 2)
    contents: dict[int, tuple[int, ...]] = {}
    held: list[BlockTable] = []
    for _ in range(300):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        found = pool.cache.match(KEY, tokens, len(tokens))
        assert [contents[block] for block in found] == [tuple(tokens[: 2 * i + 2]) for i in range(len(found))]
        if pool.num_free_blocks >= 5:
            table = _store(pool, tokens)
            contents |= {block: tuple(tokens[: 2 * i + 2]) for i, block in enumerate(table.blocks)}
            held.append(table)
        elif held:
            held.pop(draw.randrange(len(held))).free()
        pool.check_integrity(held)


# -- in the engine ------------------------------------------------------------------------------------------------


def _bits(engine: RolloutEngine, prompts: list[list[int]], n: int = 2) -> list[object]:
    groups = engine.generate_rollouts(prompts, n, SamplingParams(max_new_tokens=6, seed=3))
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.scheduler.check_integrity()
    return [(r.completion_ids, r.logprobs, r.raw_logprobs) for group in groups for r in group.rollouts]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17, 47, 48, 49, 70])
def test_warm_and_cold_calls_are_the_same_bit_for_bit(block_size: int, length: int) -> None:
    """Prompts of k blocks, one token less and one more; a fully cached prompt still computes its last token."""
    (prompt,) = random_prompts([length])
    with small_engine(shared_model("qwen3"), block_size=block_size, prefix_cache=False) as engine:
        cold = _bits(engine, [prompt])
        assert engine.stats().cache_hit_tokens == 0
    with small_engine(shared_model("qwen3"), block_size=block_size) as engine:
        assert [_bits(engine, [prompt]) for _ in range(3)] == [cold] * 3
        assert engine.stats().cache_hit_tokens == 2 * ((length - 1) // block_size * block_size)
        longer = _bits(engine, [[*prompt, 5]])
    with small_engine(shared_model("qwen3"), block_size=block_size, prefix_cache=False) as engine:
        assert longer == _bits(engine, [[*prompt, 5]])


def test_equal_prompts_of_one_call_are_computed_once() -> None:
    (prompt,) = random_prompts([40])
    with small_engine(shared_model("qwen3"), block_size=4) as engine:
        groups = engine.generate_rollouts([prompt] * 3, 2, SamplingParams(max_new_tokens=3, seed=0), keys=[5, 5, 5])
        assert engine.stats().cache_hit_tokens == 2 * 36
        assert engine.stats().cache_hit_rate == pytest.approx(72 / 120)
    assert groups[0] == groups[1] == groups[2]


def test_a_conversation_finds_its_own_completion_again() -> None:
    (prompt,) = random_prompts([16])
    with small_engine(shared_model("llama"), block_size=4) as engine:
        (group,) = engine.generate_rollouts([prompt], 1, greedy(12))
        turn = prompt + group.rollouts[0].completion_ids
        engine.generate_rollouts([[*turn, 7]], 1, greedy(4))
        # the last token of a completion has no KV, so its block is not full
        assert engine.stats().cache_hit_tokens == 24


def test_salts_keep_prompts_apart() -> None:
    (prompt,) = random_prompts([20])
    with small_engine(shared_model("llama"), block_size=4) as engine:
        for salt in ("a", "b", "a"):
            engine.generate_rollouts([prompt], 1, greedy(2), salt=salt)
        assert engine.stats().cache_hit_tokens == 16


@pytest.mark.parametrize("length", [47, 48, 49])
def test_new_weights_never_meet_old_kv(length: int) -> None:
    model = random_model("qwen3")
    (prompt,) = random_prompts([length])
    with small_engine(model, block_size=16) as engine:
        for seed in (1, 2):
            engine.generate_rollouts([prompt], 1, greedy(8))
            with torch.no_grad():
                scramble(model, seed)
            engine.weights_updated()
            (group,) = engine.generate_rollouts([prompt], 1, greedy(8))
            assert_greedy(model, prompt, group.rollouts[0].completion_ids, greedy_ids(model, prompt, 8))
            assert group.rollouts[0].policy_version == seed
