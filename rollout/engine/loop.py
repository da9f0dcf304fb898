"""The part of the engine that moves: requests in, steps, events out.

Any thread may submit and abort at any moment, through an inbox. Everything else that touches requests, pool or weights
is done by the thread whose turn it is: a step, a fork, new weights, releasing memory. What happens to a request goes to
its handle, whoever stepped.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rollout.engine.handles import RolloutHandle
from rollout.engine.prompts import decode_completion
from rollout.engine.stats import Meter
from rollout.engine.turns import Turns
from rollout.errors import RolloutError
from rollout.forward.runner import ModelRunner
from rollout.model.weights import WeightWatch
from rollout.schedule.batch import ScheduledBatch
from rollout.schedule.block_pool import BlockTable
from rollout.schedule.scheduler import Scheduler
from rollout.schedule.sequence import Request, Sequence
from rollout.torch_state import own_torch_state
from rollout.types import Rollout

Ended = list[tuple[RolloutHandle, Rollout]]
"""Completions that have ended, each with the handle of its request."""

WhileRunning = Literal["refuse", "drain", "abort"]
"""What a weight update does with requests that have begun under the old weights."""


class EngineCore:
    """Owns the scheduler and the runner, and what was submitted."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        watch: WeightWatch,
        tokenizer: PreTrainedTokenizerBase | None,
        end_token_ids: frozenset[int],
        skip_special_tokens: bool,
    ) -> None:
        self.scheduler = scheduler
        self.runner: ModelRunner | None = runner
        self.meter = Meter()
        self.watch = watch
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._skip_special_tokens = skip_special_tokens
        self.turns = Turns()
        self._handles: dict[Request, RolloutHandle] = {}
        self._inbox: deque[tuple[RolloutHandle, bool]] = deque()
        """Requests to take in (False) and to abort (True), in the order in which they came."""

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self.scheduler.has_work)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, and sequences that were preempted."""
        submitted = sum(not aborted for _, aborted in self._inbox.copy())
        return len(self.scheduler.waiting) + len(self.scheduler.preempted) + submitted

    # -- turns --------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, unless: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait until no other thread steps or changes anything, and keep them from it inside.

        False: `unless` came true before that, and the turn is not ours. Raises RolloutError inside another turn.
        """
        self.turns.refuse_nesting()
        me = threading.get_ident()
        try:
            yield self.turns.take(unless)
        finally:
            try:
                if self.turns.owner == me:
                    self._end_turn()
            finally:
                if self.turns.owner == me:
                    self.turns.owner = None
                self.turns.tell()

    def _end_turn(self) -> None:
        """What was submitted or aborted meanwhile is taken in, and not left to whoever comes next."""
        with self.turns.lock:
            try:
                self._take_in()
                self.turns.owner = None  # while nobody can add to the inbox
            except BaseException as error:
                self.abort_all(error)
                raise

    def ready(self) -> ModelRunner:
        """The runner, with its pool; RolloutError if the engine is closed or its memory released."""
        runner = self.opened()
        if runner.cache.released:
            missing = runner.cache.num_bytes
            raise RolloutError(f"the KV pool has been released ({missing} bytes are missing): call restore_memory()")
        self.watch.refuse_mixed()
        return runner

    def opened(self) -> ModelRunner:
        self.turns.refuse_elsewhere()
        if self.runner is None:
            raise RolloutError("this engine is closed: make a new one")
        return self.runner

    def close(self) -> None:
        """Let go of the runner; requests that wait or run have failed."""
        self.runner = None  # first, so that nothing can be submitted any more
        self.abort_all(RolloutError("the engine was closed"))

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, handles: Iterable[RolloutHandle]) -> None:
        """Queue requests, from any thread and at any moment."""
        with self.turns.lock:
            self.ready()
            for handle in handles:
                handle.request.submitted_at = time.perf_counter()
                self._handles[handle.request] = handle
                self._inbox.append((handle, False))

    def abort(self, handle: RolloutHandle) -> None:
        """Stop a request, from any thread: at once if nobody has the turn, else before the turn is handed on.

        Never waits, since it may be called where an iterator is collected: anywhere, in the middle of a step too.
        """
        with self.turns.lock:
            if handle.request not in self._handles:
                return
            self._inbox.append((handle, True))
            if self.turns.idle:
                with self.turn():
                    pass  # its end takes the abort in; else the end of another's turn does

    def _take_in(self) -> Ended:
        """What has been submitted and aborted since the last step."""
        ended: Ended = []
        while self._inbox:
            handle, aborted = self._inbox.popleft()
            if aborted:
                ended += self._abort_request(handle.request)
            else:
                self.scheduler.add(handle.request)
                self.meter.prompt_tokens += handle.request.num_prompt_tokens
        return ended

    def _abort_request(self, request: Request) -> Ended:
        """Drop a request; its completions that have not ended end with "abort", with what they have drawn so far."""
        if request not in self._handles:
            return []
        unfinished = [s for s in request.sequences if s.finish_reason is None]
        if not unfinished:
            request.policy_version = self.scheduler.policy_version
        pool = self.scheduler.pool
        waiting = [Sequence(request, i, list(request.prompt_ids), BlockTable(pool)) for i in request.unforked]
        self.scheduler.abort(request)
        request.sequences += waiting
        for sequence in unfinished + waiting:
            sequence.finish_reason = "abort"
        return [self._end(sequence) for sequence in unfinished + waiting]

    def abort_all(self, error: BaseException) -> None:
        """After an error, wherever it struck: nothing waits or runs, every block is free, and every handle knows."""
        self.scheduler.abort_all()
        with self.turns.lock:
            self._inbox.clear()
            for handle in self._handles.values():
                handle.fail(error)
            self._handles.clear()
            self.turns.tell()

    # -- stepping -----------------------------------------------------------------------------------------------

    def step(self, unless: Callable[[], bool] = lambda: False) -> Ended:
        """One iteration, as soon as it is this thread's turn; none if `unless` comes true before that."""
        with self.turn(unless) as mine:
            return self._step() if mine else []

    @own_torch_state()
    def _step(self) -> Ended:
        """Take in, plan, run, append. Anything raised in it aborts every request."""
        runner, began = self.ready(), time.perf_counter()
        try:
            ended = self._take_in()
            self._notice_changed_weights()
            batch = self.scheduler.schedule()
            assert batch or not self.scheduler.has_begun, "sequences run, but none was scheduled"
            return ended + self._run(runner, batch) if batch else ended
        except BaseException as error:
            self.abort_all(error)
            raise
        finally:
            self.meter.seconds += time.perf_counter() - began
            self.turns.tell()

    def _run(self, runner: ModelRunner, batch: ScheduledBatch) -> Ended:
        self.meter.planned(self.scheduler)
        drawing, sampled, prefilled = runner.run(batch)
        self.watch.refuse_change()
        for chunk in batch.chunks:
            self.scheduler.computed(chunk)
        for prompt, logits in prefilled:
            self.scheduler.prefilled(prompt, logits)
        ended: Ended = []
        if sampled is not None:
            values = (sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.raw_logprobs.tolist())
            for sequence, token, logprob, raw_logprob in zip(drawing, *values, strict=True):
                if self._append(sequence, token, logprob, raw_logprob):
                    ended.append(self._end(sequence))
        self.meter.forward_steps += bool(batch.chunks)
        return ended

    def _append(self, sequence: Sequence, token: int, logprob: float, raw_logprob: float) -> bool:
        """Append a drawn token; True if the sequence ends with it, its blocks free before the next plan."""
        request = sequence.request
        sequence.append(token, logprob, raw_logprob)
        self.meter.drew(sequence)
        sequence.first_logits = None
        ends = request.sampling.stop_token_ids
        if token in ends or (token in self._end_token_ids and not request.sampling.ignore_eos):
            sequence.finish_reason = "stop"
        elif sequence.num_tokens >= request.max_len:
            sequence.finish_reason = "length"
        if sequence.finish_reason is None:
            return False
        self.scheduler.finish(sequence)
        self.meter.finished(sequence)
        return True

    def _end(self, sequence: Sequence) -> tuple[RolloutHandle, Rollout]:
        """Turn a sequence that has ended into its rollout, and hand it to its owner."""
        request = sequence.request
        handle = self._handles[request]
        ids, text, skip = sequence.completion_ids, None, self._skip_special_tokens
        if self._tokenizer is not None:
            text = decode_completion(request.prompt_ids, ids, self._tokenizer, skip_special_tokens=skip)
        rollout = handle.end(sequence, text)
        if handle.done:
            del self._handles[request]
        return handle, rollout

    def adopt(self, request: Request) -> RolloutHandle:
        """A handle of a request that begins without waiting: a fork of a running completion."""
        request.submitted_at = time.perf_counter()
        with self.turns.lock:
            handle = self._handles[request] = RolloutHandle(request, self.turns)
        return handle

    # -- weights ------------------------------------------------------------------------------------------------

    def set_policy_version(self, version: int) -> None:
        """The weights are known to be as they are now: KV of earlier versions cannot be found any more."""
        self.scheduler.set_policy_version(version)
        self.watch.acknowledge()  # last: an interrupt before it leaves the change to be noticed

    def _notice_changed_weights(self) -> None:
        """Somebody changed the weights without a word: count it as an update, unless requests have begun."""
        if self.scheduler.has_begun:
            self.watch.refuse_change()
        # a look at the values costs a little, so it is taken only before a first request, and if KV could be stale
        elif self.watch.changed(look=bool(self.scheduler.pool.cache)):
            self.set_policy_version(self.scheduler.policy_version + 1)

    def settle(self, running: WhileRunning) -> None:
        """Before the weights change: see that no request has begun under the old ones."""
        if running not in ("refuse", "drain", "abort"):
            raise RolloutError(f"running={running!r}: use refuse, drain or abort")
        if not self.scheduler.has_begun:
            return
        if running == "refuse":
            raise RolloutError(
                'requests have begun under the old weights: end them, or say running="abort" (or "drain")'
            )
        if running == "drain":
            self.drain()
        else:
            for request in self.scheduler.begun():
                self._abort_request(request)

    def drain(self) -> None:
        """Step until every request that has begun has ended; those that wait stay where they are."""
        self.scheduler.admits = False
        try:
            while self.scheduler.has_begun:
                self._step()
        finally:
            self.scheduler.admits = True
