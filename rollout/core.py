"""The part of the engine that moves: requests in, steps, completions out. One thread steps; any may submit or abort."""

import threading
import time
from collections.abc import Callable
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rollout.config import SamplingParams
from rollout.errors import RolloutError
from rollout.model_runner import ModelRunner
from rollout.prompts import decode_completion
from rollout.requests import RolloutHandle
from rollout.scheduler import Scheduler
from rollout.sequence import Request, Sequence
from rollout.stats import Meter
from rollout.types import FinishReason, Rollout

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
        tokenizer: PreTrainedTokenizerBase | None,
        end_token_ids: frozenset[int],
        skip_special_tokens: bool,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.meter = Meter()
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._handles: dict[Request, RolloutHandle] = {}
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._stepping: int | None = None
        """The thread that is in the middle of a step."""
        self._submitted: list[Request] = []
        self._aborted: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._submitted or self._aborted or self.scheduler.has_work)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, and sequences that were preempted."""
        return len(self.scheduler.waiting) + len(self.scheduler.preempted) + len(self._submitted)

    def submit(self, request: Request) -> RolloutHandle:
        """Queue a request, from any thread."""
        handle = RolloutHandle(request)
        request.submitted_at = time.perf_counter()
        with self._lock:
            self._handles[request] = handle
            self._submitted.append(request)
        return handle

    def refuse_nesting(self) -> None:
        """Raise if this thread is in the middle of a step."""
        if self._stepping == threading.get_ident():
            raise RolloutError("this engine is already generating: call it from one place at a time")

    def step(self, before: Callable[[], None]) -> Ended:
        """One iteration: take in, `before()`, plan, run, append. Anything raised in it aborts every request."""
        if not self._step_lock.acquire(blocking=False):
            raise RolloutError("another thread is stepping this engine: submit to it instead")
        began, self._stepping = time.perf_counter(), threading.get_ident()
        try:
            ended = self._take_in()
            before()
            batch = self.scheduler.schedule()
            assert batch or not self.scheduler.has_begun, "sequences run, but none was scheduled"
            if not batch:
                return ended
            self.meter.planned(self.scheduler)
            drawing, sampled, prefilled = self.runner.run(batch)
            for chunk in batch.chunks:
                self.scheduler.computed(chunk)
            for prompt, logits in prefilled:
                self.scheduler.prefilled(prompt, logits)
            if sampled is not None:
                values = (sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.raw_logprobs.tolist())
                for sequence, token, logprob, raw_logprob in zip(drawing, *values, strict=True):
                    if self._append(sequence, token, logprob, raw_logprob):
                        ended.append(self._end(sequence))
            self.meter.forward_steps += bool(batch.chunks)
            return ended
        except BaseException:
            self.abort_all()
            raise
        finally:
            self.meter.seconds += time.perf_counter() - began
            self._stepping = None
            self._step_lock.release()

    def _take_in(self) -> Ended:
        """What has been submitted and aborted since the last step."""
        with self._lock:
            submitted, aborted = self._submitted, self._aborted
            self._submitted, self._aborted = [], []
        for request in submitted:
            self.scheduler.add(request)
            self.meter.prompt_tokens += request.num_prompt_tokens
        return [ended for request in aborted for ended in self.abort_request(request)]

    def _append(self, sequence: Sequence, token: int, logprob: float, raw_logprob: float) -> bool:
        """Append a drawn token; True if the sequence ends with it, its blocks free before the next plan."""
        request = sequence.request
        sequence.token_ids.append(token)
        sequence.logprobs.append(logprob)
        sequence.raw_logprobs.append(raw_logprob)
        sequence.recomputing = False
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
        """Turn a sequence that has ended into its rollout."""
        request = sequence.request
        handle = self._handles[request]
        reason: FinishReason = sequence.finish_reason or "abort"
        ids = sequence.completion_ids
        text = None
        if self._tokenizer is not None:
            skip = self._skip_special_tokens
            text = decode_completion(request.prompt_ids, ids, self._tokenizer, skip_special_tokens=skip)
        rollout = Rollout(
            sequence.index, ids, sequence.logprobs, sequence.raw_logprobs, text, reason, request.policy_version
        )
        handle.rollouts.append(rollout)
        if request.finished:
            self._close(request)
        return handle, rollout

    def _close(self, request: Request) -> None:
        with self._lock:
            self._handles.pop(request).done = True

    def abort(self, handle: RolloutHandle) -> None:
        """Stop a request, from any thread: at once if nobody is stepping, else before the next iteration."""
        with self._lock:
            if handle.done:
                return
            self._aborted.append(handle.request)
        if self._step_lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._step_lock.release()

    def abort_request(self, request: Request) -> Ended:
        """Drop a request; completions that had begun end with "abort"."""
        if request not in self._handles:
            return []
        unfinished = [s for s in request.sequences if s.finish_reason is None]
        self.scheduler.abort(request)
        ended = []
        for sequence in unfinished:
            sequence.finish_reason = "abort"
            ended.append(self._end(sequence))
        if not ended:
            self._close(request)
        return ended

    def settle(self, running: WhileRunning, step: Callable[[], Ended]) -> None:
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
            self.drain(step)
        else:
            self.abort_begun()

    def drain(self, step: Callable[[], Ended]) -> None:
        """Step until every request that has begun has ended; those that wait stay where they are."""
        self.scheduler.admits = False
        try:
            while self.scheduler.has_begun:
                step()
        finally:
            self.scheduler.admits = True

    def abort_begun(self) -> None:
        """Drop every request that has begun; those that wait stay."""
        for request in self.scheduler.begun():
            self.abort_request(request)

    def abort_all(self) -> None:
        """After an error or an interrupt, wherever it struck: nothing waits or runs, and every block is free."""
        self.scheduler.abort_all()
        with self._lock:
            self._submitted, self._aborted = [], []
            for handle in self._handles.values():
                handle.done = True
            self._handles.clear()

    def fork(
        self, handle: RolloutHandle, index: int, sampling: SamplingParams | None, key: int | None, max_len: int
    ) -> RolloutHandle:
        """Fork completion `index` of a running request into a request of its own; max_len bounds its length."""
        request = handle.request
        parent = next((s for s in request.sequences if s.index == index and s.finish_reason is None), None)
        if parent is None or not parent.logprobs:
            raise RolloutError(f"completion {index} of this request is not running, so it cannot be forked")
        params = sampling or request.sampling
        max_len = min(request.num_prompt_tokens + params.max_new_tokens, max_len)
        if max_len <= parent.num_tokens:
            raise RolloutError(f"completion {index} has {len(parent.logprobs)} tokens: raise max_new_tokens to fork it")
        family = request.family
        fork = Request(
            prompt_ids=request.prompt_ids,
            n=1,
            sampling=params,
            seed=request.seed if params.seed is None else params.seed,
            step=request.step,
            key=request.key if key is None else key,
            purpose=request.purpose,
            max_len=max_len,
            salt=request.salt,
            submitted_at=time.perf_counter(),
        )
        with self._lock:
            forked = self._handles[fork] = RolloutHandle(fork)
        child = self.scheduler.fork(parent, fork, family.n + family.num_forked)
        family.num_forked += 1
        if child.slot >= 0:
            self.runner.copy_last_token(parent.slot, child.slot)
        return forked
