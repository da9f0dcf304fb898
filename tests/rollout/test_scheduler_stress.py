"""Twenty thousand random requests: everything ends, nothing leaks, and little is computed twice."""

import random
from dataclasses import dataclass, field

import pytest

from rollout.config import SamplingParams
from rollout.schedule.block_pool import BlockPool
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Request, Sequence


@dataclass
class Load:
    """One engine under requests that come, end, fork and are aborted at random, with weights that change in between."""

    seed: int
    num_requests: int
    computed: int = 0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.block_size = draw.choice([1, 2, 4, 16])
        self.longest = draw.randint(4, 120)
        self.num_sequences = draw.choice([1, 1.5, 2, 4, 20])  # full ones that the pool has room for
        num_blocks = max(2, int(self.num_sequences * self.longest) // self.block_size + 1)
        self.pool = BlockPool(num_blocks, self.block_size)
        self.forks = draw.random() < 0.5
        slots = draw.randint(1, 12)
        chunk = draw.choice([None, 1, 7, 64])
        self.scheduler = Scheduler(
            self.pool, slots, slots + draw.randint(0, 40), chunk, prefix_cache=draw.random() < 0.7
        )

    def submit(self) -> None:
        draw, room = self.draw, min(self.longest, self.pool.num_blocks * self.block_size)
        length = draw.randint(1, max(1, room - 1))
        # half of the prompts begin alike, so that the cache is met
        prompt = [1] * length if draw.random() < 0.5 else [draw.randrange(1000) for _ in range(length)]
        max_len = min(room, length + draw.randint(1, 60))
        n = draw.choice([1, 1, 2, 3, 8, 20])
        self.requests.append(Request(prompt, n, SamplingParams(), 0, 0, len(self.requests), 0, max_len))
        self.scheduler.add(self.requests[-1])

    def disturb(self) -> None:
        chance, live = self.draw.random(), [s for s in self.scheduler.running if not s.is_prompt and s.logprobs]
        if chance < 0.02 and self.requests:
            self.scheduler.abort(self.draw.choice(self.requests))
        elif self.forks and chance < 0.05 and live and len(self.requests) < 2 * self.num_requests:
            parent = self.draw.choice(live)
            fork = Request(parent.request.prompt_ids, 1, SamplingParams(), 0, 0, 0, 0, parent.request.max_len)
            self.requests.append(fork)
            self.scheduler.fork(parent, fork, index=100)
        elif chance < 0.06 and not self.scheduler.has_begun:
            self.scheduler.set_policy_version(self.scheduler.policy_version + 1)

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch, "nothing was scheduled"
        for chunk in batch.chunks:
            self.computed += chunk.count
            self.scheduler.computed(chunk)
        for prompt in [c.sequence for c in batch.chunks if c.completes and c.sequence.is_prompt]:
            self.scheduler.prefilled(prompt, object())
        for sequence in [c.sequence for c in batch.chunks if c.completes and not c.sequence.is_prompt] + batch.forks:
            self.append(sequence)
        self.scheduler.check_integrity()

    def append(self, sequence: Sequence) -> None:
        sequence.first_logits = None
        sequence.append(self.draw.randrange(1000), 0.0, 0.0)
        if sequence.num_tokens >= sequence.request.max_len or self.draw.random() < 0.02:
            sequence.finish_reason = "stop"
            self.scheduler.finish(sequence)

    def run(self) -> None:
        left = self.num_requests
        while left or self.scheduler.has_work:
            if left and (not self.scheduler.has_work or self.draw.random() < 0.3):
                self.submit()
                left -= 1
            self.disturb()
            if self.scheduler.has_work:
                self.step()
        assert self.pool.num_free_blocks == self.pool.num_blocks


def _run(seeds: range, per_engine: int) -> None:
    """No request is preempted more than 8 times; with room for two, less than half of all tokens is computed twice."""
    for seed in seeds:
        load = Load(seed, per_engine)
        load.run()
        for request in load.requests:
            assert max((s.num_preemptions for s in request.sequences), default=0) <= 8, seed
        # a fork that finds no slot computes its parent's tokens again by design
        if load.num_sequences >= 2 and not load.forks:
            assert load.scheduler.stats.recomputed_tokens < 0.5 * load.computed, seed


def test_random_loads() -> None:
    _run(range(20), 25)


@pytest.mark.slow
def test_twenty_thousand_requests() -> None:
    _run(range(1000, 1200), 100)
