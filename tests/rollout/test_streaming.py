"""Rollouts as they end, requests from anywhere, aborts and forks: blocks come back and results stay what they are."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from rollout import Rollout, RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.engine.handles import RolloutHandle
from tiny_models import chain_model, eager_logprobs, greedy, random_model, random_prompts, shared_model, small_engine

SAMPLING = SamplingParams(max_new_tokens=10, seed=5)


def _idle(engine: RolloutEngine) -> bool:
    engine.scheduler.check_integrity()
    stats = engine.stats()
    return stats.num_free_blocks == stats.num_blocks and not engine.has_work


def _run(engine: RolloutEngine, *handles: RolloutHandle) -> None:
    while not all(handle.done for handle in handles):
        engine.step()


# -- streaming ----------------------------------------------------------------------------------------------------


def test_rollouts_come_as_they_end_and_are_those_of_a_call() -> None:
    """A chain ends prompt k after k tokens, so completions come in order of k."""
    model = chain_model({i: i - 1 for i in range(2, 30)} | {1: 1}, eos_token_id=1)
    prompts = [[k + 1] for k in (9, 2, 5)]
    with small_engine(model) as engine:
        streamed = list(engine.stream_rollouts(prompts, 2, greedy(20)))
        groups = engine.generate_rollouts(prompts, 2, greedy(20))
    assert [place for place, _ in streamed] == [1, 1, 2, 2, 0, 0]
    assert [len(rollout.completion_ids) for _, rollout in streamed] == [2, 2, 5, 5, 9, 9]
    for place, group in enumerate(groups):
        assert sorted((r for p, r in streamed if p == place), key=lambda r: r.index) == group.rollouts


def test_groups_are_told_of_as_they_end() -> None:
    engine = small_engine(random_model("qwen3"))
    prompts, limits = random_prompts([3, 5, 4]), [9, 2, 5]
    told: list[tuple[int, RolloutGroup]] = []
    sampling = [SamplingParams(max_new_tokens=limit, ignore_eos=True) for limit in limits]
    groups = engine.generate_rollouts(
        [*prompts, []], 2, [*sampling, sampling[0]], on_error="return", on_group=lambda *group: told.append(group)
    )
    # the shortest first; a prompt that cannot be run has no completions to tell of
    assert [place for place, _ in told] == [1, 2, 0]
    assert all(group == groups[place] for place, group in told)


def test_an_error_in_who_is_told_gives_everything_back() -> None:
    def fail(place: int, group: RolloutGroup) -> None:
        raise ZeroDivisionError

    engine = small_engine(random_model("qwen3"))
    with pytest.raises(ZeroDivisionError):
        engine.generate_rollouts(random_prompts([3, 5]), 2, SamplingParams(), on_group=fail)
    assert _idle(engine)


def test_bad_input_is_refused_at_the_call_and_not_at_the_first_rollout() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        with pytest.raises(RolloutError, match="n=0"):
            engine.stream_rollouts([[1]], 0)
        streamed = list(engine.stream_rollouts([[], [3]], 1, greedy(2), on_error="return"))
    assert [(place, rollout.finish_reason) for place, rollout in streamed] == [(0, "error"), (1, "length")]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_dropping_the_iterator_gives_everything_back(taken: int) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        expected = engine.generate_rollouts(random_prompts([30]), 2, SAMPLING)
        stream = engine.stream_rollouts(random_prompts([9, 20, 40]), 2, SamplingParams(max_new_tokens=40, seed=1))
        for _ in range(taken):
            next(stream)
        del stream
        assert _idle(engine)
        assert engine.generate_rollouts(random_prompts([30]), 2, SAMPLING) == expected


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_in_the_consumer_gives_everything_back(error: type[BaseException]) -> None:
    def consume(engine: RolloutEngine) -> None:
        for _ in engine.stream_rollouts(random_prompts([9, 20, 40]), 2, SAMPLING):
            raise error

    with small_engine(shared_model("qwen3")) as engine:
        with pytest.raises(error):
            consume(engine)
        assert _idle(engine)


# -- submit, step, abort ------------------------------------------------------------------------------------------


def test_submitted_requests_are_what_a_call_returns() -> None:
    prompts = random_prompts([3, 18, 40])
    with small_engine(shared_model("qwen3")) as engine:
        expected = engine.generate_rollouts(prompts, 3, SAMPLING)
        handles = [engine.submit(prompt, 3, SAMPLING, key=i) for i, prompt in enumerate(prompts)]
        _run(engine, *handles)
        assert [handle.group() for handle in handles] == expected
        assert _idle(engine)


def test_requests_that_come_later_change_nothing_for_those_that_run() -> None:
    prompts = random_prompts([20, 33])
    with small_engine(shared_model("qwen3")) as engine:
        expected = engine.generate_rollouts(prompts, 2, SAMPLING)
        first = engine.submit(prompts[0], 2, SAMPLING, key=0)
        for _ in range(4):
            engine.step()
        second = engine.submit(prompts[1], 2, SAMPLING, key=1)
        _run(engine, first, second)
        assert [first.group(), second.group()] == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_request_gives_its_blocks_back_and_the_others_go_on(steps: int) -> None:
    prompts = random_prompts([20, 33])
    with small_engine(shared_model("qwen3")) as engine:
        (expected,) = engine.generate_rollouts([prompts[0]], 2, SAMPLING)
        kept, dropped = (engine.submit(prompt, 2, SAMPLING) for prompt in prompts)
        for _ in range(steps):
            engine.step()
        engine.abort(dropped)
        assert dropped.done
        assert all(rollout.finish_reason == "abort" for rollout in dropped.rollouts)
        _run(engine, kept)
        assert kept.group() == expected
        engine.abort(dropped)  # again, and after the end: nothing happens
        assert _idle(engine)


def test_any_thread_may_submit_and_abort_while_one_steps() -> None:
    prompts = random_prompts([5, 9, 14, 22] * 3)
    with small_engine(shared_model("qwen3"), max_num_seqs=6) as engine:
        expected = engine.generate_rollouts(prompts, 2, SAMPLING)
        kept: dict[int, RolloutHandle] = {}

        def submit(places: range) -> None:
            for place in places:
                engine.abort(engine.submit(prompts[0], 5, SAMPLING))
                kept[place] = engine.submit(prompts[place], 2, SAMPLING, key=place)

        threads = [threading.Thread(target=submit, args=(range(start, 12, 3),)) for start in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or engine.has_work:
            engine.step()
        assert [kept[place].group() for place in range(12)] == expected
        assert _idle(engine)


# -- forks --------------------------------------------------------------------------------------------------------


def _begin(engine: RolloutEngine, length: int, steps: int, sampling: SamplingParams = SAMPLING) -> RolloutHandle:
    handle = engine.submit(random_prompts([length])[0], 1, sampling)
    while len(handle.request.sequences) == 0 or len(handle.request.sequences[0].logprobs) < steps:
        engine.step()
    return handle


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 4}, {"block_size": 4, "num_blocks": 14}, {"max_num_seqs": 1}], ids=str
)
@pytest.mark.parametrize("length", [5, 8, 30])
def test_a_fork_goes_on_from_where_its_parent_stands(options: dict[str, Any], length: int) -> None:
    """Its tokens have the log-probs of that sequence alone, the parent's stay what they were, and nothing leaks."""
    model = shared_model("qwen3")
    with small_engine(model, **options) as engine:
        alone = engine.generate_rollouts(random_prompts([length]), 1, SAMPLING, keys=[0])[0].rollouts[0]
        parent = _begin(engine, length, 4)
        forks = [engine.fork(parent, 0) for _ in range(3)]
        _run(engine, parent, *forks)
        assert _idle(engine)
    assert parent.rollouts == [alone]
    completions = [fork.rollouts[0].completion_ids for fork in forks]
    assert all(ids[:4] == alone.completion_ids[:4] for ids in completions)
    assert len({tuple(ids) for ids in [alone.completion_ids, *completions]}) == 4
    assert [fork.rollouts[0].index for fork in forks] == [1, 2, 3]
    for fork in forks:
        (rollout,) = fork.rollouts
        expected = eager_logprobs(model, fork.prompt_ids, rollout.completion_ids)
        assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


def test_forks_of_forks_with_parameters_of_their_own() -> None:
    """A greedy fork of a sampled parent is what greedy decoding makes of the parent's tokens."""
    model = shared_model("llama")
    with small_engine(model, block_size=4) as engine:
        parent = _begin(engine, 11, 3)
        fork = engine.fork(parent, 0)
        while len(fork.request.sequences[0].logprobs) < 6:
            engine.step()
        nested = engine.fork(fork, 1, greedy(12))
        _run(engine, parent, fork, nested)
        stem = fork.rollouts[0].completion_ids[:6]
        (rest,) = engine.generate_rollouts([[*parent.prompt_ids, *stem]], 1, greedy(6))
    assert nested.rollouts[0].completion_ids == stem + rest.rollouts[0].completion_ids
    assert nested.rollouts[0].logprobs[:6] == fork.rollouts[0].logprobs[:6]
    assert nested.rollouts[0].index == 2


def test_a_fork_copies_nothing_until_somebody_writes() -> None:
    with small_engine(shared_model("qwen3"), block_size=16) as engine:
        parent = _begin(engine, 20, 4)
        used = engine.stats().num_free_blocks
        fork = engine.fork(parent, 0)
        assert engine.stats().num_free_blocks == used
        assert engine.stats().cow_copies == 0
        engine.step()
        assert engine.stats().cow_copies == 1
        assert engine.stats().num_free_blocks == used - 1
        _run(engine, parent, fork)


def test_only_a_running_completion_can_be_forked() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        handle = engine.submit([1, 2, 3], 1, SAMPLING)
        with pytest.raises(RolloutError, match="completion 0 of this request is not running"):
            engine.fork(handle, 0)
        _run(engine, handle)
        with pytest.raises(RolloutError, match="completion 0 of this request is not running"):
            engine.fork(handle, 0)
        running = _begin(engine, 5, 4)
        with pytest.raises(RolloutError, match="raise max_new_tokens"):
            engine.fork(running, 0, greedy(4))
        engine.abort(running)
        assert _idle(engine)


@pytest.mark.parametrize("kind", ["submitted", "forked", "ended"])
def test_a_handle_of_another_engine_is_refused(kind: str) -> None:
    """Its block numbers would read this engine's KV; what is its own goes on."""
    with small_engine(shared_model("qwen3")) as engine, small_engine(shared_model("qwen3")) as other:
        own, theirs = _begin(engine, 5, 4), _begin(other, 9, 4)
        handle = other.fork(theirs, 0) if kind == "forked" else theirs
        if kind == "ended":
            other.abort(handle)
        for call in (lambda: engine.fork(handle, 0), lambda: engine.abort(handle)):
            with pytest.raises(RolloutError, match="this handle is of another engine"):
                call()
        assert handle.done == (kind == "ended")
        engine.abort(own)
        engine.abort(own)
        assert _idle(engine)


# -- weights ------------------------------------------------------------------------------------------------------


def _scrambled(seed: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = random_model("qwen3", seed=seed).state_dict()
    return state


def test_an_update_with_requests_running_refuses_drains_or_aborts() -> None:
    prompts, new = random_prompts([9, 14]), _scrambled(1)
    with small_engine(random_model("qwen3"), max_num_seqs=1) as engine:
        before = engine.generate_rollouts([prompts[0]], 1, SAMPLING)
        running, waiting = _begin(engine, 9, 3), engine.submit(prompts[1], 1, SAMPLING)
        with pytest.raises(RolloutError, match="requests have begun"):
            engine.update_weights(new)
        engine.update_weights(new, running="drain")
        assert running.rollouts == before[0].rollouts
        _run(engine, waiting)
        assert waiting.rollouts[0].policy_version == 1
        after = engine.generate_rollouts([prompts[1]], 1, SAMPLING)
        assert waiting.rollouts == after[0].rollouts
        running = _begin(engine, 9, 3)
        engine.update_weights(_scrambled(2), running="abort")
        assert [rollout.finish_reason for rollout in running.rollouts] == ["abort"]
        assert _idle(engine)


def test_an_explicit_update_equals_a_fresh_engine() -> None:
    prompts = random_prompts([20, 3])
    model = random_model("qwen3")
    addresses = [p.data_ptr() for p in model.parameters()]
    with small_engine(model) as engine, small_engine(random_model("qwen3", seed=4)) as fresh:
        engine.generate_rollouts(prompts, 2, SAMPLING)
        engine.update_weights(_scrambled(4))
        ours, theirs = (e.generate_rollouts(prompts, 2, SAMPLING) for e in (engine, fresh))
    assert [[r.logprobs for r in g.rollouts] for g in ours] == [[r.logprobs for r in g.rollouts] for g in theirs]
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "has no 'extra'"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3)}), r"'lm_head.weight' has shape \(3,\)"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(96, dtype=torch.int64)}), "is torch.int64"),
        (lambda tensors: tensors["lm_head.weight"][3, 5].fill_(torch.nan), "'lm_head.weight' holds NaN or an infinity"),
        (lambda tensors: tensors["model.norm.weight"][-1].fill_(torch.inf), "'model.norm.weight' holds NaN"),
        (lambda tensors: tensors["model.norm.weight"][0].fill_(-torch.inf), "'model.norm.weight' holds NaN"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.full((96,), 1e39, dtype=torch.float64)}),
            r"'model.norm.weight' holds NaN or an infinity \(in torch.float32\)",
        ),
    ],
)
def test_a_wrong_update_changes_nothing(change: Any, message: str) -> None:
    model, tensors = random_model("qwen3"), _scrambled(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(tensors)
    with small_engine(model) as engine:
        with pytest.raises(RolloutError, match=message):
            engine.update_weights(tensors)
        assert engine.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("version", [None, "x", -1, 1.5, True, 2, float("nan")], ids=str)
def test_a_version_only_rises(version: Any) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        engine.policy_version = 3
        with pytest.raises(RolloutError, match=f"policy_version={version!r}: must be a whole number, at least 3"):
            engine.policy_version = version
        engine.policy_version = 3
        assert engine.policy_version == 3


@pytest.mark.parametrize("copied", [0, 1, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_weights_that_an_interrupt_left_mixed_are_not_served(
    monkeypatch: pytest.MonkeyPatch, copied: int, error: type[BaseException]
) -> None:
    new, copy, calls = _scrambled(1), torch.Tensor.copy_, iter(range(1000))

    def interrupted(*arguments: Any) -> torch.Tensor:
        if next(calls) == copied:
            raise error
        return copy(*arguments)

    with small_engine(random_model("qwen3")) as engine, small_engine(random_model("qwen3", seed=1)) as fresh:
        waiting = engine.submit([1, 2], 1, SAMPLING)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", interrupted)
            with pytest.raises(error):
                engine.update_weights(new)
        new_version = partial(setattr, engine, "policy_version", 7)
        for call in (lambda: engine.submit([1]), engine.step, engine.weights_updated, new_version):
            with pytest.raises(RolloutError, match="update_weights was broken off"):
                call()
        engine.update_weights(new)
        _run(engine, waiting)
        (expected,) = fresh.generate_rollouts([[1, 2]], 1, SAMPLING)
    assert waiting.rollouts[0].logprobs == expected.rollouts[0].logprobs
    assert waiting.rollouts[0].policy_version == 1


def test_tied_weights_may_come_under_one_name_or_equal_under_both() -> None:
    tied = random_model("qwen2", seed=1).state_dict()
    with small_engine(random_model("qwen2")) as engine:
        engine.update_weights(tied)
        engine.update_weights({name: tensor for name, tensor in tied.items() if name != "lm_head.weight"})
        with pytest.raises(RolloutError, match="tied to another name"):
            engine.update_weights(tied | {"lm_head.weight": tied["lm_head.weight"] + 1})


@pytest.mark.parametrize("fused", [True, False])
def test_an_unannounced_optimizer_step_is_noticed(fused: bool) -> None:
    model = random_model("qwen3")
    prompts = random_prompts([20])
    with small_engine(model, block_size=4) as engine:
        engine.generate_rollouts(prompts, 1, greedy(6))
        model(input_ids=torch.tensor(prompts)).logits.square().mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused).step()
        (group,) = engine.generate_rollouts(prompts, 1, greedy(6))
        assert engine.stats().cache_hit_tokens == 0
    expected = eager_logprobs(model, prompts[0], group.rollouts[0].completion_ids)
    assert (torch.tensor(group.rollouts[0].logprobs) - expected).abs().max() < 1e-4
    assert group.rollouts[0].policy_version == 1


def test_a_change_in_the_middle_of_requests_is_an_error_and_the_engine_goes_on() -> None:
    model = random_model("qwen3")
    with small_engine(model) as engine:
        handle = _begin(engine, 9, 3)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
        with pytest.raises(RolloutError, match="weights changed while requests were running"):
            engine.step()
        assert handle.done
        assert _idle(engine)
        assert isinstance(engine.generate_rollouts([[4]], 1, SAMPLING)[0].rollouts[0], Rollout)


# -- memory -------------------------------------------------------------------------------------------------------


def test_released_memory_is_the_pools_and_comes_back_empty() -> None:
    prompts = random_prompts([40])
    with small_engine(shared_model("qwen3"), block_size=4) as engine:
        expected = engine.generate_rollouts(prompts, 2, SAMPLING)
        size = engine.stats().pool_bytes
        assert engine.release_memory() == size
        assert engine.stats().pool_bytes == 0
        with pytest.raises(RolloutError, match=rf"{size} bytes are missing\): call restore_memory"):
            engine.generate_rollouts(prompts, 2, SAMPLING)
        engine.restore_memory()
        hits = engine.stats().cache_hit_tokens
        assert engine.generate_rollouts(prompts, 2, SAMPLING) == expected
        assert engine.stats().cache_hit_tokens == hits
        handle = _begin(engine, 5, 2)
        with pytest.raises(RolloutError, match="requests are running"):
            engine.release_memory()
        _run(engine, handle)
