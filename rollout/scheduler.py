"""Iteration-level continuous batching: which sequences run next, on which blocks. Plain Python, no tensors.

A request's prompt is prefilled once, by a sequence of its own. When its logits are there, completions fork from it as
room allows, in waves if n is large; the prompt's blocks stay until the last has forked. When blocks run out, prompts
without running completions are dropped first and then the sequence that began last is preempted; both are computed
again later. The sequence at the head of `running` is never preempted for another one, so it always advances.
"""

from collections import deque
from dataclasses import dataclass, field

from rollout.block_pool import BlockCopy, BlockPool
from rollout.sequence import Request, Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count - 1 of a sequence, whose KV is to be computed."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether logits follow: all known tokens are computed after it."""
        return self.start + self.count == self.sequence.num_tokens


@dataclass
class ScheduledBatch:
    """One iteration: block copies, then a forward over chunks, then a draw for completed chunks and forks."""

    copies: list[BlockCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    """Completions that draw their first token from their prompt's stored logits."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.forks)


@dataclass
class SchedulerStats:
    """Counters since the engine started."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    forks: int = 0
    cow_copies: int = 0
    prefix_tokens_saved: int = 0


class Scheduler:
    """Owns the waiting and running sequences and, through them, every block in use."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.forking: list[Request] = []
        """Prefilled requests with completions still to fork."""
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.forking or self.preempted or self.running)

    def schedule(self) -> ScheduledBatch:
        """Plan the next iteration: running sequences first, then whoever fits beside them."""
        batch = ScheduledBatch()
        num_preempted = self.stats.preemptions
        budget = self._schedule_running(batch)
        if self.stats.preemptions == num_preempted:
            budget = self._readmit(batch, budget)
            if not self.preempted:
                self._fork(batch)
                self._admit(batch, budget)
        self.stats.cow_copies += len(batch.copies)
        return batch

    def _schedule_running(self, batch: ScheduledBatch) -> int:
        decodes = sum(s.num_tokens - s.num_computed == 1 for s in self.running)
        budget = self.max_num_batched_tokens - decodes
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            missing = sequence.num_tokens - sequence.num_computed
            count = 1 if missing == 1 else min(missing, budget)
            if count and not self._make_room(sequence, count):
                break  # it was the last and has been preempted itself
            if count:
                self._add_chunk(batch, sequence, count)
                budget -= count if missing > 1 else 0
            i += 1
        return budget

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Free blocks until the chunk fits, at the expense of those behind it; False if it had to go itself."""
        end = sequence.num_computed + count
        while sequence.table.num_blocks_to_write(sequence.num_computed, end) > self.pool.num_free_blocks:
            if self._drop_idle_prompt():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _drop_idle_prompt(self) -> bool:
        """Drop the blocks of a prefilled prompt that still waits to fork; False if there is none."""
        if not self.forking:
            return False
        request = self.forking.pop()
        self.stats.recomputed_tokens += request.num_prompt_tokens
        request.drop_prompt()
        self.waiting.appendleft(request)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.stats.preemptions += 1
        self.stats.recomputed_tokens += victim.num_computed
        if victim.is_prompt:
            victim.request.drop_prompt()
            self.waiting.appendleft(victim.request)
            return
        self._release(victim)
        victim.num_computed, victim.recomputing = 0, True
        self.preempted.appendleft(victim)

    def _add_chunk(self, batch: ScheduledBatch, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        batch.copies += sequence.table.make_writable(start, start + count)
        batch.chunks.append(Chunk(sequence, start, count))

    def _room_beside_running(self) -> int:
        """Free blocks less one for every running sequence, so that the newcomer is not preempted at once."""
        return self.pool.num_free_blocks - len(self.running)

    def _readmit(self, batch: ScheduledBatch, budget: int) -> int:
        while self.preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.preempted[0]
            sequence.table = sequence.request.shared_prefix(self.pool.block_size) or sequence.table
            computed = len(sequence.table.blocks) * self.pool.block_size
            if sequence.table.num_blocks_to_write(computed, sequence.num_tokens) > self._room_beside_running():
                sequence.table.free()
                if not self.running and self._drop_idle_prompt():
                    continue
                break
            self.preempted.popleft()
            sequence.num_computed = computed
            self.stats.recomputed_tokens -= computed
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            count = min(sequence.num_tokens - computed, budget)
            self._add_chunk(batch, sequence, count)
            budget -= count
        return budget

    def _fork(self, batch: ScheduledBatch) -> None:
        while self.forking and len(self.running) < self.max_num_seqs:
            request = self.forking[0]
            if not self._fork_one(batch, request):
                return
            if request.prompt is None:
                self.forking.pop(0)
                if request.unforked:
                    self.waiting.appendleft(request)

    def _fork_one(self, batch: ScheduledBatch, request: Request) -> bool:
        """Fork the next completion; the last one takes the prompt's own blocks over and copies nothing."""
        assert request.prompt is not None
        prompt, length = request.prompt, request.num_prompt_tokens
        tail = length % self.pool.block_size
        take_over = len(request.unforked) == 1
        if not take_over and self.pool.num_free_blocks - len(self.running) < 1:
            if self.running:
                return False
            # alone and without room for a copy: go on with the prompt's blocks and prefill again for the others
            take_over = len(self.forking) == 1 or not self._drop_idle_prompt()
        table = prompt.table if take_over else prompt.table.fork()
        logits = request.logits_row
        if take_over:
            request.prompt = request.logits_row = None
        elif tail:
            batch.copies += table.make_writable(length, length + 1)
        index = request.unforked.popleft()
        child = Sequence(request, index, list(request.prompt_ids), table, length, self._free_slots.pop())
        child.first_logits = logits
        request.sequences.append(child)
        self.running.append(child)
        batch.forks.append(child)
        self.stats.forks += 1
        self.stats.prefix_tokens_saved += 0 if take_over else length
        return True

    def _admit(self, batch: ScheduledBatch, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = -(-request.num_prompt_tokens // self.pool.block_size)
            siblings = min(len(request.unforked), self.max_num_seqs - len(self.running)) if self.running else 0
            if needed + siblings > self._room_beside_running():
                break
            self.waiting.popleft()
            prompt = request.start_prompt(self.pool)
            self.running.append(prompt)
            count = min(prompt.num_tokens, budget)
            self._add_chunk(batch, prompt, count)
            budget -= count

    def prefilled(self, prompt: Sequence, logits_row: object) -> None:
        """A prompt's last chunk has run: its completions may fork from the next iteration on."""
        self.running.remove(prompt)
        prompt.request.logits_row = logits_row
        self.forking.append(prompt.request)

    def finish(self, sequence: Sequence) -> None:
        """A completion has its finish_reason: its blocks are free before the next iteration is planned."""
        self.running.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.table.free()
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def abort_all(self) -> None:
        """Drop everything that waits or runs, wherever an interrupt has struck: every block and slot is free."""
        self.pool.reset()
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self.waiting, self.preempted = deque(), deque()
        self.forking, self.running = [], []

    def check_integrity(self) -> None:
        """Raise if blocks or slots are not exactly those of the live sequences."""
        prompts = [r.prompt for r in self.forking if r.prompt is not None]
        self.pool.check_integrity([s.table for s in self.running + prompts])
        taken = sorted(s.slot for s in self.running if not s.is_prompt)
        if sorted(taken + self._free_slots) != list(range(self.max_num_seqs)):
            raise RuntimeError(f"slots {taken} in use and {sorted(self._free_slots)} free do not add up")
