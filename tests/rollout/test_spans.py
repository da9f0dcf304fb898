"""Completions with forced tokens in the middle: in every bit what decoding the same ids, one at a time, makes of them.

`replay` is that decode: a sequence alone with a cache of its own, one token per forward, no scheduler. What it stores
and draws at each place is what the engine has to have stored and drawn, however it computed the forced tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends import needs_stable_products
from rollout import Rollout, RolloutEngine, RolloutError, RolloutHandle, SamplingParams, TokenEvent
from rollout.engine.steering import force
from rollout.forward.packing import build_pack
from rollout.forward.runner import ModelRunner
from rollout.forward.sampler import sample
from rollout.forward.scoring import score_tokens
from rollout.model.kv_cache import KVCache, LayerGroup
from rollout.model.views import make_view
from rollout.schedule.batch import Chunk
from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.sequence import Request, Sequence
from rollout_kernels.shapes import ROW_MULTIPLE
from tiny_models import (
    LOGPROB_TOLERANCE,
    VOCAB,
    chain_model,
    eager_logprobs,
    numerics_of,
    random_model,
    random_prompts,
    shared_model,
    small_engine,
)

SAMPLING = SamplingParams(max_new_tokens=34, temperature=0.9, top_k=50, seed=5)
PROMPTS = random_prompts([5, 61], seed=4)
"""The second ends shortly before a segment does."""
FORCED = {3: 14, 20: 2, 24: 1}
"""Completion length -> tokens that are forced there: many, few, and one."""
MASK = [not (3 <= place < 17 or 20 <= place < 22 or place == 24) for place in range(34)]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OPTIONS: dict[str, dict[str, Any]] = {
    "blocks_of_16": {"exact": "require"},
    "blocks_that_do_not_divide_a_segment": {"block_size": 24},
    "chunks_of_5_no_cache": {"prefill_chunk_size": 5, "prefix_cache": False},
    "room_for_few": {"block_size": 4, "num_blocks": 28, "prefill_chunk_size": 9},
    "one_at_a_time": {"block_size": 3, "max_num_seqs": 1, "max_num_batched_tokens": 4},
}

Stored = dict[tuple[int, int], Tensor]
"""(prompt, completion) -> its KV [length, keys and values, layers, kv_heads, head_dim]."""


def stored(cache: KVCache, table: BlockTable, length: int) -> Tensor:
    """What a table's blocks hold of the first `length` positions."""
    positions = torch.arange(length)
    blocks = torch.tensor(table.blocks)[positions // cache.block_size]
    return torch.stack([pool[:, blocks, :, positions % cache.block_size] for pool in (cache.keys, cache.values)], 1)


@dataclass
class Run:
    """Submits PROMPTS, and forces tokens on every completion when it has the lengths of `forced`."""

    engine: RolloutEngine
    forced: dict[int, int] = field(default_factory=lambda: FORCED)
    kv: Stored = field(default_factory=dict)

    def rollouts(self, n: int, sampling: SamplingParams = SAMPLING) -> list[tuple[RolloutHandle, Rollout]]:
        handles = [self.engine.submit(prompt, n, sampling, key=key) for key, prompt in enumerate(PROMPTS)]
        while self.engine.has_work:
            self.engine.step()
            for handle in handles:
                self.look(handle)
        self.engine.scheduler.check_integrity()
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks
        return [(handle, rollout) for handle in handles for rollout in handle.group().rollouts]

    def look(self, handle: RolloutHandle) -> None:
        assert self.engine._core.runner is not None
        for sequence in [s for s in handle.request.sequences if s.finish_reason is None]:
            if sequence.table.blocks and not sequence.recomputing:
                kv = stored(self.engine._core.runner.cache, sequence.table, sequence.num_computed)
                self.kv[handle.request.key, sequence.index] = kv
            length = len(sequence.completion_ids)
            if length in self.forced:
                draw = random.Random(f"{handle.request.key} {sequence.index} {length}")
                ids = [draw.randrange(VOCAB) for _ in range(self.forced[length])]
                force(self.engine._core, handle, sequence.index, ids)


def replay(model: PreTrainedModel, request: Request, made: Rollout) -> tuple[Tensor, list[tuple[int, float, float]]]:
    """KV, and id, log-prob and raw log-prob drawn at each place, when made's ids are decoded one at a time."""
    cache = KVCache(LayerGroup.of(model.config, model.dtype), 12, 16, torch.device("cpu"))
    runner = ModelRunner(make_view(model, numerics_of(model)), cache, max_num_seqs=1, max_len=1)
    sequence = Sequence(request, made.index, list(request.prompt_ids), BlockTable(BlockPool(12, 16)))
    drawn: list[tuple[int, float, float]] = []
    for token in made.completion_ids:
        start, end = sequence.num_computed, sequence.num_tokens
        sequence.table.make_writable(start, end)
        inputs = runner.prepare([Chunk(sequence, start, end - start)])
        with torch.no_grad():
            sampled = sample(runner.execute(inputs), inputs.draws, runner.view.numerics.ops)
        drawn.append((int(sampled.ids), float(sampled.logprobs), float(sampled.raw_logprobs)))
        sequence.num_computed = end
        sequence.force([token])
    return stored(cache, sequence.table, sequence.num_computed), drawn


def check_draws(made: Rollout, drawn: list[tuple[int, float, float]], start: int = 0) -> None:
    """From place `start` on every token was drawn as the replay draws it there, or was forced."""
    entries = zip(made.completion_ids, made.logprobs, made.raw_logprobs, made.loss_mask, strict=True)
    for (token, logprob, raw_logprob, counts), expected in list(zip(entries, drawn, strict=True))[start:]:
        assert (token, logprob, raw_logprob) == (expected if counts else (token, 0.0, 0.0))


@pytest.mark.usefixtures("implementation")
@DTYPES
@pytest.mark.parametrize("options", OPTIONS)
def test_kv_ids_and_log_probs_are_those_of_decoding_the_same_ids(dtype: torch.dtype, options: str) -> None:
    needs_stable_products(dtype)
    model = random_model("qwen3", dtype=dtype)
    with small_engine(model, **OPTIONS[options]) as engine:
        run = Run(engine)
        made = run.rollouts(n=2)
        assert (engine.stats().preemptions > 2) == (options == "room_for_few")
    assert len(made) == 4
    for handle, rollout in made:
        assert (rollout.finish_reason, rollout.loss_mask) == ("length", MASK)
        kv, drawn = replay(model, handle.request, rollout)
        check_draws(rollout, drawn)
        ours = run.kv[handle.request.key, rollout.index]
        assert len(ours) == len(kv) - 1  # before the step that ended it
        assert torch.equal(ours, kv[:-1])


@pytest.mark.usefixtures("implementation")
@DTYPES
def test_a_training_pack_sees_the_log_probs_of_drawn_tokens_bit_for_bit(dtype: torch.dtype) -> None:
    needs_stable_products(dtype)
    with small_engine(random_model("llama", dtype=dtype), exact="require") as engine:
        made = Run(engine).rollouts(n=3)
        groups = [(p, [r.completion_ids for h, r in made if h.prompt_ids == p]) for p in PROMPTS]
        masks = [rollout.loss_mask for _, rollout in made]
        pack = build_pack(groups, engine.layer_group, engine.device, row_multiple=ROW_MULTIPLE, loss_masks=masks)
        scores = score_tokens(engine.training_view(), pack, SAMPLING).logprobs.detach()
    assert pack.loss_mask.tolist() == MASK * 6
    assert pack.targets.tolist() == [token for _, rollout in made for token in rollout.completion_ids]
    logprobs = torch.tensor([value for _, rollout in made for value in rollout.logprobs])
    assert torch.equal(scores[pack.loss_mask], logprobs[pack.loss_mask])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_log_probs_are_those_of_transformers_own_forward(arch: str) -> None:
    """Within rounding in fp32, and exactly 0.0 where tokens were forced."""
    model, sampling = shared_model(arch), SamplingParams(max_new_tokens=34, temperature=0.8, seed=2)
    with small_engine(model, block_size=4) as engine:
        made = Run(engine).rollouts(2, sampling)
    for handle, rollout in made:
        counts = torch.tensor(rollout.loss_mask)
        expected = eager_logprobs(model, handle.prompt_ids, rollout.completion_ids, 0.8)
        gap = (torch.tensor(rollout.logprobs, dtype=torch.float64) - expected)[counts]
        assert gap.abs().max() < LOGPROB_TOLERANCE
        assert torch.tensor(rollout.logprobs)[~counts].eq(0.0).all()


def test_a_completion_without_forced_tokens_counts_everywhere() -> None:
    with small_engine(shared_model("llama")) as engine:
        for _, rollout in Run(engine, forced={}).rollouts(n=2):
            assert rollout.loss_mask == [True] * len(rollout.completion_ids) == [True] * 34


# -- forks --------------------------------------------------------------------------------------------------------


def begin(engine: RolloutEngine, length: int, sampling: SamplingParams = SAMPLING) -> RolloutHandle:
    """A completion of PROMPTS[0] that has drawn `length` tokens."""
    handle = engine.submit(PROMPTS[0], 1, sampling)
    while not handle.request.sequences or len(handle.request.sequences[0].logprobs) < length:
        engine.step()
    return handle


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"prefill_chunk_size": 4, "block_size": 4}], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_fork_has_its_parents_forced_tokens(options: dict[str, Any], steps: int) -> None:
    """Forked before they are computed, when they are in part, and behind them."""
    model = shared_model("qwen3")
    with small_engine(model, **options) as engine:
        parent = begin(engine, 4)
        force(engine._core, parent, 0, [7] * 9)
        for _ in range(steps):
            engine.step()
        fork = engine.fork(parent, 0)
        taken = len(fork.request.sequences[0].logprobs)  # drawn under the parent's index
        while engine.has_work:
            engine.step()
    for handle, start in ((parent, 0), (fork, taken)):
        (rollout,) = handle.rollouts
        assert rollout.loss_mask == [True] * 4 + [False] * 9 + [True] * 21
        assert rollout.completion_ids[4:13] == [7] * 9
        check_draws(rollout, replay(model, handle.request, rollout)[1], start)
    ours, theirs = fork.rollouts[0], parent.rollouts[0]
    assert ours.logprobs[:taken] == theirs.logprobs[:taken]
    assert ours.completion_ids[13:] != theirs.completion_ids[13:]


# -- ends ---------------------------------------------------------------------------------------------------------


def test_an_end_token_among_forced_ones_ends_nothing_and_a_drawn_one_does() -> None:
    """The chain 1 -> 2 -> 3 -> 4 -> 9, which is an end token; 9 and 1 are forced behind the 3."""
    model = chain_model({1: 2, 2: 3, 3: 4, 4: 9})
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(9,), seed=0)
    with small_engine(model) as engine:
        handle = engine.submit([1], 1, sampling)
        while not handle.request.sequences or len(handle.request.sequences[0].logprobs) < 2:
            engine.step()
        force(engine._core, handle, 0, [9, 1])
        while engine.has_work:
            engine.step()
    (rollout,) = handle.rollouts
    assert rollout.completion_ids == [2, 3, 9, 1, 2, 3, 4, 9]
    assert rollout.finish_reason == "stop"
    assert rollout.loss_mask == [True, True, False, False, True, True, True, True]


def test_forced_tokens_count_for_the_length_and_not_as_drawn() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        handle = begin(engine, 2)
        force(engine._core, handle, 0, [1] * 31)  # one place is left
        engine.step()
        (rollout,) = handle.rollouts
        assert (len(rollout.completion_ids), rollout.finish_reason) == (34, "length")
        assert engine.stats().completion_tokens == 3


def test_events_bring_forced_tokens_with_their_mask() -> None:
    with small_engine(shared_model("qwen3")) as engine:
        handle = begin(engine, 2)
        force(engine._core, handle, 0, [5, 6])
        engine.step()
        events = [event for event in handle.events() if isinstance(event, TokenEvent)]
    assert [event.place for event in events] == [0, 1, 2, 3, 4]
    assert [event.loss_mask for event in events] == [True, True, False, False, True]
    assert events[2:4] == [TokenEvent(0, place, token, 0.0, 0.0, False) for place, token in ((2, 5), (3, 6))]


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], r"\[\]: force one or more ids of the model's vocabulary of 211"),
        ([3, VOCAB], "vocabulary of 211"),
        ([-1], "vocabulary of 211"),
        ([True], "vocabulary of 211"),
        (["a"], "vocabulary of 211"),
        ([1] * 30, "30 tokens are too many for completion 0, which has room for 29 and one to draw behind them"),
    ],
)
def test_what_cannot_be_forced_is_refused_and_changes_nothing(ids: Any, said: str) -> None:
    with small_engine(shared_model("qwen3")) as engine:
        (expected,) = engine.generate_rollouts(PROMPTS[:1], 1, SAMPLING)[0].rollouts
        handle = begin(engine, 4)
        with pytest.raises(RolloutError, match=said):
            force(engine._core, handle, 0, ids)
        while engine.has_work:
            engine.step()
    assert handle.rollouts == [expected]


def waiting(engine: RolloutEngine) -> RolloutHandle:
    return engine.submit(PROMPTS[0], 1, SAMPLING)


def ended(engine: RolloutEngine) -> RolloutHandle:
    handle = begin(engine, 3)
    engine.abort(handle)
    return handle


@pytest.mark.parametrize("make", [waiting, ended])
def test_only_a_running_completion_goes_on_behind_forced_tokens(make: Callable[[RolloutEngine], RolloutHandle]) -> None:
    with small_engine(shared_model("qwen3")) as engine, small_engine(shared_model("qwen3")) as other:
        with pytest.raises(
            RolloutError, match="completion 0 of this request is not running, so it cannot be continued"
        ):
            force(engine._core, make(engine), 0, [1])
        with pytest.raises(RolloutError, match="this handle is of another engine"):
            force(engine._core, begin(other, 2), 0, [1])
