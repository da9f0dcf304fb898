"""The engine as a whole: what a rollout may depend on, that blocks come back, bad input, and the caller's module."""

import copy
import os
import re
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import rollout
from rollout import (
    RolloutConfig,
    RolloutEngine,
    RolloutError,
    RolloutGroup,
    SamplingParams,
    generate_rollouts,
    use_engine,
)
from rollout.manifest import write_manifest
from tiny_models import (
    ARCHITECTURES,
    EOS,
    LOGPROB_TOLERANCE,
    TEXT_VOCAB,
    VOCAB,
    assert_greedy,
    byte_tokenizer,
    chain_model,
    completions,
    eager_logits,
    eager_logprobs,
    greedy,
    greedy_ids,
    random_model,
    random_prompts,
    save_directory,
    scramble,
    shared_model,
    small_engine,
)

SAMPLING = SamplingParams(max_new_tokens=12, seed=7)
PROMPTS = random_prompts([6, 70, 1, 33])


def contents(group: RolloutGroup, count: int | None = None) -> list[tuple[list[int], list[float], list[float]]]:
    """Everything that was sampled, bit for bit."""
    return [(r.completion_ids, r.logprobs, r.raw_logprobs) for r in group.rollouts[:count]]


def generate(model: PreTrainedModel, *arguments: Any, options: dict[str, Any] | None = None, **keywords: Any) -> Any:
    with small_engine(model, **options or {}) as engine:
        groups = engine.generate_rollouts(*arguments, **keywords)
        engine.scheduler.check_integrity()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        return groups


# -- what a rollout depends on ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[list[int], list[float], list[float]]]]:
    """Each of PROMPTS in a call and an engine of its own, with the key it has in the others."""
    model = shared_model("qwen3")
    return [contents(generate(model, [prompt], 4, SAMPLING, keys=[i])[0]) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 9},
        {"block_size": 4, "num_blocks": 24},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_seqs": 1},
        {"block_size": 1, "num_blocks": 1000},
        {"block_size": 5},
        {"block_size": 64},
        {"max_model_len": 100},
    ],
    ids=str,
)
def test_rollouts_do_not_depend_on_the_engine_or_on_each_other(alone: list[Any], options: dict[str, Any]) -> None:
    """Company, pool size, chunks, number of sequences, blocks: tokens and log-probs keep every bit."""
    groups = generate(shared_model("qwen3"), PROMPTS, 4, SAMPLING, options=options)
    assert [contents(group) for group in groups] == alone


def test_the_smallest_pool_of_these_tests_preempts() -> None:
    with small_engine(shared_model("qwen3"), block_size=4, num_blocks=24) as engine:
        engine.generate_rollouts(PROMPTS, 4, SAMPLING)
        assert engine.stats().preemptions > 0


def test_rollouts_do_not_depend_on_earlier_calls(alone: list[Any]) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        for _ in range(3):
            groups = engine.generate_rollouts(PROMPTS, 4, SAMPLING)
            assert [contents(group) for group in groups] == alone


def test_broken_weights_are_an_error_and_leave_nothing_behind(alone: list[Any]) -> None:
    """NaN keys and values that stayed in the pool would spoil rows that only mask them."""
    model = random_model("qwen3")
    right = copy.deepcopy(model.state_dict())
    with small_engine(model) as engine, torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
        with pytest.raises(RolloutError, match="not finite"):
            engine.generate_rollouts(PROMPTS, 4, SAMPLING)
        model.load_state_dict(right)
        assert [contents(group) for group in engine.generate_rollouts(PROMPTS, 4, SAMPLING)] == alone


# -- weights ------------------------------------------------------------------------------------------------------


def by_load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(random_model("qwen3", seed=1).state_dict())


def by_add(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def by_an_optimizer(model: PreTrainedModel) -> None:
    loss = -model(torch.tensor([[3, 1, 4, 1, 5]])).logits.log_softmax(-1)[..., 9].mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


@pytest.mark.parametrize("change", [by_load_state_dict, by_add, by_an_optimizer])
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("prompt_length", [15, 16, 17])
def test_changed_weights_are_seen_at_once(
    change: Callable[[PreTrainedModel], None], announced: bool, prompt_length: int
) -> None:
    """As many tokens as 4 blocks, one less and one more; no KV of older weights is read, announced or not."""
    model = random_model("qwen3")
    prompts = random_prompts([prompt_length])
    with small_engine(model, block_size=4) as engine:
        before = completions(engine.generate_rollouts(prompts, 2, greedy()))
        change(model)
        if announced:
            engine.weights_updated()
        (group,) = engine.generate_rollouts(prompts, 2, greedy())
    assert completions([group]) != before
    for made in group.rollouts:
        assert_greedy(model, prompts[0], made.completion_ids, greedy_ids(model, prompts[0], 8))
        expected = eager_logprobs(model, prompts[0], made.completion_ids)
        assert (torch.tensor(made.logprobs) - expected).abs().max() < LOGPROB_TOLERANCE


def test_rollouts_carry_the_policy_version_that_made_them() -> None:
    with small_engine(random_model()) as engine:
        versions = []
        for _ in range(3):
            versions += [
                r.policy_version for g in engine.generate_rollouts(PROMPTS[:1], 2, SAMPLING) for r in g.rollouts
            ]
            engine.weights_updated()
        assert versions == [0, 0, 1, 1, 2, 2]
        assert engine.stats().policy_version == 3


def by_a_new_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())


def by_resizing(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)


def by_converting(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("replace", [by_a_new_parameter, by_resizing, by_converting])
def test_weights_that_are_other_tensors_are_noticed(replace: Callable[[PreTrainedModel], None]) -> None:
    model = random_model()
    with small_engine(model) as engine:
        replace(model)
        with pytest.raises(RolloutError, match="no longer the tensor that the engine reads"):
            engine.weights_updated()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_engine_holds_no_second_copy_of_the_weights(arch: str) -> None:
    model = random_model(arch)
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    with small_engine(model) as engine:
        assert engine._core.runner is not None
        for view in (engine._core.runner.view, engine.training_view()):
            assert {parameter.data_ptr() for parameter in view.parameters()} == theirs


# -- the caller's module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_callers_module_is_left_as_it_was(training: bool) -> None:
    model = random_model("qwen3").train(training)
    model.model.layers[0].requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    calls: list[nn.Module] = []
    model.model.layers[0].register_forward_hook(lambda module, *_: calls.append(module))
    names, config = {name: id(module) for name, module in model.named_modules()}, model.config.to_dict()
    weights, version = copy.deepcopy(model.state_dict()), {n: p._version for n, p in model.named_parameters()}
    with small_engine(model) as engine:
        engine.generate_rollouts(PROMPTS, 3, SAMPLING)
        engine.training_view(gradient_checkpointing=True)
    assert {name: id(module) for name, module in model.named_modules()} == names
    assert all(module.training == training for module in model.modules())
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "eager"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert [p.requires_grad for p in model.model.layers[0].parameters()] == [False] * 11
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert {n: p._version for n, p in model.named_parameters()} == version
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert calls == []  # the engine's forwards are not the caller's
    model(torch.tensor([[1, 2]]))
    assert calls == [model.model.layers[0]]


def test_hooks_that_cannot_be_copied_do_no_harm() -> None:
    """A hook that is a method of an object with a lock, as profilers and trackers have."""

    class Tracker:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def on_forward(self, *_: object) -> None:
            with self.lock:
                pass

    model = random_model()
    model.model.layers[0].register_forward_hook(Tracker().on_forward)
    expected = completions(generate(shared_model("qwen3"), PROMPTS, 1, SAMPLING))
    assert completions(generate(model, PROMPTS, 1, SAMPLING)) == expected


def test_rollouts_leave_no_graph_and_no_gradients() -> None:
    model = random_model()
    generate(model, PROMPTS, 2, SAMPLING)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_torchs_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    generate(shared_model("qwen3"), PROMPTS, 2, SamplingParams(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), state)


# -- sharing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_length", "full", "tail"), [(37, 9, 1), (36, 9, 0), (3, 0, 3), (64, 16, 0)])
def test_sixteen_rollouts_hold_their_prompts_full_blocks_once(prompt_length: int, full: int, tail: int) -> None:
    """Blocks of 4; each rollout writes 2 of its 3 tokens, and no more than 15 tails are copied."""
    with small_engine(shared_model("qwen3"), block_size=4) as engine:
        before = engine.stats().num_free_blocks
        engine.generate_rollouts(random_prompts([prompt_length]), 16, SamplingParams(max_new_tokens=3, seed=0))
        stats = engine.stats()
    own = -(-(tail + 2) // 4)
    assert stats.peak_blocks_used == full + 16 * own
    assert stats.peak_blocks_shared == full
    assert stats.cow_copies == (15 if tail else 0)
    assert stats.forks == 16
    assert stats.prefix_tokens_saved == 15 * prompt_length
    assert stats.num_free_blocks == before == stats.num_blocks


def test_counters_add_up() -> None:
    with small_engine(shared_model("qwen3"), num_blocks=50) as engine:
        engine.generate_rollouts(PROMPTS, 3, SAMPLING)
        stats = engine.stats()
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.completion_tokens == 4 * 3 * 12
    assert stats.forward_steps == 1 + 11  # one prefill of all prompts; the first tokens need no forward
    assert stats.peak_running == 12
    assert stats.kv_cache_usage == stats.peak_blocks_used / 50
    assert stats.pool_bytes == 2 * 2 * 51 * 2 * 16 * 32 * 4  # k and v, layers, blocks and the null one, heads, ...


def test_the_default_pool_is_what_all_sequences_need() -> None:
    """3 sequences of 100 tokens are 3 * (7 + 1) blocks; a small share of memory allows fewer, and says so at none."""
    model = shared_model("qwen3")
    config = RolloutConfig(device="cpu", max_num_seqs=3, max_model_len=100)
    assert RolloutEngine(model, None, config).stats().num_blocks == 24
    with pytest.raises(RolloutError, match=r"memory_fraction=1e-12 .* bytes are missing"):
        small_engine(model, num_blocks=None, memory_fraction=1e-12)


# -- blocks come back ---------------------------------------------------------------------------------------------

TIGHT = {"block_size": 4, "num_blocks": 30, "max_num_seqs": 6, "max_num_batched_tokens": 40}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 20])
def test_an_error_in_a_forward_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], after: int
) -> None:
    engine = small_engine(shared_model("qwen3"), **TIGHT)
    expected = completions(engine.generate_rollouts(PROMPTS, 4, SAMPLING))
    assert engine._core.runner is not None
    forward, calls = engine._core.runner.execute, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == after:
            raise error("injected")
        return forward(*arguments)

    monkeypatch.setattr(engine._core.runner, "execute", failing)
    with pytest.raises(error, match="injected"):
        engine.generate_rollouts(PROMPTS, 4, SAMPLING)
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == 30
    assert completions(engine.generate_rollouts(PROMPTS, 4, SAMPLING)) == expected


def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, alone: list[Any]
) -> None:
    engine = small_engine(shared_model("qwen3"))
    assert engine._core.runner is not None
    forward = engine._core.runner.execute

    def nested(*arguments: Any) -> Any:
        for call in (lambda: engine.generate_rollouts([[1]], 1), engine.weights_updated):
            with pytest.raises(RolloutError, match="already generating"):
                call()
        return forward(*arguments)

    monkeypatch.setattr(engine._core.runner, "execute", nested)
    assert [contents(group) for group in engine.generate_rollouts(PROMPTS, 4, SAMPLING)] == alone
    assert engine.policy_version == 0


class InterruptAt:
    """A trace function that raises KeyboardInterrupt before the k-th line that the engine's bookkeeping runs.

    Only abort_all, which cleans up, is left to run through.
    """

    FILES = tuple(
        str(Path(rollout.__file__).with_name("schedule") / f"{name}.py")
        for name in ("scheduler", "block_pool", "sequence")
    )

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> "InterruptAt | None":
        if event == "call":
            return self if frame.f_code.co_filename in self.FILES and not self.cleaning(frame) else None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    @staticmethod
    def cleaning(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != "abort_all":
            frame = frame.f_back
        return frame is not None


def interrupted_at(engine: RolloutEngine, line: int, *arguments: Any) -> tuple[str, str]:
    """Where an interrupt of generate_rollouts came ("": it did not), and what it left behind ("": nothing)."""
    tracer, previous = InterruptAt(line), sys.gettrace()
    try:
        sys.settrace(tracer)
        engine.generate_rollouts(*arguments)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(previous)
    try:
        engine.scheduler.check_integrity()
    except RuntimeError as error:
        return tracer.where, str(error)
    lost = engine.stats().num_blocks - engine.stats().num_free_blocks
    return tracer.where, f"{lost} blocks lost" if lost else "still has work" if engine.scheduler.has_work else ""


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_anywhere_in_the_bookkeeping_gives_everything_back(stride: int) -> None:
    """Ctrl-C lands between any two lines of a run that shares, copies and preempts."""
    prompts, sampling = random_prompts([7, 10]), SamplingParams(max_new_tokens=8, seed=7)
    sizes = {"block_size": 4, "num_blocks": 7, "max_num_seqs": 4}
    engine = small_engine(shared_model("qwen3"), **sizes)
    expected = completions(engine.generate_rollouts(prompts, 2, sampling))
    assert min(engine.stats().preemptions, engine.stats().cow_copies) > 0
    left_behind: dict[str, str] = {}
    for line in range(1, 1_000_000, stride):
        where, left = interrupted_at(engine, line, prompts, 2, sampling)
        if left:
            left_behind[where] = left
            engine = small_engine(shared_model("qwen3"), **sizes)
        if not where:
            break
    assert line > 500
    assert left_behind == {}
    assert completions(engine.generate_rollouts(prompts, 2, sampling)) == expected


# -- limits -------------------------------------------------------------------------------------------------------


def test_a_completion_ends_at_the_models_length() -> None:
    with small_engine(shared_model("qwen3"), max_model_len=20) as engine:
        (group,) = engine.generate_rollouts(random_prompts([15]), 2, SamplingParams(max_new_tokens=50))
    assert [(len(r.completion_ids), r.finish_reason) for r in group.rollouts] == [(5, "length")] * 2


def test_a_completion_ends_where_the_pool_does() -> None:
    with small_engine(shared_model("qwen3"), block_size=4, num_blocks=5) as engine:
        (group,) = engine.generate_rollouts(random_prompts([15]), 3, SamplingParams(max_new_tokens=50))
    assert [(len(r.completion_ids), r.finish_reason) for r in group.rollouts] == [(5, "length")] * 3


@pytest.mark.parametrize(
    ("prompt", "new", "options", "needed"),
    [
        (6, 40, {"block_size": 16, "num_blocks": 2}, 3),
        (15, 50, {"block_size": 4, "num_blocks": 5}, 17),
        (9, 500, {"block_size": 8, "num_blocks": 3, "max_model_len": 100}, 13),
    ],
    ids=str,
)
def test_a_pool_that_cuts_completions_short_says_so_once(
    caplog: pytest.LogCaptureFixture, prompt: int, new: int, options: dict[str, int], needed: int
) -> None:
    """With the blocks that suffice, which do."""
    prompts, sampling = random_prompts([prompt] * 2), SamplingParams(max_new_tokens=new, seed=1)
    with small_engine(shared_model("qwen3"), **options) as engine:
        engine.generate_rollouts(prompts, 1, sampling)
        list(engine.stream_rollouts(prompts, 1, sampling))
        engine.abort(engine.submit(prompts[0], 1, sampling))
    (message,) = [record.getMessage() for record in caplog.records if "num_blocks" in record.getMessage()]
    assert f"set num_blocks to {needed}, or lower max_new_tokens" in message
    for enough in (needed, needed - 1):
        caplog.clear()
        with small_engine(shared_model("qwen3"), **options | {"num_blocks": enough}) as engine:
            groups = engine.generate_rollouts(prompts, 1, sampling)
        longest = min(new, options.get("max_model_len", 512) - prompt)
        assert all(len(g.rollouts[0].completion_ids) == longest for g in groups) == (enough == needed)
        assert bool(caplog.records) == (enough < needed)


def test_max_new_tokens_counts_the_end_token() -> None:
    """1 -> 2 -> 3 -> 9, the end: cut before it, at it and behind it."""
    model = chain_model({1: 2, 2: 3, 3: 9, 9: 5}, eos_token_id=9)
    with small_engine(model) as engine:
        results = [engine.generate_rollouts([[1]], 1, greedy(length))[0].rollouts[0] for length in (2, 3, 4)]
    assert [(r.completion_ids, r.finish_reason) for r in results] == [
        ([2, 3], "length"),
        ([2, 3, 9], "stop"),
        ([2, 3, 9], "stop"),
    ]


def test_the_end_token_may_come_first() -> None:
    """For half of the prompts, or for all of them."""
    model = chain_model({1: EOS, 2: 3, 3: EOS}, hidden=TEXT_VOCAB, eos_token_id=EOS)
    with small_engine(model, byte_tokenizer()) as engine:
        half = engine.generate_rollouts([[5, 1], [5, 2]] * 3, 2, greedy())
        every = engine.generate_rollouts([[1]] * 4, 3, greedy())
    assert completions(half) == [[[EOS]] * 2, [[3, EOS]] * 2] * 3
    first = [rollout for group in every for rollout in group.rollouts]
    assert [(r.completion_ids, r.text, r.finish_reason) for r in first] == [([EOS], "", "stop")] * 12
    assert [r.logprobs for r in first] == [[pytest.approx(0.0, abs=1e-6)]] * 12


def test_nothing_is_collected_after_the_end() -> None:
    """Rollouts that end at their 1st to 20th token, side by side: one log-prob per id, of that id given those before.

    Each token of the chain 10 -> 11 -> ... goes on with a probability of its own.
    """
    going_on = {10 + i: 0.95 - 0.01 * i for i in range(20)}
    model = chain_model({t: {t + 1: p, 1: 1 - p} for t, p in going_on.items()}, eos_token_id=1)
    with small_engine(model) as engine:
        (group,) = engine.generate_rollouts([[10]], 200, SamplingParams(max_new_tokens=20, seed=0))
    lengths = set()
    for made in group.rollouts:
        *body, last = made.completion_ids
        assert body == list(range(11, 11 + len(body)))
        chances = [going_on[10 + i] for i in range(len(body))]
        chances.append(1 - going_on[10 + len(body)] if last == 1 else going_on[10 + len(body)])
        assert [pytest.approx(x, abs=1e-5) for x in torch.tensor(chances).log().tolist()] == made.logprobs
        lengths.add(len(made.completion_ids))
    assert {1, 5, 20} <= lengths


# -- bad input ----------------------------------------------------------------------------------------------------


BAD_INPUT: list[tuple[tuple[Any, ...], str]] = [
    (([[1], list(range(50)), [2]],), "prompt 1: 50 tokens leave no room for a completion within max_model_len=50"),
    (([[1], []],), re.escape("prompt 1: [] is empty")),
    (([[1, VOCAB]],), "prompt 0: token id 211 is outside the model's vocabulary of 211"),
    (([[-1]],), "prompt 0: token id -1 is outside"),
    (([[1], "text"],), "prompt 1: a text prompt needs a tokenizer"),
    (([[1.5]],), "prompt 0: .* is neither a string, a list of token ids nor"),
    (([[True]],), "prompt 0: .* is neither"),
    (([None],), "prompt 0: None is neither"),
    (([3, 4],), "prompt 0: 3 is neither"),
    (([torch.tensor([1.5, 2.5])],), "prompt 0: .* is neither"),
    (([torch.tensor([[1, 2], [3, 4]])],), "prompt 0: .* is neither"),
    (("text",), "prompts is a single string"),
    (([[1]], 0), "n=0: ask for at least one"),
    (([[1]], -3), "n=-3"),
    (([[1]], 1, [SAMPLING, SAMPLING]), "2 sampling parameters for 1 prompts"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_bad_input_is_named_and_the_engine_goes_on(arguments: tuple[Any, ...], message: str) -> None:
    with small_engine(shared_model("qwen3"), max_model_len=50) as engine:
        with pytest.raises(RolloutError, match=message):
            engine.generate_rollouts(*arguments)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert engine.stats().forward_steps == 0
        (group,) = engine.generate_rollouts([PROMPTS[0]], 1, greedy())
    expected = greedy_ids(shared_model("qwen3"), PROMPTS[0], 8)
    assert_greedy(shared_model("qwen3"), PROMPTS[0], group.rollouts[0].completion_ids, expected)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"keys": [1, 2]}, "2 keys for 1 prompts"),
        ({"keys": [-1]}, "key=-1 must lie in"),
        ({"keys": [2**32]}, "key=4294967296 must lie in"),
        ({"step": -1}, "step=-1 must lie in"),
        ({"purpose": -1}, "purpose=-1 must lie in"),
        ({"salt": ["a"]}, r"salt=\['a'\]: use a string or None"),
        ({"on_error": "ignore"}, "on_error='ignore': use raise or return"),
    ],
    ids=str,
)
def test_bad_options_are_named(keywords: dict[str, Any], message: str) -> None:
    with small_engine(shared_model("qwen3")) as engine, pytest.raises(RolloutError, match=message):
        engine.generate_rollouts([[1]], 1, SAMPLING, **keywords)


@pytest.mark.parametrize("on_error", ["raise", "return"])
@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(stop_token_ids=(3, VOCAB)), "stop_token_ids: 211 is outside the model's vocabulary of 211"),
        ([SAMPLING, SamplingParams(stop_token_ids=(10**9,))], "stop_token_ids: 1000000000 is outside"),
        ([SAMPLING], "1 sampling parameters for 2 prompts"),
        ([SAMPLING, None], "sampling=.*: use SamplingParams"),
        ({"temperature": 1.0}, r"sampling=\{'temperature': 1.0\}: use SamplingParams"),
    ],
    ids=str,
)
def test_an_option_that_fits_no_prompt_is_refused_and_is_no_bad_prompt(
    on_error: Any, sampling: Any, message: str
) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        for call in (engine.generate_rollouts, engine.stream_rollouts):
            with pytest.raises(RolloutError, match=message):
                call([[1], [2]], 1, sampling, on_error=on_error)


@pytest.mark.parametrize("sizes", [{"max_model_len": 1}, {"num_blocks": 1, "block_size": 1}], ids=str)
def test_sizes_that_no_prompt_fits_are_refused_before_the_probe(sizes: dict[str, int]) -> None:
    with pytest.raises(RolloutError, match="leave no room for a prompt and a completion: allow at least 2 tokens"):
        small_engine(shared_model("qwen3"), **sizes)


def test_a_prompt_that_does_not_fit_the_pool_is_told_how_much_is_missing() -> None:
    with small_engine(shared_model("qwen3"), block_size=4, num_blocks=5) as engine:
        engine.generate_rollouts(random_prompts([19]), 2, greedy())
        with pytest.raises(RolloutError, match=r"20 tokens .*do not fit a pool of 5 blocks of 4: 1 blocks are missing"):
            engine.generate_rollouts(random_prompts([20]), 2, greedy())


def test_on_error_return_marks_the_bad_ones_and_runs_the_others(alone: list[Any]) -> None:
    prompts = [PROMPTS[0], list(range(200)), PROMPTS[2], [], PROMPTS[1]]
    groups = generate(
        shared_model("qwen3"),
        prompts,
        4,
        SAMPLING,
        keys=[0, 8, 2, 9, 1],
        on_error="return",
        options={"max_model_len": 100},
    )
    assert len(groups) == 5
    assert [contents(groups[i]) for i in (0, 2, 4)] == [alone[0], alone[2], alone[1]]
    assert [groups[i].error is None for i in range(5)] == [True, False, True, False, True]
    assert "200 tokens leave no room" in groups[1].error
    assert [(r.completion_ids, r.finish_reason, r.logprobs) for r in groups[1].rollouts] == [([], "error", [])]


@pytest.mark.parametrize("on_error", ["raise", "return"])
@pytest.mark.parametrize("sampling", [None, SAMPLING, []])
def test_no_prompts_give_no_groups(on_error: Any, sampling: Any) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        assert engine.generate_rollouts([], 3, sampling, on_error=on_error) == []
        with pytest.raises(RolloutError, match="n=0"):
            engine.generate_rollouts([], 0, sampling, on_error=on_error)


def test_the_engine_checks_what_it_is_made_of() -> None:
    model = shared_model("qwen3")
    for options, message in [
        ({"dtype": "bfloat16"}, "dtype='bfloat16', but the module is in torch.float32"),
        ({"max_model_len": 513}, "max_model_len=513 is more than the model's max_position_embeddings of 512"),
    ]:
        with pytest.raises(RolloutError, match=message):
            small_engine(model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 99},
            "max_num_batched_tokens=99: must be at least max_num_seqs",
        ),
        ({"memory_fraction": 0.0}, "memory_fraction=0.0"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"exact": "yes"}, "exact='yes'"),
        ({"max_model_len": 0}, "max_model_len=0"),
    ],
    ids=str,
)
def test_bad_sizes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        RolloutConfig(**options)


# -- closing, and the library in one call -------------------------------------------------------------------------


def test_a_closed_engine_holds_no_pool_and_says_so() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        engine.generate_rollouts(PROMPTS, 1, SAMPLING)
        assert engine.stats().pool_bytes > 0
    engine.close()
    assert engine.stats().pool_bytes == 0
    assert engine.stats().completion_tokens == 4 * 12
    for call in (lambda: engine.generate_rollouts(PROMPTS), engine.weights_updated):
        with pytest.raises(RolloutError, match="closed"):
            call()


def test_generate_rollouts_takes_a_module_or_a_directory(tmp_path: Path) -> None:
    model = random_model("llama", vocab_size=TEXT_VOCAB)
    directory = save_directory(tmp_path, model, byte_tokenizer())
    from_module = generate_rollouts(["ab", "cde"], 2, model=model, tokenizer=byte_tokenizer(), seed=3, max_new_tokens=5)
    from_directory = generate_rollouts(["ab", "cde"], 2, model=directory, seed=3, max_new_tokens=5)
    assert [contents(group) for group in from_module] == [contents(group) for group in from_directory]
    assert [len(r.completion_ids) for group in from_module for r in group.rollouts] == [5] * 4


def test_generate_rollouts_lets_its_options_override_sampling() -> None:
    model = shared_model("qwen3")
    sampling = SamplingParams(max_new_tokens=3, temperature=1.0, seed=5)
    (group,) = generate_rollouts([[1, 2]], 2, model=model, sampling=sampling, temperature=0.0, max_new_tokens=6)
    assert group.seed == 5
    for made in group.rollouts:
        assert_greedy(model, [1, 2], made.completion_ids, greedy_ids(model, [1, 2], 6))


def test_generate_rollouts_uses_the_engine_of_a_running_trainer(alone: list[Any]) -> None:
    with small_engine(shared_model("qwen3")) as engine, use_engine(engine):
        groups = generate_rollouts(PROMPTS, 4, sampling=SAMPLING)
        assert [contents(group) for group in groups] == alone
        assert engine.stats().completion_tokens == 4 * 4 * 12
        generate_rollouts(PROMPTS, 1, sampling=SAMPLING)  # still open


def test_generate_rollouts_without_a_model_says_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COWROLL_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="built-in tiny model, with random weights"):
        groups = generate_rollouts(["1+1="], max_new_tokens=2)
    assert [len(group.rollouts) for group in groups] == [16]


def test_generate_rollouts_without_a_model_prefers_a_warm_started_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those in the cache the newest: here one that can only say "no"."""
    monkeypatch.setenv("COWROLL_CACHE", str(tmp_path))
    tokenizer = byte_tokenizer()
    no = tokenizer("no")["input_ids"]
    for age, (name, answer) in enumerate({"new": no, "old": no[::-1]}.items()):
        chain = chain_model({4: answer[0], answer[0]: answer[1]}, hidden=TEXT_VOCAB)
        directory = save_directory(tmp_path / "warm_start" / name, chain, tokenizer)
        write_manifest(directory)
        os.utime(directory, (1e9 - age, 1e9 - age))
    with pytest.warns(UserWarning, match=r"warm-started by an earlier training run .*new"):
        (group,) = generate_rollouts(["!"], 2, max_new_tokens=2)
    assert [made.text for made in group.rollouts] == ["no", "no"]


def test_the_engine_of_a_context_is_used_inside_it_only() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        with use_engine(engine):
            pass
        with pytest.warns(UserWarning, match="no trainer is running"):
            generate_rollouts([[5]], 1, max_new_tokens=1)
        assert engine.stats().completion_tokens == 0


def test_bf16_engines_agree_with_bf16_transformers() -> None:
    """Greedy log-probs are as near to those of the same weights in fp64 as the module's own eager forward in bf16."""
    model = random_model("qwen3", dtype=torch.bfloat16)
    (group,) = generate(model, PROMPTS[:1], 1, greedy())
    ids = PROMPTS[0] + group.rollouts[0].completion_ids
    drawn = torch.tensor(group.rollouts[0].completion_ids)[:, None]

    def eager(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = module(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
        return logits.double().log_softmax(-1).gather(-1, drawn)[:, 0]

    theirs, exact = eager(model), eager(deepcopy(model).double())
    assert (torch.tensor(group.rollouts[0].logprobs) - exact).norm() <= 1.5 * (theirs - exact).norm()


def test_eager_logits_of_the_shared_model_are_what_they_were() -> None:
    """The other tests of this file left the module that they share alone."""
    fresh = random_model("qwen3")
    assert torch.equal(eager_logits(shared_model("qwen3"), PROMPTS[1]), eager_logits(fresh, PROMPTS[1]))
    scramble(fresh, 1)
    assert not torch.equal(eager_logits(shared_model("qwen3"), PROMPTS[1]), eager_logits(fresh, PROMPTS[1]))


def test_a_replaced_parameter_is_refused_at_the_next_request() -> None:
    model = random_model()
    with small_engine(model) as engine:
        engine.generate_rollouts(PROMPTS, 1, SAMPLING)
        linear = model.model.layers[0].self_attn.v_proj
        linear.weight = nn.Parameter(linear.weight.detach() * 3)
        for call in (lambda: engine.generate_rollouts(PROMPTS, 1, SAMPLING), lambda: engine.submit(PROMPTS[0])):
            with pytest.raises(RolloutError, match="no longer the tensor that the engine reads"):
                call()


def test_weights_may_be_announced_while_the_pool_is_released() -> None:
    with small_engine(random_model()) as engine:
        engine.release_memory()
        engine.weights_updated()
        engine.restore_memory()
        assert engine.generate_rollouts(PROMPTS, 1, SAMPLING)[0].rollouts[0].policy_version == 1


@pytest.mark.parametrize(
    "bad",
    [{"n": 1.5}, {"n": True}, {"prompts": None}, {"prompts": [b"ab"]}, {"step": 1.5}, {"keys": ["a"]}],
    ids=str,
)
def test_values_of_a_wrong_kind_are_named(bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"prompts": [[1]], "sampling": SAMPLING} | bad
    with small_engine(shared_model("qwen3")) as engine, pytest.raises(RolloutError):
        engine.generate_rollouts(**arguments)


@pytest.mark.parametrize("bad", [{"seed": 1.5}, {"temperature": "1"}, {"ignore_eos": "no"}, {"top_p": None}], ids=str)
def test_sampling_parameters_of_a_wrong_kind_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=f"^{next(iter(bad))}="):
        SamplingParams(**bad)
