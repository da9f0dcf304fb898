"""What a caller may have set in torch around the engine: no result changes, or the refusal says what to change."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import needs_stable_products, num_threads
from rollout import RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.forward.packing import build_pack
from rollout.forward.scoring import TokenScores, score_tokens
from rollout.model.builtin import build_tiny
from tiny_models import (
    TEXT_VOCAB,
    byte_tokenizer,
    random_model,
    random_prompts,
    save_directory,
    shared_model,
    small_engine,
)

SAMPLING = SamplingParams(max_new_tokens=9, seed=3, temperature=0.8, top_p=0.9)
PROMPTS = random_prompts([5, 70, 18])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("autocast", "inference_mode", "float64", "meta"):
            stack.enter_context(STATES[name]())
        yield


State = Callable[[], AbstractContextManager[Any]]
STATES: dict[str, State] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_fp16": lambda: torch.autocast("cpu", torch.float16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "default_meta": lambda: default_device("meta"),
    "threads": lambda: num_threads(3),
    "all_at_once": all_at_once,
}

states = pytest.mark.parametrize("state", STATES.values(), ids=STATES)


def expected() -> list[RolloutGroup]:
    with small_engine(shared_model("qwen3")) as engine:
        return engine.generate_rollouts(PROMPTS, 3, SAMPLING)


@states
@pytest.mark.usefixtures("implementation")
def test_an_engine_made_or_used_under_another_state_gives_the_same(state: State) -> None:
    needs_stable_products(torch.float32, 1, 3)
    right = expected()
    with state(), small_engine(shared_model("qwen3")) as engine:
        inside = engine.generate_rollouts(PROMPTS, 3, SAMPLING)
    assert engine.numerics.exact
    with small_engine(shared_model("qwen3")) as used, state():
        assert used.generate_rollouts(PROMPTS, 3, SAMPLING) == right
    assert inside == right


@states
def test_the_callers_state_is_what_it_was(state: State) -> None:
    def seen() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
        )

    with small_engine(shared_model("qwen3")) as engine, state():
        before, outside = seen(), []
        for _ in engine.stream_rollouts(PROMPTS, 2, SAMPLING):
            outside.append(seen())
        assert {*outside, seen()} == {before}


@states
def test_a_directory_loads_the_same_under_another_state(tmp_path: Path, state: State) -> None:
    directory = save_directory(tmp_path, random_model("qwen3", vocab_size=TEXT_VOCAB), byte_tokenizer())
    with small_engine(directory) as engine:
        usual = engine.generate_rollouts(PROMPTS, 3, SAMPLING)
    with state(), small_engine(directory) as engine:
        groups = engine.generate_rollouts(PROMPTS, 3, SAMPLING)
    assert [[r.logprobs for r in g.rollouts] for g in groups] == [[r.logprobs for r in g.rollouts] for g in usual]
    engine.module(torch.tensor([[1, 2]])).logits.sum().backward()  # it can be trained


# -- the training view --------------------------------------------------------------------------------------------


def scores_of(engine: RolloutEngine, view: Any, groups: list[RolloutGroup]) -> TokenScores:
    packed = [(group.prompt_ids, [r.completion_ids for r in group.rollouts]) for group in groups]
    pack = build_pack(packed, engine.layer_group, engine.device, row_multiple=engine.numerics.row_multiple)
    return score_tokens(view, pack, SAMPLING)


@states
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("first_used", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_training_view_of_another_state_has_the_generators_bits_and_gradients(state: State, first_used: bool) -> None:
    needs_stable_products(torch.float32, 1, 3)
    model = random_model("qwen3")
    with small_engine(model) as engine:
        groups = engine.generate_rollouts(PROMPTS, 3, SAMPLING)
        drawn = torch.tensor([x for group in groups for r in group.rollouts for x in r.logprobs])
        with state():
            view = engine.training_view()
            if first_used:
                assert scores_of(engine, view, groups).logprobs.tolist() == drawn.tolist()
        scores = scores_of(engine, view, groups)
        assert torch.equal(scores.logprobs, drawn)
        scores.logprobs.sum().backward()
    right = random_model("qwen3")
    with small_engine(right) as engine:
        scores_of(engine, engine.training_view(), groups).logprobs.sum().backward()
    for ours, theirs in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_pack_made_in_inference_mode_can_be_trained_on() -> None:
    with small_engine(random_model("qwen3")) as engine:
        groups = engine.generate_rollouts(PROMPTS, 2, SAMPLING)
        packed = [(group.prompt_ids, [r.completion_ids for r in group.rollouts]) for group in groups]
        with torch.inference_mode():
            pack = build_pack(packed, engine.layer_group, engine.device, row_multiple=engine.numerics.row_multiple)
        score_tokens(engine.training_view(), pack, SAMPLING).logprobs.sum().backward()
    assert engine.module.lm_head.weight.grad.abs().sum() > 0


# -- weights and memory -------------------------------------------------------------------------------------------


@states
def test_weights_and_memory_may_change_under_another_state(state: State) -> None:
    new = random_model("qwen3", seed=4)
    with small_engine(new) as fresh:
        right = fresh.generate_rollouts(PROMPTS, 2, SAMPLING)
    with small_engine(random_model("qwen3")) as engine:
        engine.generate_rollouts(PROMPTS, 2, SAMPLING)
        with state():
            engine.update_weights(new.state_dict())
            engine.release_memory()
            engine.restore_memory()
        groups = engine.generate_rollouts(PROMPTS, 2, SAMPLING)
    assert [[r.logprobs for r in g.rollouts] for g in groups] == [[r.logprobs for r in g.rollouts] for g in right]


@states
def test_the_built_in_model_is_the_same_under_another_state(state: State) -> None:
    right, _ = build_tiny(seed=1)
    with state():
        model, _ = build_tiny(seed=1)
    assert all(torch.equal(value, right.state_dict()[name]) for name, value in model.state_dict().items())
    assert not any(p.is_inference() for p in model.parameters())


# -- what cannot be run -------------------------------------------------------------------------------------------


def test_a_module_that_was_made_where_it_cannot_be_used_is_refused() -> None:
    with torch.inference_mode():
        inference = random_model("qwen3")
        with pytest.raises(RolloutError, match=r"embed_tokens.weight was made under torch.inference_mode"):
            small_engine(inference)
    with torch.device("meta"):
        meta = random_model("qwen3").to("meta")
    for device in ("auto", "cpu"):
        with pytest.raises(RolloutError, match="is on the meta device, which holds no values"):
            small_engine(meta, device=device)
    with default_dtype(torch.float64):
        double = random_model("qwen3", dtype=torch.float64)
        with pytest.raises(RolloutError, match=r"parameters are in \['torch.float64'\]: use one of"):
            small_engine(double)


def test_weights_without_values_are_refused() -> None:
    with small_engine(random_model("qwen3")) as engine:
        with pytest.raises(RolloutError, match="weight' is on the meta device"):
            engine.update_weights(random_model("qwen3").to("meta").state_dict())
        assert engine.policy_version == 0
