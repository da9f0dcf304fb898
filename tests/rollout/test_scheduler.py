"""The scheduler on its own: no tensors, tokens from a random generator, and a model of what every block holds."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rollout.config import SamplingParams
from rollout.schedule.batch import Chunk, ScheduledBatch
from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Request, Sequence

Prefix = tuple[int, ...]


@dataclass
class Simulation:
    """Drives a Scheduler as the engine does, and checks at every step that each chunk finds its own past in its blocks.

    storage: for each block, the tokens up to and including each position, which is what a KV entry is made of.
    """

    num_blocks: int
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    stop_probability: float = 0.0
    prefix_cache: bool = True
    seed: int = 0
    steps: int = 0
    computed: int = 0
    storage: dict[int, dict[int, Prefix]] = field(default_factory=dict)
    table: dict[tuple[int, int], int] = field(default_factory=dict)
    """The device's token table: (slot, position) -> drawn id."""
    requests: list[Request] = field(default_factory=list)
    batches: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(
            self.pool, self.max_num_seqs, self.max_num_batched_tokens, prefix_cache=self.prefix_cache
        )

    def add(self, prompt_length: int, n: int = 1, new_tokens: int = 4) -> Request:
        prompt = [self.random.randrange(1 << 30) for _ in range(prompt_length)]
        max_len = min(prompt_length + new_tokens, self.num_blocks * self.block_size)
        request = Request(prompt, n, SamplingParams(), 0, 0, len(self.requests), 0, max_len)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def run(self) -> "Simulation":
        while self.scheduler.has_work:
            self.step()
        assert self.pool.num_free_blocks == self.num_blocks
        for request in self.requests:
            assert request.finished
            assert sorted(s.index for s in request.sequences) == list(range(request.n))
        return self

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.steps += 1
        self.batches.append(batch)
        assert batch, "sequences wait or run, but none was scheduled"
        assert sum(chunk.count for chunk in batch.chunks) <= self.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.max_num_seqs
        self.copy(batch)
        for chunk in batch.chunks:
            self.compute(chunk)
        for fork in batch.forks:
            self.expect_past(fork, fork.num_tokens)
            assert fork.first_logits == fork.request.prompt_ids
        for prompt in [c.sequence for c in batch.chunks if c.completes and c.sequence.is_prompt]:
            self.scheduler.prefilled(prompt, list(prompt.token_ids))  # stands for the logits behind them
        drawing = [c.sequence for c in batch.chunks if c.completes and not c.sequence.is_prompt] + batch.forks
        for sequence in drawing:
            self.append(sequence)
        self.scheduler.check_integrity()
        return batch

    def copy(self, batch: ScheduledBatch) -> None:
        sources = [dict(self.storage[source]) for source, _ in batch.copies]
        for (_, destination), content in zip(batch.copies, sources, strict=True):
            self.storage[destination] = content

    def compute(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert chunk.start == sequence.num_computed
        self.expect_past(sequence, chunk.start)
        end = chunk.start + chunk.count
        drawn = sequence.positions_on_device(chunk.start, end)
        assert [self.table[sequence.slot, p] for p in drawn] == [sequence.token_ids[p] for p in drawn]
        others = set(range(chunk.start, end)) - set(drawn)
        known = max(sequence.num_host_tokens, sequence.request.num_prompt_tokens)
        assert all(p < known or self.forced(sequence, p) for p in others)
        for position in range(chunk.start, chunk.start + chunk.count):
            block = sequence.table.blocks[position // self.block_size]
            assert self.pool.ref_count(block) == 1, "about to write to a shared block"
            entries = self.storage.setdefault(block, {})
            entries[position % self.block_size] = tuple(sequence.token_ids[: position + 1])
        self.scheduler.computed(chunk)
        self.computed += chunk.count

    def expect_past(self, sequence: Sequence, length: int) -> None:
        for position in range(length):
            entries = self.storage[sequence.table.blocks[position // self.block_size]]
            assert entries[position % self.block_size] == tuple(sequence.token_ids[: position + 1])

    def append(self, sequence: Sequence) -> None:
        token = self.random.randrange(1 << 30)
        self.table[sequence.slot, sequence.num_tokens] = token
        sequence.append(token, 0.0, 0.0)
        sequence.first_logits = None
        if self.random.random() < self.stop_probability:
            sequence.finish_reason = "stop"
        elif sequence.num_tokens >= sequence.request.max_len:
            sequence.finish_reason = "length"
        if sequence.finish_reason:
            self.scheduler.finish(sequence)

    @staticmethod
    def forced(sequence: Sequence, position: int) -> bool:
        return not sequence.is_prompt and not sequence.loss_mask[position - sequence.request.num_prompt_tokens]

    def force(self, sequence: Sequence, count: int) -> bool:
        """Force tokens on a completion if that leaves room for one to draw."""
        fits = sequence.finish_reason is None and sequence.num_tokens + count < sequence.request.max_len
        if fits:
            sequence.force([self.random.randrange(1 << 30) for _ in range(count)])
        return fits

    @property
    def necessary(self) -> int:
        """Tokens to compute if nothing were ever computed twice: each prompt, and completions but for their last."""
        completions = sum(len(s.completion_ids) - 1 for r in self.requests for s in r.sequences)
        return completions + sum(r.num_prompt_tokens for r in self.requests)


# -- sharing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt_length", range(1, 13))
def test_a_fork_copies_at_most_its_tail(n: int, prompt_length: int) -> None:
    """With room for all, the last completion takes the prompt's own blocks over, and full blocks are never copied."""
    sim = Simulation(num_blocks=100)
    sim.add(prompt_length, n)
    sim.run()
    stats = sim.scheduler.stats
    assert stats.cow_copies == (n - 1 if prompt_length % 4 else 0)
    assert (stats.forks, stats.prefix_tokens_saved) == (n, (n - 1) * prompt_length)
    assert sim.computed == sim.necessary


def test_full_prompt_blocks_are_held_once() -> None:
    """17 tokens are 4 full blocks and a tail: 16 completions that write one token there hold 4 + 16 blocks."""
    sim = Simulation(num_blocks=100, max_num_seqs=16)
    sim.add(17, n=16, new_tokens=3)
    sim.step()
    sim.step()
    assert sim.num_blocks - sim.pool.num_free_blocks == 4 + 16
    assert sim.pool.num_shared_blocks == 4
    sim.run()


def test_more_completions_than_may_run_go_in_waves() -> None:
    """Ten completions, three at a time, and one prefill: the prompt's blocks stay until the last has forked."""
    sim = Simulation(num_blocks=100, max_num_seqs=3)
    sim.add(7, n=10, new_tokens=2)
    sim.run()
    assert sim.computed == sim.necessary
    assert [len(batch.forks) for batch in sim.batches if batch.forks] == [3, 3, 3, 1]
    assert sim.scheduler.stats.cow_copies == 9


# -- batching -----------------------------------------------------------------------------------------------------


def test_long_prompts_are_prefilled_in_chunks_beside_decodes() -> None:
    sim = Simulation(num_blocks=100, max_num_batched_tokens=10)
    sim.add(3, new_tokens=20)
    sim.step()
    sim.step()
    sim.add(25)
    counts = [[chunk.count for chunk in sim.step().chunks] for _ in range(4)]
    assert counts == [[1, 9], [1, 9], [1, 7], [1]]
    sim.run()


def test_a_finished_sequences_blocks_are_back_before_the_next_plan() -> None:
    """The pool holds one request; the other is prefilled in the very iteration after the first ended."""
    sim = Simulation(num_blocks=3)
    first, second = sim.add(10, new_tokens=2), sim.add(10, new_tokens=2)
    while not first.finished:
        assert second.prompt is None
        sim.step()
    assert sim.pool.num_free_blocks == sim.num_blocks
    assert [chunk.sequence.request for chunk in sim.step().chunks] == [second]
    sim.run()


def test_a_free_slot_is_taken_at_once() -> None:
    """One sequence at a time: no iteration goes by without a token of some request."""
    sim = Simulation(num_blocks=100, max_num_seqs=1)
    for _ in range(5):
        sim.add(6, new_tokens=3)
    sim.run()
    assert sim.steps == 5 * (1 + 3)


def test_requests_begin_in_order() -> None:
    sim = Simulation(num_blocks=20, max_num_seqs=4)
    for _ in range(12):
        sim.add(5, n=2, new_tokens=6)
    sim.run()
    started = [chunk.sequence.request.key for b in sim.batches for chunk in b.chunks if chunk.sequence.is_prompt]
    assert list(dict.fromkeys(started)) == list(range(12))


# -- little room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("num_blocks", range(2, 9))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_any_pool_that_holds_one_sequence_is_enough(n: int, num_blocks: int, block_size: int) -> None:
    """Prompts of every length that fits, each completed until the pool is full, several at a time."""
    for prompt_length in range(1, num_blocks * block_size):
        sim = Simulation(num_blocks, block_size, max_num_seqs=5, max_num_batched_tokens=7)
        for _ in range(3):
            sim.add(prompt_length, n, new_tokens=1 << 20)
        sim.run()


def test_preempted_sequences_are_computed_again_and_go_on() -> None:
    """Four completions grow to 40 tokens each in room for 60."""
    sim = Simulation(num_blocks=15)
    for _ in range(4):
        sim.add(5, new_tokens=35)
    sim.run()
    assert sim.scheduler.stats.preemptions > 0
    assert all(s.num_tokens == 40 for request in sim.requests for s in request.sequences)


def test_a_preempted_sequence_takes_its_prompts_blocks_from_a_sibling() -> None:
    """A prompt of 8 blocks and 8 completions in 18: while one runs, another comes back behind the prompt's blocks."""
    sim = Simulation(num_blocks=18, max_num_batched_tokens=64, prefix_cache=False)
    sim.add(32, n=8, new_tokens=30)
    came_back = 0
    while sim.scheduler.has_work:
        sibling_runs = any(s.num_computed >= 32 and not s.is_prompt for s in sim.scheduler.running)
        back = [c for c in sim.step().chunks if c.count > 1 and not c.sequence.is_prompt]
        came_back += bool(sibling_runs and back)
        assert not sibling_runs or all(chunk.start == 32 for chunk in back)
    assert came_back > 2


def test_the_head_is_never_preempted() -> None:
    """The sequence that has run longest advances at every step, so there is always an end."""
    sim = Simulation(num_blocks=10, max_num_seqs=6)
    for _ in range(6):
        sim.add(7, n=2, new_tokens=25)
    while sim.scheduler.has_work:
        head = sim.scheduler.running[0] if sim.scheduler.running else None
        batch = sim.step()
        assert head is None or batch.chunks[0].sequence is head
    assert sim.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("num_blocks", [4, 6, 9, 15, 40])
def test_recomputed_tokens_are_counted(num_blocks: int) -> None:
    sim = Simulation(num_blocks, max_num_seqs=5, max_num_batched_tokens=9)
    for length in (3, 9, 6, 12, 1, 10):
        sim.add(length, n=4, new_tokens=6)
    sim.run()
    assert sim.scheduler.stats.recomputed_tokens == sim.computed - sim.necessary


def test_aborting_gives_every_block_and_slot_back() -> None:
    for steps in range(40):
        sim = Simulation(num_blocks=12, max_num_seqs=5, max_num_batched_tokens=9)
        for length in (3, 9, 6, 12, 17):
            sim.add(length, n=4, new_tokens=12)
        for _ in range(steps):
            sim.step()
        sim.scheduler.abort_all()
        sim.scheduler.check_integrity()
        assert not sim.scheduler.has_work
        assert sim.pool.num_free_blocks == 12


# -- spans --------------------------------------------------------------------------------------------------------


def test_spans_say_where_tokens_come_from() -> None:
    """A prompt of 3, 2 drawn, 2 forced, 1 drawn: four spans, and a mask over the completion."""
    sequence = Sequence(
        Request([1, 2, 3], 1, SamplingParams(), 0, 0, 0, 0, 99), 0, [1, 2, 3], BlockTable(BlockPool(9, 4))
    )
    sequence.append(4, -0.5, -0.6)
    sequence.append(5, -0.7, -0.8)
    sequence.force([6, 7])
    sequence.append(8, -0.9, -1.0)
    assert [(s.start, s.end, s.forced) for s in sequence.spans] == [
        (0, 3, True),
        (3, 5, False),
        (5, 7, True),
        (7, 8, False),
    ]
    assert sequence.completion_ids == [4, 5, 6, 7, 8]
    assert sequence.loss_mask == [True, True, False, False, True]
    assert sequence.logprobs == [-0.5, -0.7, 0.0, 0.0, -0.9]
    assert sequence.raw_logprobs == [-0.6, -0.8, 0.0, 0.0, -1.0]


def test_drawn_tokens_are_read_from_the_device_unless_the_slot_was_lost() -> None:
    sequence = Sequence(Request([1, 2], 1, SamplingParams(), 0, 0, 0, 0, 99), 0, [1, 2], BlockTable(BlockPool(9, 4)))
    for token in (3, 4):
        sequence.append(token, 0.0, 0.0)
    sequence.force([5])
    sequence.append(6, 0.0, 0.0)
    assert sequence.positions_on_device(0, 6) == [2, 3, 5]
    assert sequence.positions_on_device(3, 5) == [3]
    sequence.num_host_tokens = 6
    sequence.append(7, 0.0, 0.0)
    assert sequence.positions_on_device(0, 7) == [6]


def test_forced_tokens_are_computed_in_one_chunk_and_drawn_behind() -> None:
    """After the 3rd draw 5 tokens are forced: the next chunk is the drawn token and they, and one token is drawn."""
    sim = Simulation(num_blocks=100)
    request = sim.add(6, new_tokens=12)
    while not request.sequences or len(request.sequences[0].logprobs) < 3:
        sim.step()
    (sequence,) = request.sequences
    assert sim.force(sequence, 5)
    batch = sim.step()
    assert [(chunk.start, chunk.count) for chunk in batch.chunks] == [(8, 6)]
    assert sequence.loss_mask == [True] * 3 + [False] * 5 + [True]
    sim.run()
    assert len(sequence.completion_ids) == 12
    assert sim.computed == sim.necessary


def test_forced_tokens_take_of_the_budget_and_others_decode_beside_them() -> None:
    """20 forced tokens and the drawn one before, at 10 tokens an iteration, of which the other completion takes 1."""
    sim = Simulation(num_blocks=100, max_num_batched_tokens=10)
    requests = [sim.add(3, new_tokens=40) for _ in range(2)]
    while not all(request.sequences for request in requests):
        sim.step()
    assert sim.force(requests[1].sequences[0], 20)
    counts = [sorted(chunk.count for chunk in sim.step().chunks) for _ in range(4)]
    assert counts == [[1, 9], [1, 9], [1, 3], [1, 1]]
    sim.run()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_forced_at_random_times_on_running_and_preempted_completions(seed: int) -> None:
    """Every chunk finds its own past, whatever was preempted; each completion ends at its full length or at a stop."""
    sim, draw = random_simulation(2000 + seed), random.Random(seed)
    forced = 0
    while sim.scheduler.has_work:
        sim.step()
        live = [s for r in sim.requests for s in r.sequences if s.finish_reason is None and s.logprobs]
        if live and draw.random() < 0.3:
            forced += sim.force(draw.choice(live), draw.randint(1, 12))
    sim.run()
    masks = [s.loss_mask for r in sim.requests for s in r.sequences]
    assert all(mask[0] and mask[-1] for mask in masks)
    assert all(s.num_tokens == r.max_len for r in sim.requests for s in r.sequences if s.finish_reason == "length")
    assert forced == 0 or not all(all(mask) for mask in masks)


# -- anything -----------------------------------------------------------------------------------------------------


def random_simulation(seed: int) -> Simulation:
    rng = random.Random(seed)
    block_size, num_blocks, seqs = rng.choice([1, 2, 4, 16]), rng.randint(2, 40), rng.randint(1, 12)
    sim = Simulation(num_blocks, block_size, seqs, seqs + rng.randint(0, 30), rng.choice([0.0, 0.1, 0.5]), seed=seed)
    for _ in range(rng.randint(1, 20)):
        longest = num_blocks * block_size - 1
        sim.add(rng.randint(1, min(longest, 40)), rng.choice([1, 2, 3, 8, 20]), rng.randint(1, 30))
    return sim


@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in range(50, 300, 50))])
def test_random_requests_all_end(start: int) -> None:
    """About 3,000 requests in 300 engines of random sizes; Simulation checks every step of each."""
    for seed in range(start, start + 50):
        sim = random_simulation(seed).run()
        lengths = Counter(s.finish_reason for request in sim.requests for s in request.sequences)
        assert set(lengths) <= {"stop", "length"}


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_come_and_are_aborted_while_others_run(seed: int) -> None:
    sim = random_simulation(1000 + seed)
    rng = random.Random(seed)
    for _ in range(60):
        if sim.scheduler.has_work:
            sim.step()
        if rng.random() < 0.2:
            sim.add(rng.randint(1, sim.num_blocks * sim.block_size - 1), rng.randint(1, 5), rng.randint(1, 9))
        if rng.random() < 0.05:
            sim.scheduler.abort_all()
            assert sim.pool.num_free_blocks == sim.num_blocks
            sim.requests.clear()
    sim.run()
