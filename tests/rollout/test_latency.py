"""Nobody waits for the longest: counted in forwards and scheduled tokens, not in seconds. And memory that is let go."""

import os
from pathlib import Path

import pytest

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.schedule.batch import ScheduledBatch
from rollout.schedule.block_pool import BlockPool
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Request
from tiny_models import random_model, random_prompts, shared_model, small_engine

LONG = 4096


@pytest.mark.parametrize("lengths", [(8, 256), (256, 8), (256, 256, 8)], ids=str)
def test_rollouts_of_8_tokens_come_within_a_fifth_of_those_of_256(lengths: tuple[int, ...]) -> None:
    """Wherever they stand in the call: one prefill and 7 decodes, of one prefill and 255."""
    params = [SamplingParams(max_new_tokens=length, seed=1) for length in lengths]
    with small_engine(shared_model("qwen3")) as engine:
        seen = [
            (engine.stats().forward_steps, len(rollout.completion_ids))
            for _, rollout in engine.stream_rollouts(random_prompts([5] * len(lengths)), 2, params)
        ]
    assert seen == [(length, length) for length in sorted(lengths) for _ in range(2)]
    assert seen[0][0] <= engine.stats().forward_steps / 5


# -- a long prompt beside decodes ---------------------------------------------------------------------------------


class Plan:
    """A scheduler on its own, driven as the engine drives it; every drawn token is 7."""

    def __init__(self, chunk: int | None, budget: int) -> None:
        self.scheduler = Scheduler(BlockPool(2000, 16), 8, budget, chunk, prefix_cache=False)

    def submit(self, length: int, new_tokens: int, n: int = 1) -> Request:
        request = Request([1] * length, n, SamplingParams(), 0, 0, 0, 0, length + new_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        for chunk in batch.chunks:
            self.scheduler.computed(chunk)
            if chunk.completes and chunk.sequence.is_prompt:
                self.scheduler.prefilled(chunk.sequence, "logits")
        drawing = [c.sequence for c in batch.chunks if c.completes and not c.sequence.is_prompt]
        for sequence in drawing + batch.forks:
            sequence.append(7, 0.0, 0.0)
            if sequence.num_tokens == sequence.request.max_len:
                sequence.finish_reason = "length"
                self.scheduler.finish(sequence)
        return batch


@pytest.mark.parametrize(("chunk", "budget"), [(64, 2048), (500, 512), (2048, 300), (None, 96)])
@pytest.mark.parametrize("num_long", [1, 2])
def test_every_decode_has_its_token_beside_each_chunk_of_a_long_prompt(
    chunk: int | None, budget: int, num_long: int
) -> None:
    plan = Plan(chunk, budget)
    plan.submit(20, 2000, n=5)
    while len(plan.step().forks) < 5:
        pass
    decoding = list(plan.scheduler.running)
    long = [plan.submit(LONG + i, 1) for i in range(num_long)]
    allowed, prompt_tokens, steps = min(chunk or budget, budget - 5), 0, 0
    while any(not request.sequences for request in long):
        batch, before = plan.step(), [s.num_tokens for s in decoding]
        chunked = sum(c.count for c in batch.chunks if c.sequence.is_prompt)
        assert [(c.sequence, c.count) for c in batch.chunks[:5]] == [(s, 1) for s in decoding]
        assert chunked <= allowed
        assert all(s.num_tokens == count for s, count in zip(decoding, before, strict=True))
        prompt_tokens, steps = prompt_tokens + chunked, steps + bool(chunked)
    assert prompt_tokens == sum(request.num_prompt_tokens for request in long)
    assert steps == -(-prompt_tokens // allowed)


def test_a_long_prompt_holds_no_rollout_up_and_changes_none() -> None:
    """The same in the engine: one token for each decode and at most 256 of the prompt in every step."""
    model = random_model("qwen3", num_hidden_layers=1, max_position_embeddings=8192)
    short, long = random_prompts([12, LONG])
    sampling = SamplingParams(max_new_tokens=40, seed=3)
    with small_engine(model, prefill_chunk_size=256) as engine:
        first = engine.submit(short, 3, sampling)
        while len(first.request.sequences) < 3:
            engine.step()
        second, computed = engine.submit(long, 2, SamplingParams(max_new_tokens=2, seed=3), key=1), [0]
        while not second.request.prefilled:
            tokens = [len(s.logprobs) for s in first.request.sequences]
            engine.step()
            assert [len(s.logprobs) for s in first.request.sequences] == [count + 1 for count in tokens]
            assert second.request.prompt is not None
            computed.append(second.request.prompt.num_computed)
        while engine.has_work:
            engine.step()
        assert computed == list(range(0, LONG + 1, 256))
        groups = engine.generate_rollouts([short, long], 3, sampling)
    assert groups[0] == first.group()
    for streamed, whole in zip(second.group().rollouts, groups[1].rollouts, strict=False):
        assert streamed.logprobs == whole.logprobs[:2]


# -- memory -------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
def test_a_released_pool_goes_back_to_the_system_and_comes_back() -> None:
    """200 MB of which all pages have been touched; between the two, a call names the bytes that it misses."""
    prompts, sampling = random_prompts([40, 7]), SamplingParams(max_new_tokens=8, seed=0)
    with small_engine(shared_model("qwen3"), num_blocks=200_000_000 // (2 * 2 * 2 * 32 * 4 * 16)) as engine:
        expected, size = engine.generate_rollouts(prompts, 2, sampling), engine.stats().pool_bytes
        assert size == pytest.approx(200e6, rel=0.001)
        touch(engine)
        before = resident_bytes()
        engine.release_memory()
        assert before - resident_bytes() >= 0.95 * size
        with pytest.raises(RolloutError, match=rf"\({size} bytes are missing\)"):
            engine.generate_rollouts(prompts, 2, sampling)
        engine.restore_memory()
        assert engine.generate_rollouts(prompts, 2, sampling) == expected


def touch(engine: RolloutEngine) -> None:
    """Fill the pool with what is there already, so that no page of it is one that the system has yet to hand out."""
    assert engine._core.runner is not None
    for tensor in (engine._core.runner.cache.keys, engine._core.runner.cache.values):
        tensor.mul_(1.0)
