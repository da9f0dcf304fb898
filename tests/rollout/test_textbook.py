"""Figures that papers and textbooks work out by hand, from the real block pool and scheduler and the real sizes."""

import random
from collections.abc import Iterator

import torch
from transformers import Qwen3Config

from rollout.config import SamplingParams
from rollout.model.kv_cache import LayerGroup
from rollout.schedule.batch import ScheduledBatch
from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Request

GIB = 2**30
ANSWERS = (50, 120, 240, 1024)


def held_blocks(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_free_blocks


def submit(scheduler: Scheduler, prompt_length: int, new_tokens: int, n: int = 1) -> None:
    """A prompt unlike the ones before it, so that it has no reason to wait for their blocks."""
    prompt = [len(scheduler.waiting)] * prompt_length
    scheduler.add(Request(prompt, n, SamplingParams(), 0, 0, 0, 0, prompt_length + new_tokens))


def iterations(scheduler: Scheduler) -> Iterator[ScheduledBatch]:
    """Every planned iteration, before its tokens (all of them 7) are appended."""
    while scheduler.has_work:
        batch = scheduler.schedule()
        yield batch
        drawing = list(batch.forks)
        for chunk in batch.chunks:
            scheduler.computed(chunk)
            if chunk.completes and chunk.sequence.is_prompt:
                scheduler.prefilled(chunk.sequence, "logits")
            elif chunk.completes:
                drawing.append(chunk.sequence)
        for sequence in drawing:
            sequence.append(7, 0.0, 0.0)
            if sequence.num_tokens == sequence.request.max_len:
                sequence.finish_reason = "length"
                scheduler.finish(sequence)


# -- blocks -------------------------------------------------------------------------------------------------------


def test_three_requests_that_reserve_36_slots_contiguously_hold_16_in_blocks_of_4() -> None:
    """3, 5 and 2 tokens with room for 12 each: 1 + 2 + 1 blocks, so a pool of 4 is enough, and full."""
    pool = BlockPool(4, 4)
    for length in (3, 5, 2):
        BlockTable(pool).make_writable(0, length)
    assert 3 * 12 == 36
    assert held_blocks(pool) * pool.block_size == 16
    assert pool.num_free_blocks == 0


def test_a_thousand_lengths_waste_less_than_2_percent() -> None:
    """Uniform in 256 .. 1024, blocks of 16, all held at once; reserving 1,024 for each would waste 37 %."""
    draw, pool = random.Random(0), BlockPool(64_000, 16)
    lengths = [draw.randint(256, 1024) for _ in range(1000)]
    tables = [BlockTable(pool) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        for position in range(length):  # as decoding does, a token at a time
            table.make_writable(position, position + 1)
    wasted = held_blocks(pool) * 16 - sum(lengths)
    assert wasted == sum(-length % 16 for length in lengths)
    assert wasted / (held_blocks(pool) * 16) < 0.02
    assert 1 - sum(lengths) / (1000 * 1024) > 0.35


def test_16_rollouts_of_1024_tokens_hold_64_prompt_blocks_once() -> None:
    """The prompt ends with a block, so nothing is copied, and each rollout adds the one block that it writes to."""
    scheduler = Scheduler(BlockPool(200, 16), max_num_seqs=16, max_num_batched_tokens=1024)
    submit(scheduler, 1024, new_tokens=3, n=16)
    seen = [
        (len(b.forks), scheduler.pool.num_shared_blocks, held_blocks(scheduler.pool)) for b in iterations(scheduler)
    ]
    assert seen == [(0, 0, 64), (16, 64, 64), (0, 64, 64 + 16), (0, 64, 64 + 16)]
    assert scheduler.stats.cow_copies == 0
    assert scheduler.pool.num_free_blocks == 200


# -- bytes --------------------------------------------------------------------------------------------------------


def test_8192_tokens_of_16_layers_with_4_heads_of_256_are_half_a_gib() -> None:
    """Qwen3.6-27B's full-attention layers, in bf16."""
    group = LayerGroup(num_layers=16, num_heads=24, num_kv_heads=4, head_dim=256, dtype=torch.bfloat16)
    assert group.bytes_per_token() * 8192 == GIB // 2


def test_28_gib_hold_12743_blocks_of_qwen3_8b() -> None:
    config = Qwen3Config(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    group = LayerGroup.of(config, torch.bfloat16)
    assert group.bytes_per_token() == 147_456
    assert 28 * GIB // (group.bytes_per_token() * 16) == 12_743


# -- slots --------------------------------------------------------------------------------------------------------


def test_a_static_batch_idles_for_2662_slot_iterations_and_this_scheduler_for_none() -> None:
    """A static batch of 4 ends with its longest answer; here no slot is idle in an iteration that others wait in."""
    assert sum(max(ANSWERS) - answer for answer in ANSWERS) == 2662
    scheduler = Scheduler(BlockPool(2000, 16), max_num_seqs=4, max_num_batched_tokens=2048)
    for answer in ANSWERS * 5:
        submit(scheduler, 20, answer)
    idle, crowded, tokens = 0, 0, 0
    for batch in iterations(scheduler):
        busy = len(batch.chunks) + len(batch.forks)
        tokens += sum(not chunk.sequence.is_prompt for chunk in batch.chunks) + len(batch.forks)
        if scheduler.waiting:
            crowded += 1
            idle += 4 - busy
    assert idle == 0
    assert crowded > 1000
    assert tokens == 5 * sum(ANSWERS)
