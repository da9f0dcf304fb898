"""Several consumers of one engine: each gets its own, once, whoever steps. And one thing at a time, in any threads."""

import contextlib
import functools
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rollout import Rollout, RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.engine.handles import RolloutHandle
from rollout.types import TokenEvent
from tiny_models import random_model, random_prompts, shared_model, small_engine

SAMPLING = SamplingParams(max_new_tokens=8, seed=5)
PROMPTS = random_prompts([5, 20, 9, 33])
OTHERS = random_prompts([7, 18], seed=1)
TIGHT = {"block_size": 4, "num_blocks": 26, "max_num_seqs": 5}
"""Prompts wait, and sequences are preempted."""

LENGTHS = [SamplingParams(max_new_tokens=length, seed=5) for length in (3, 20, 20, 20)]
"""One per prompt."""

Streamed = list[tuple[int, Rollout]]


def as_streamed(groups: list[RolloutGroup]) -> Streamed:
    return [(place, rollout) for place, group in enumerate(groups) for rollout in group.rollouts]


def in_order(streamed: Streamed) -> Streamed:
    return sorted(streamed, key=lambda entry: (entry[0], entry[1].index))


def alone(prompts: list[list[int]], n: int = 2, sampling: Any = SAMPLING) -> Streamed:
    """What a call returns without company."""
    with small_engine(shared_model("qwen3")) as engine:
        return as_streamed(engine.generate_rollouts(prompts, n, sampling))


@pytest.fixture(params=[{}, TIGHT], ids=["roomy", "tight"])
def engine(request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
    """Idle at the end, with every block free."""
    with small_engine(shared_model("qwen3"), **request.param) as engine:
        yield engine
        idle(engine)


def idle(engine: RolloutEngine) -> None:
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert not engine.has_work


def together(*work: Callable[[], Any]) -> list[Any]:
    """Results of functions that run in threads of their own and begin at once; an exception is raised here."""
    barrier = threading.Barrier(len(work))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(work)) as pool:
        futures: list[Future[Any]] = [pool.submit(begin, function) for function in work]
        return [future.result(timeout=120) for future in futures]


# -- in one thread ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_call_inside_a_stream_takes_nothing_from_it(engine: RolloutEngine, at: int) -> None:
    streamed: Streamed = []
    for entry in engine.stream_rollouts(PROMPTS, 2, SAMPLING):
        streamed.append(entry)
        if len(streamed) == at:
            assert as_streamed(engine.generate_rollouts(OTHERS, 3, SAMPLING)) == alone(OTHERS, 3)
    assert in_order(streamed) == alone(PROMPTS)


def test_streams_within_streams(engine: RolloutEngine) -> None:
    seen: list[Streamed] = [[], [], []]
    for first in engine.stream_rollouts(PROMPTS, 1, SAMPLING):
        seen[0].append(first)
        inner: Streamed = []
        for second in engine.stream_rollouts(OTHERS, 2, SAMPLING):
            inner.append(second)
            seen[2] = list(engine.stream_rollouts(PROMPTS[:1], 3, SAMPLING))
        assert in_order(inner) == alone(OTHERS)
    assert in_order(seen[0]) == alone(PROMPTS, 1)
    assert in_order(seen[2]) == alone(PROMPTS[:1], 3)


@pytest.mark.parametrize("pattern", ["ab", "aab", "abbb", "abc"])
def test_streams_consumed_in_turns(engine: RolloutEngine, pattern: str) -> None:
    prompts = {"a": PROMPTS, "b": OTHERS, "c": PROMPTS[1:3]}
    streams = {name: engine.stream_rollouts(prompts[name], 3, SAMPLING) for name in sorted(set(pattern))}
    seen: dict[str, Streamed] = {name: [] for name in streams}
    for name in pattern * 13:  # 12 rollouts, and the end
        seen[name] += itertools.islice(streams[name], 1)
    assert {name: in_order(entries) for name, entries in seen.items()} == {
        name: alone(prompts[name], 3) for name in streams
    }


def test_submitted_requests_live_through_a_call(engine: RolloutEngine) -> None:
    handles = [engine.submit(prompt, 2, SAMPLING, key=i) for i, prompt in enumerate(PROMPTS)]
    for _ in range(3):
        engine.step()
    assert as_streamed(engine.generate_rollouts(OTHERS, 2, SAMPLING)) == alone(OTHERS)
    while not all(handle.done for handle in handles):
        engine.step()
    assert as_streamed([handle.group() for handle in handles]) == alone(PROMPTS)


def test_steps_by_hand_take_nothing_from_a_stream(engine: RolloutEngine) -> None:
    stream, returned = engine.stream_rollouts(PROMPTS, 2, LENGTHS), list[Rollout]()
    streamed = [next(stream)]
    while engine.has_work:
        returned += [rollout for _, rollout in engine.step()]
    streamed += stream
    assert in_order(streamed) == alone(PROMPTS, 2, LENGTHS)
    assert returned == [rollout for _, rollout in streamed[-len(returned) :]]


def test_dropping_a_stream_aborts_only_its_own(engine: RolloutEngine) -> None:
    kept, dropped = (engine.stream_rollouts(prompts, 2, SAMPLING) for prompts in (PROMPTS, OTHERS))
    streamed = [next(kept)]
    next(dropped)
    del dropped
    gc.collect()
    assert in_order([*streamed, *kept]) == alone(PROMPTS)


# -- events -------------------------------------------------------------------------------------------------------


def test_a_handles_events_are_its_tokens_and_rollouts_each_once() -> None:
    with small_engine(shared_model("qwen3"), **TIGHT) as engine:
        handles = [engine.submit(prompt, 3, SAMPLING, key=i) for i, prompt in enumerate(PROMPTS)]
        seen: list[list[Any]] = [[] for _ in handles]
        while not all(handle.done for handle in handles):
            engine.generate_rollouts(OTHERS[:1], 1, SamplingParams(max_new_tokens=2))
            for handle, events in zip(handles, seen, strict=True):
                events += handle.events()
        assert all(handle.events() == [] for handle in handles)
        for handle, events in zip(handles, seen, strict=True):
            rollouts = [event for event in events if isinstance(event, Rollout)]
            assert rollouts == handle.rollouts
            for made in rollouts:
                tokens = [
                    e for e in events[: events.index(made)] if isinstance(e, TokenEvent) and e.index == made.index
                ]
                assert [token.place for token in tokens] == list(range(8))
                assert [token.token_id for token in tokens] == made.completion_ids
                assert [token.logprob for token in tokens] == made.logprobs
                assert [token.raw_logprob for token in tokens] == made.raw_logprobs
            assert len(events) == 3 * 8 + 3


def test_a_token_can_be_read_as_soon_as_it_is_drawn() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        handle, counts = engine.submit(PROMPTS[0], 1, SAMPLING), []
        while not handle.done:
            engine.step()
            counts.append(len(handle.events()))
    assert counts == [0, *[1] * 7, 2]  # the prefill; the last token comes with its rollout


# -- aborts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}], ids=str)
def test_every_completion_of_an_aborted_request_ends(steps: int, options: dict[str, Any]) -> None:
    """Also those that have not begun, with nothing drawn, so that a group has n rollouts."""
    with small_engine(shared_model("qwen3"), **options) as engine:
        handle = engine.submit(PROMPTS[1], 3, SAMPLING)
        for _ in range(steps):
            engine.step()
        engine.abort(handle)
        assert handle.done
        rollouts = handle.group().rollouts
        assert [(r.index, r.finish_reason) for r in rollouts] == [(i, "abort") for i in range(3)]
        for ours, (_, whole) in zip(rollouts, alone([PROMPTS[1]], 3), strict=True):
            assert ours.completion_ids == whole.completion_ids[: len(ours.completion_ids)]
            assert ours.logprobs == whole.logprobs[: len(ours.completion_ids)]
        idle(engine)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_an_abort_from_another_thread_reaches_its_stream(after: int) -> None:
    """By new weights for all that has begun: the stream yields what was drawn, and ends; what waits goes on."""
    tensors = random_model("qwen3").state_dict()
    with small_engine(random_model("qwen3"), max_num_seqs=4) as engine:
        stream = engine.stream_rollouts(PROMPTS, 2, LENGTHS)
        streamed = [next(stream) for _ in range(after)]
        together(lambda: engine.update_weights(tensors, running="abort"))
        streamed = in_order([*streamed, *stream])
        idle(engine)
    assert [(place, made.index) for place, made in streamed] == list(itertools.product(range(4), range(2)))
    aborted = [made for _, made in streamed if made.finish_reason == "abort"]
    assert aborted
    for (_, ours), (_, whole) in zip(streamed, alone(PROMPTS, 2, LENGTHS), strict=True):
        assert ours.logprobs == whole.logprobs[: len(ours.logprobs)]
        assert ours in aborted or ours.completion_ids == whole.completion_ids


def test_an_abort_in_the_middle_of_a_step_is_done_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, which does not wait for the step, and from a hook of the model in the same one."""
    with small_engine(shared_model("qwen3")) as engine:
        handles = [engine.submit(prompt, 2, SAMPLING) for prompt in PROMPTS]
        runner = engine._core.runner
        assert runner is not None
        forward = runner.execute

        def aborting(*arguments: Any) -> Any:
            thread = threading.Thread(target=engine.abort, args=(handles[0],))
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            engine.abort(handles[1])
            return forward(*arguments)

        monkeypatch.setattr(runner, "execute", aborting)
        engine.step()
        assert [handle.done for handle in handles] == [True, True, False, False]
        for handle in handles:
            engine.abort(handle)
        idle(engine)


# -- in several threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [2, 5])
def test_calls_and_streams_in_threads_of_their_own(engine: RolloutEngine, num_threads: int) -> None:
    def call() -> Streamed:
        return as_streamed(engine.generate_rollouts(PROMPTS, 2, SAMPLING))

    def stream() -> Streamed:
        return in_order(list(engine.stream_rollouts(OTHERS, 3, SAMPLING)))

    def by_hand() -> Streamed:
        handles = [engine.submit(prompt, 2, SAMPLING, key=i) for i, prompt in enumerate(PROMPTS)]
        while not all(handle.done for handle in handles):
            engine.step()
        return as_streamed([handle.group() for handle in handles])

    work = list(itertools.islice(itertools.cycle([call, stream, by_hand]), num_threads))
    right = list(itertools.islice(itertools.cycle([alone(PROMPTS), alone(OTHERS, 3), alone(PROMPTS)]), num_threads))
    assert together(*work) == right


def test_many_short_calls_in_threads(engine: RolloutEngine) -> None:
    """Threads that come and go, so that whoever steps is always another."""
    right = {i: alone([PROMPTS[i]], 1) for i in range(4)}

    def calls(which: int) -> bool:
        return all(
            as_streamed(engine.generate_rollouts([PROMPTS[which]], 1, SAMPLING)) == right[which] for _ in range(6)
        )

    assert together(*(lambda i=i: calls(i) for i in range(4))) == [True] * 4


def test_nobody_waits_for_ever_behind_one_who_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a turn has it after the step that runs, however eager the other thread."""
    with small_engine(shared_model("qwen3")) as engine:
        runner = engine._core.runner
        assert runner is not None
        forward, began, asked = runner.execute, threading.Event(), threading.Event()

        def waiting(*arguments: Any) -> Any:
            began.set()
            assert asked.wait(60)
            while engine.policy_version == 0 and not engine._core.turns._line:
                pass  # until the other thread stands in line
            return forward(*arguments)

        monkeypatch.setattr(runner, "execute", waiting)
        steps: list[int] = []

        def update() -> None:
            assert began.wait(60)
            asked.set()
            engine.update_weights(shared_model("qwen3").state_dict(), running="abort")
            steps.append(engine.stats().forward_steps)

        together(update, lambda: engine.generate_rollouts(PROMPTS[:1], 1, SamplingParams(max_new_tokens=40)))
    assert steps == [1]


# -- errors -------------------------------------------------------------------------------------------------------


def failing_at(engine: RolloutEngine, call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls = engine._core.runner, itertools.count()
    assert runner is not None
    forward = runner.execute

    def failing(*arguments: Any) -> Any:
        if next(calls) == call:
            raise error
        return forward(*arguments)

    monkeypatch.setattr(runner, "execute", failing)


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt(), RolloutError("broken")], ids=repr)
def test_an_error_reaches_every_consumer_with_its_cause(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that had ended rollouts to yield yields them first; a handle raises instead of a short group."""
    with small_engine(shared_model("qwen3")) as engine:
        short = SamplingParams(max_new_tokens=2, seed=5)
        stream = engine.stream_rollouts(PROMPTS, 1, [short, short, SAMPLING, SAMPLING])
        streamed, handle = [next(stream)], engine.submit(PROMPTS[0], 2, SAMPLING)
        failing_at(engine, 4, error, monkeypatch)
        with pytest.raises(type(error)):
            engine.generate_rollouts(OTHERS, 2, SAMPLING)
        streamed.append(next(stream))
        for told in (lambda: next(stream), handle.group, lambda: [handle.events() for _ in range(2)]):
            with pytest.raises(RolloutError, match=f"ended by {type(error).__name__}") as raised:
                told()
            assert raised.value.__cause__ is error
        assert [place for place, _ in streamed] == [0, 1]
        idle(engine)
        assert as_streamed(engine.generate_rollouts(PROMPTS, 2, SAMPLING)) == alone(PROMPTS)


def test_an_error_in_one_thread_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        error = RuntimeError("out of luck")
        failing_at(engine, 12, error, monkeypatch)
        long = SamplingParams(max_new_tokens=60, seed=1)

        def call() -> BaseException:
            with pytest.raises((RuntimeError, RolloutError)) as raised:
                engine.generate_rollouts(PROMPTS, 2, long)
            return raised.value

        raised = together(call, call, call)
        assert sorted(type(found).__name__ for found in raised) == ["RolloutError", "RolloutError", "RuntimeError"]
        assert all(found is error or found.__cause__ is error for found in raised)
        idle(engine)


def test_an_interrupt_of_one_who_waits_ends_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread, here while another one steps; that one goes on as if alone."""
    with small_engine(shared_model("qwen3")) as engine:
        runner, interrupted = engine._core.runner, threading.Event()
        assert runner is not None
        forward = runner.execute

        def waited_for(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() and not interrupted.is_set():
                while threading.main_thread().ident not in engine._core.turns._line:
                    pass
                interrupted.set()
                signal.raise_signal(signal.SIGINT)
            return forward(*arguments)

        monkeypatch.setattr(runner, "execute", waited_for)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(engine.generate_rollouts, PROMPTS, 2, SAMPLING)
            with pytest.raises(KeyboardInterrupt):
                list(itertools.chain.from_iterable(iter(lambda: engine.generate_rollouts(OTHERS, 2, SAMPLING), [])))
            assert as_streamed(other.result(timeout=60)) == alone(PROMPTS)
        idle(engine)


def test_closing_the_engine_ends_what_others_wait_for() -> None:
    engine = small_engine(shared_model("qwen3"))
    long = SamplingParams(max_new_tokens=400, seed=1)
    begun = threading.Event()

    def stream() -> str:
        entries = engine.stream_rollouts(PROMPTS, 2, [SAMPLING, long, long, long])
        next(entries)
        begun.set()
        with pytest.raises(RolloutError) as raised:
            list(entries)
        return str(raised.value)

    def close() -> None:
        assert begun.wait(60)
        engine.close()

    told, _ = together(stream, close)
    assert "closed" in told
    idle(engine)


@pytest.mark.parametrize(
    "name", ["generate", "stream", "step", "fork", "update", "updated", "drain", "release", "close"]
)
def test_a_step_inside_a_step_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        runner = engine._core.runner
        handle = engine.submit(PROMPTS[0], 1, SAMPLING)
        calls: dict[str, Callable[[], object]] = {
            "generate": lambda: engine.generate_rollouts(PROMPTS, 1, SAMPLING),
            "stream": lambda: next(engine.stream_rollouts(OTHERS, 1, SAMPLING)),
            "step": engine.step,
            "fork": lambda: engine.fork(handle, 0),
            "update": lambda: engine.update_weights({}),
            "updated": engine.weights_updated,
            "drain": engine.drain,
            "release": engine.release_memory,
            "close": engine.close,
        }
        assert runner is not None
        forward = runner.execute

        def nested(*arguments: Any) -> Any:
            with pytest.raises(RolloutError, match="already generating"):
                calls[name]()
            return forward(*arguments)

        monkeypatch.setattr(runner, "execute", nested)
        while not handle.done:
            engine.step()
        assert [(0, rollout) for rollout in handle.rollouts] == alone([PROMPTS[0]], 1)
        idle(engine)


# -- weights ------------------------------------------------------------------------------------------------------

NUM_SWAPS, NUM_ROLLOUTS = 200, 400


@functools.cache
def ends() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    first, last = (random_model("llama", seed=seed, num_hidden_layers=1).state_dict() for seed in (0, 1))
    return first, last


def small_weights(version: int) -> dict[str, torch.Tensor]:
    """Version 0's are those of random_model; each version's are others."""
    first, last = ends()
    return {name: first[name].lerp(last[name], version / NUM_SWAPS) for name in first}


def check_versions(groups: list[RolloutGroup], prompts: list[list[int]], sampling: SamplingParams) -> int:
    """Every rollout is, bit for bit, that of a fresh engine with its version's weights; returns how many versions."""
    by_version: dict[int, list[tuple[int, Rollout]]] = {}
    for place, group in enumerate(groups):
        for rollout in group.rollouts:
            by_version.setdefault(rollout.policy_version, []).append((place, rollout))
    with small_engine(random_model("llama", num_hidden_layers=1)) as fresh:
        for version, made in by_version.items():
            fresh.update_weights(small_weights(version))
            places = sorted({place for place, _ in made})
            again = fresh.generate_rollouts(
                [prompts[p] for p in places], len(groups[0].rollouts), sampling, keys=places
            )
            right = {(place, r.index): r for place, group in zip(places, again, strict=True) for r in group.rollouts}
            for place, rollout in made:
                whole, count = right[place, rollout.index], len(rollout.completion_ids)
                assert rollout.completion_ids == whole.completion_ids[:count], (version, place)
                assert rollout.logprobs == whole.logprobs[:count], (version, place)
                assert rollout.finish_reason == "abort" or count == len(whole.completion_ids)
    return len(by_version)


def test_each_of_400_rollouts_is_that_of_the_weights_its_version_names() -> None:
    """200 swaps from another thread meanwhile, half of which let the others end and half of which are tried."""
    prompts = random_prompts([11, 3, 26, 17] * (NUM_ROLLOUTS // 8))
    sampling = SamplingParams(max_new_tokens=5, seed=2)
    with small_engine(random_model("llama", num_hidden_layers=1), max_num_seqs=3, block_size=4) as engine:
        refused: list[str] = []

        def swap() -> None:
            for version in range(1, NUM_SWAPS + 1):
                tensors = small_weights(version)
                try:
                    engine.update_weights(tensors, running="refuse" if version % 2 else "drain")
                except RolloutError as error:
                    refused.append(str(error))
                    assert engine.policy_version == version - 1
                    engine.update_weights(tensors, running="drain")
            assert engine.policy_version == NUM_SWAPS

        groups, _ = together(lambda: engine.generate_rollouts(prompts, 2, sampling), swap)
        idle(engine)
    assert set(refused) <= {'requests have begun under the old weights: end them, or say running="abort" (or "drain")'}
    assert sum(len(group.rollouts) for group in groups) == NUM_ROLLOUTS
    assert check_versions(groups, prompts, sampling) > 20


def test_swaps_that_abort_leave_whole_prefixes_of_one_version() -> None:
    prompts, sampling = random_prompts([11, 3, 26, 17] * 6), SamplingParams(max_new_tokens=12, seed=2)
    with small_engine(random_model("llama", num_hidden_layers=1), max_num_seqs=3, block_size=4) as engine:
        done = threading.Event()

        def swap() -> None:
            for version in itertools.count(1):
                if done.wait(0.02):
                    return
                engine.update_weights(small_weights(version), running="abort")

        def call() -> list[RolloutGroup]:
            try:
                return engine.generate_rollouts(prompts, 2, sampling)
            finally:
                done.set()

        groups, _ = together(call, swap)
        idle(engine)
    assert [len(group.rollouts) for group in groups] == [2] * len(prompts)
    check_versions(groups, prompts, sampling)


def test_everything_at_once_from_many_threads() -> None:
    """Calls, streams that are dropped, aborts, forks, releases and swaps: whoever waits gets the right thing."""
    prompts, sampling = random_prompts([11, 3, 26, 17] * 2), SamplingParams(max_new_tokens=6, seed=2)
    with small_engine(random_model("llama", num_hidden_layers=1), max_num_seqs=4, block_size=4) as engine:
        stop = threading.Event()

        def call() -> list[RolloutGroup]:
            return [group for _ in range(4) for group in engine.generate_rollouts(prompts, 2, sampling)]

        def drop() -> None:
            for taken in range(12):
                list(itertools.islice(engine.stream_rollouts(prompts, 2, sampling), taken))

        def fork() -> None:
            for _ in range(8):
                handle, forks = engine.submit(prompts[0], 1, sampling), list[RolloutHandle]()
                while not handle.done:
                    engine.step()
                    with contextlib.suppress(RolloutError):  # not begun, or at its end
                        forks.append(engine.fork(handle, 0))
                for abandoned in forks[::2]:
                    engine.abort(abandoned)
                while not all(made.done for made in forks):
                    engine.step()

        def swap() -> None:
            for version in itertools.count(1):
                if stop.wait(0.01):
                    return
                engine.update_weights(small_weights(version), running="drain")
                with pytest.raises(RolloutError, match="no 'extra'"):
                    engine.update_weights({"extra": torch.zeros(1)})

        def consume() -> list[RolloutGroup]:
            try:
                return [group for groups in together(call, call, drop, fork)[:2] for group in groups]
            finally:
                stop.set()

        groups, _ = together(consume, swap)
        idle(engine)
    for start in range(0, len(groups), len(prompts)):
        check_versions(groups[start : start + len(prompts)], prompts, sampling)


def test_weights_written_while_a_step_runs_end_it() -> None:
    """The caller's own race; what was drawn from them is not handed out under either version."""
    model = random_model("qwen3")
    with small_engine(model) as engine, torch.no_grad():
        handle = engine.submit(PROMPTS[0], 2, SAMPLING)
        layer = engine._core.runner.view.model.layers[1].mlp  # type: ignore[union-attr]
        engine.step()
        hook = layer.register_forward_pre_hook(lambda *_: setattr(model, "scaled", model.lm_head.weight.mul_(1.5)))
        engine.step()  # the first tokens need no forward
        with pytest.raises(RolloutError, match="weights changed while requests were running"):
            engine.step()
        hook.remove()
        assert handle.rollouts == []
        assert engine.generate_rollouts(PROMPTS, 1, SAMPLING)[0].rollouts[0].policy_version == 1


# -- memory and stats ---------------------------------------------------------------------------------------------


def test_memory_is_released_between_steps_of_others_or_not_at_all() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        done, refused = threading.Event(), []

        def release() -> None:
            while not done.is_set():
                try:
                    engine.release_memory()
                except RolloutError as error:
                    refused.append(str(error))
                else:
                    engine.restore_memory()

        def stream() -> Streamed:
            try:
                return in_order([entry for _ in range(3) for entry in again()])
            finally:
                done.set()

        def again() -> Streamed:
            while True:
                with contextlib.suppress(RolloutError):  # released
                    return list(engine.stream_rollouts(PROMPTS, 2, SAMPLING))

        streamed, _ = together(stream, release)
    assert streamed == in_order(alone(PROMPTS) * 3)
    assert set(refused) == {"requests are running on the KV pool: end them before release_memory()"}


def test_a_call_inside_another_resets_neither_its_counters_nor_its_peaks(engine: RolloutEngine) -> None:
    names: tuple[str, ...] = ("completion_tokens", "prompt_tokens", "forward_steps", "forks", "seconds")
    names += ("peak_blocks_used", "peak_blocks_shared", "peak_running", "peak_waiting")
    last = dict.fromkeys(names, 0.0)
    for _ in engine.stream_rollouts(PROMPTS, 3, SAMPLING):
        engine.generate_rollouts([[5]], 1, SamplingParams(max_new_tokens=1))
        now = {name: float(getattr(engine.stats(), name)) for name in names}
        assert all(now[name] >= last[name] for name in names)
        last = now
    assert engine.stats().time_to_first_token[0] > 0
    engine.generate_rollouts([[5]], 1, SamplingParams(max_new_tokens=1))
    assert (engine.stats().peak_running, engine.stats().peak_blocks_used) == (1, 1)
    assert engine.stats().forward_steps == last["forward_steps"] + 1


def test_stats_can_be_read_while_others_step(engine: RolloutEngine) -> None:
    done = threading.Event()

    def watch() -> list[int]:
        seen = []
        while not done.is_set():
            seen.append(engine.stats().completion_tokens)
        return seen

    def call() -> None:
        try:
            engine.generate_rollouts(PROMPTS, 4, SAMPLING)
        finally:
            done.set()

    seen, _ = together(watch, call)
    assert seen == sorted(seen)
    assert engine.stats().completion_tokens == 4 * 4 * 8


# -- processes ------------------------------------------------------------------------------------------------------


def refused_in_a_child(call: Callable[[], object]) -> bool:
    """Whether a forked process gets the refusal, rather than wait for a thread that it does not have."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except RolloutError as error:
            os._exit(3 if "made in another process" in str(error) else 4)
        finally:
            os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_make_its_own_engine() -> None:
    with small_engine(shared_model("qwen3")) as engine, ThreadPoolExecutor(1) as pool:
        begun, handle = engine.stream_rollouts(PROMPTS, 1, LENGTHS), engine.submit(PROMPTS[0], 1, SAMPLING)
        next(begun)
        calls: dict[str, Callable[[], object]] = {
            "generate": lambda: engine.generate_rollouts(PROMPTS, 1),
            "next": lambda: next(begun),
            "submit": lambda: engine.submit(PROMPTS[0]),
            "step": engine.step,
            "abort": lambda: engine.abort(handle),
            "fork": lambda: engine.fork(handle, 0),
            "update": lambda: engine.update_weights({}),
            "updated": engine.weights_updated,
            "version": lambda: setattr(engine, "policy_version", 5),
            "drain": engine.drain,
            "release": engine.release_memory,
            "restore": engine.restore_memory,
            "close": engine.close,
        }
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with engine._core.turns.lock:
                held.set()
                done.wait()

        holding = pool.submit(hold)
        held.wait()
        try:
            refused = {name: refused_in_a_child(call) for name, call in calls.items()}
        finally:
            done.set()
        holding.result()
        assert refused == dict.fromkeys(calls, True)
        assert len(list(begun)) == len(PROMPTS) - 1
