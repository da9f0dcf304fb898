"""Iteration-level continuous batching: which sequences run next, on which blocks. Plain Python, no tensors.

A request's prompt is prefilled once, by a sequence of its own. When its logits are there, completions fork from it as
room allows, in waves if n is large; the prompt's blocks stay until the last has forked. When blocks run out, prompts
without running completions are dropped first and then the sequence that began last is preempted; both are computed
again later. The sequence at the head of `running` is never preempted for another one, so it always advances.
"""

from collections import deque

from rollout.schedule import prefixes
from rollout.schedule.batch import Chunk, ScheduledBatch, SchedulerStats
from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.sequence import Request, Sequence
from rollout.schedule.slots import Slots


class Scheduler:
    """Owns the waiting and running sequences and, through them, every block in use."""

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_size: int | None = None,
        *,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk_size = prefill_chunk_size or max_num_batched_tokens
        self.prefix_cache = prefix_cache
        self.policy_version = 0
        self.admits = True
        """Whether waiting requests may begin; a drain sets it to False."""
        self.waiting: deque[Request] = deque()
        self.forking: list[Request] = []
        """Prefilled requests with completions still to fork."""
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._slots = Slots(max_num_seqs)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.has_begun)

    @property
    def has_begun(self) -> bool:
        """Whether some sequence has computed something under the current weights."""
        return bool(self.forking or self.preempted or self.running)

    # -- planning -----------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Plan the next iteration: running sequences first, then whoever fits beside them."""
        batch = ScheduledBatch()
        num_preempted = self.stats.preemptions
        budget = self._schedule_running(batch)
        if self.stats.preemptions == num_preempted:
            budget = self._readmit(batch, budget)
            if not self.preempted:
                self._fork(batch)
                if self.admits:
                    self._admit(batch, budget)
        self.stats.cow_copies += len(batch.copies)
        return batch

    def _schedule_running(self, batch: ScheduledBatch) -> int:
        """Chunks for the running sequences; returns how many tokens of prompts are left for others.

        A sequence with more than one token to compute (a prompt, preempted or forced tokens) takes of that budget.
        """
        decodes = sum(s.num_tokens - s.num_computed == 1 for s in self.running)
        budget = min(self.max_num_batched_tokens - decodes, self.prefill_chunk_size)
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

    def _add_chunk(self, batch: ScheduledBatch, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        batch.copies += sequence.table.make_writable(start, start + count)
        batch.chunks.append(Chunk(sequence, start, count))

    def _room_beside_running(self, num_preemptions: int = 0) -> int:
        """Free blocks less what the running sequences may soon take.

        One block each; twice as much for every time that the newcomer has been preempted, so that it is not again.
        """
        return self.pool.num_free_blocks - (len(self.running) << num_preemptions)

    def _readmit(self, batch: ScheduledBatch, budget: int) -> int:
        while self.preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.preempted[0]
            computed = prefixes.adopt(sequence, self.pool, cached=self.prefix_cache)
            needed = sequence.table.num_blocks_to_write(computed, sequence.num_tokens)
            if needed > self._room_beside_running(sequence.num_preemptions):
                sequence.table.free()
                if not self.running and self._drop_idle_prompt():
                    continue
                break
            self.preempted.popleft()
            self.stats.recomputed_tokens -= computed
            sequence.slot = self._slots.take()
            budget -= self._start(batch, sequence, computed, budget)
        return budget

    def _start(self, batch: ScheduledBatch, sequence: Sequence, computed: int, budget: int) -> int:
        """Let a sequence run whose first `computed` tokens are in its blocks; returns the tokens of its first chunk."""
        sequence.num_computed = computed
        self.running.append(sequence)
        count = min(sequence.num_tokens - computed, budget)
        self._add_chunk(batch, sequence, count)
        return count

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
        take_over = len(request.unforked) == 1
        while not take_over and self._room_beside_running() < 1:
            if self.running:
                return False
            # alone and without room for a copy: go on with the prompt's blocks and prefill again for the others
            take_over = len(self.forking) == 1 or not self._drop_idle_prompt()
        table = prompt.table if take_over else prompt.table.fork()
        logits = request.logits_row
        if take_over:
            request.prompt = request.logits_row = None
        elif length % self.pool.block_size:
            batch.copies += table.make_writable(length, length + 1)
        child = request.begin_next(table, self._slots.take(), prompt.cached, logits)
        self.running.append(child)
        batch.forks.append(child)
        self.stats.forks += 1
        self.stats.prefix_tokens_saved += 0 if take_over else length
        return True

    def _admit(self, batch: ScheduledBatch, budget: int) -> None:
        """Begin waiting requests, in order; one whose prefix is just being computed waits for it."""
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            request.policy_version = self.policy_version
            prompt = request.start_prompt(self.pool)
            computed = prefixes.adopt(prompt, self.pool, cached=self.prefix_cache)
            if self.prefix_cache and prefixes.being_computed(prompt, computed, self.running, self.pool.block_size):
                request.drop_prompt()
                continue
            needed = prompt.table.num_blocks_to_write(computed, prompt.num_tokens)
            siblings = min(len(request.unforked), self.max_num_seqs - len(self.running)) if self.running else 0
            if needed + siblings > self._room_beside_running():
                request.drop_prompt()
                return
            self.waiting.remove(request)
            self.stats.recomputed_tokens -= min(computed, request.lost_tokens)
            request.lost_tokens = 0
            self.pool.cache.count(prompt.num_tokens, computed)
            budget -= self._start(batch, prompt, computed, budget)

    # -- what has been computed ---------------------------------------------------------------------------------

    def computed(self, chunk: Chunk) -> None:
        """A chunk has run: its KV is there, and its full blocks can be found by others."""
        chunk.sequence.num_computed += chunk.count
        if self.prefix_cache:
            prefixes.register(chunk.sequence, self.pool)

    def set_policy_version(self, version: int) -> None:
        """The weights changed: KV of earlier ones cannot be found any more."""
        self.policy_version = version
        self.pool.forget_cached()

    def fork(self, parent: Sequence, request: Request, index: int) -> Sequence:
        """Let a request of one completion go on from where a running one stands.

        The fork shares every block, its unfilled last one too, until either writes to it. Without a slot to spare it
        waits and computes its KV again.
        """
        child = parent.fork(request, index, BlockTable(self.pool))
        request.begin_as_fork(parent.request, child)
        self.stats.forks += 1
        room = self._slots.num_free and len(self.running) < self.max_num_seqs
        if room and parent.table.blocks and not parent.recomputing:
            child.share_blocks(parent)
            child.slot = self._slots.take()
            self.stats.prefix_tokens_saved += parent.num_computed
            self.running.append(child)
        else:
            child.num_host_tokens = child.num_tokens
            self.stats.recomputed_tokens += child.num_tokens - 1
            self.preempted.append(child)
        return child

    # -- leaving ------------------------------------------------------------------------------------------------

    def _drop_idle_prompt(self) -> bool:
        """Drop the blocks of a prefilled prompt that still waits to fork; False if there is none."""
        if not self.forking:
            return False
        request = self.forking.pop()
        self._give_up_prompt(request, request.num_prompt_tokens)
        return True

    def _give_up_prompt(self, request: Request, num_tokens: int) -> None:
        """Free a prompt of which num_tokens are computed; the request waits again, before the others."""
        self.stats.recomputed_tokens += num_tokens
        request.drop_prompt(num_tokens)
        self.waiting.appendleft(request)

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.stats.preemptions += 1
        if victim.is_prompt:
            self._give_up_prompt(victim.request, victim.num_computed)
            return
        self.stats.recomputed_tokens += victim.num_computed
        self._release(victim)
        victim.preempted()
        self.preempted.appendleft(victim)

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
        sequence.cached = []
        self._slots.give_back(sequence)

    def abort(self, request: Request) -> None:
        """Drop whatever of a request waits or runs, and give its blocks back; finished completions stay as they are."""
        for sequence in [s for s in self.running if s.request is request]:
            self.finish(sequence)
        for queue in (self.waiting, self.forking):
            if request in queue:
                queue.remove(request)
        self.preempted = deque(s for s in self.preempted if s.request is not request)
        request.drop_prompt()
        request.unforked.clear()

    def begun(self) -> list[Request]:
        """Requests that have computed something under the current weights."""
        return list(dict.fromkeys([*self.forking, *(s.request for s in (*self.running, *self.preempted))]))

    def abort_all(self) -> None:
        """Drop everything that waits or runs, wherever an interrupt has struck: every block and slot is free."""
        self.pool.reset()
        self._slots.reset()
        self.waiting, self.preempted = deque(), deque()
        self.forking, self.running = [], []

    def check_integrity(self) -> None:
        """Raise if blocks or slots are not exactly those of the live sequences."""
        prompts = [r.prompt for r in self.forking if r.prompt is not None]
        self.pool.check_integrity([s.table for s in self.running + prompts])
        self._slots.check(self.running)
