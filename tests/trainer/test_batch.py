"""Packs and micro-batches: log-probs and gradients are those of one unpacked row after the other in transformers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny_models
from rollout import Rollout, RolloutEngine, RolloutGroup, SamplingParams
from rollout.forward.scoring import TokenScores, score_tokens
from rollout.model.kv_cache import LayerGroup
from rollout.model.views import training_view
from rollout_kernels.shapes import ROW_MULTIPLE
from tiny_models import numerics_of
from trainer.algorithm.batch import StepTokens, StepTotals, TrainingBatch, micro_batches
from trainer.algorithm.losses import policy_loss
from trainer.algorithm.objectives import clipped


def _group(prompt: list[int], completions: list[list[int]]) -> RolloutGroup:
    rollouts = [Rollout(i, c, [-1.0] * len(c), [-1.0] * len(c), None, "stop", 0) for i, c in enumerate(completions)]
    return RolloutGroup(prompt, rollouts, 0, 0)


def _groups(lengths: list[list[int]], vocab: int = tiny_models.VOCAB) -> list[RolloutGroup]:
    generator = torch.Generator().manual_seed(3)

    def draw(size: int) -> list[int]:
        ids: list[int] = torch.randint(vocab, (size,), generator=generator).tolist()
        return ids

    return [_group(draw(prompt), [draw(size) for size in sizes]) for prompt, *sizes in lengths]


def _batches(model: PreTrainedModel, groups: list[RolloutGroup], max_tokens: int) -> list[TrainingBatch]:
    step = StepTokens.of(groups, exact=True)
    step = replace(step, advantages=step.spread(torch.arange(float(sum(len(g.rollouts) for g in groups)))))
    layer = LayerGroup.of(model.config, model.dtype)
    return list(micro_batches(step, layer, torch.device("cpu"), max_tokens=max_tokens, row_multiple=ROW_MULTIPLE))


LENGTHS = [[5, 1, 8, 3], [70, 4, 66, 2], [1, 2, 2, 9]]


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_log_probs_are_those_of_unpacked_rows(arch: str) -> None:
    model = tiny_models.shared_model(arch)
    groups = _groups(LENGTHS)
    (batch,) = _batches(model, groups, 10_000)
    view = training_view(model, numerics_of(model), gradient_checkpointing=False)
    ours = score_tokens(view, batch.pack, SamplingParams(temperature=0.7)).logprobs
    theirs = [
        tiny_models.eager_logprobs(model, g.prompt_ids, r.completion_ids, 0.7) for g in groups for r in g.rollouts
    ]
    assert (ours.double() - torch.cat(theirs)).abs().max() < tiny_models.LOGPROB_TOLERANCE


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_gradients_are_those_of_unpacked_rows(arch: str, checkpointing: bool) -> None:
    ours, theirs = tiny_models.random_model(arch), tiny_models.random_model(arch)
    groups = _groups(LENGTHS)
    (batch,) = _batches(ours, groups, 10_000)
    view = training_view(ours, numerics_of(ours), gradient_checkpointing=checkpointing)
    score_tokens(view, batch.pack, SamplingParams()).logprobs.sum().backward()
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            logits = theirs(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.completion_ids)[:, None])
            chosen.sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 1e-4 * b.grad.norm(), name


def test_forced_tokens_are_attended_and_count_in_no_loss() -> None:
    """Two of five tokens of the first completion: the loss is a mean of the six others, and its gradient theirs."""
    model = tiny_models.shared_model("qwen3")
    (group,) = _groups([[6, 5, 3]])
    mask = [True, False, False, True, True]
    forced = replace(group.rollouts[0], loss_mask=mask)
    masked = replace(group, rollouts=[forced, group.rollouts[1]])
    (batch,) = _batches(model, [masked], 10_000)
    (plain,) = _batches(model, [group], 10_000)
    assert batch.loss_mask.tolist() == mask + [True] * 3
    assert plain.loss_mask.tolist() == [True] * 8
    assert all(torch.equal(getattr(batch.pack, name), getattr(plain.pack, name)) for name in ("ids", "targets"))
    logprobs = torch.full((8,), -1.0, requires_grad=True)
    rewarded, totals = replace(batch, advantages=torch.ones(8)), StepTotals.of(StepTokens.of([masked], exact=True))
    scores = TokenScores(logprobs, torch.zeros(8))
    loss = policy_loss(scores, rewarded, totals, objective=partial(clipped, low=0.2, high=0.2))
    loss.loss.backward()
    assert loss.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 6, 0.0, 0.0, *[-1 / 6] * 5])


@pytest.mark.parametrize("max_tokens", [1, 20, 90, 10_000])
def test_every_completion_is_in_one_pack_whatever_the_budget(max_tokens: int) -> None:
    model = tiny_models.shared_model("llama")
    groups = _groups(LENGTHS)
    batches = _batches(model, groups, max_tokens)
    targets = [token for batch in batches for token in batch.pack.targets.tolist()]
    assert targets == [token for g in groups for r in g.rollouts for token in r.completion_ids]
    repeated = [i for i, r in enumerate(r for g in groups for r in g.rollouts) for _ in r.completion_ids]
    assert [int(a) for batch in batches for a in batch.advantages] == repeated
    longest = max(len(g.prompt_ids) + len(r.completion_ids) for g in groups for r in g.rollouts)
    assert all(len(batch.pack.ids) <= max(max_tokens, longest) + 15 for batch in batches)


def test_the_split_does_not_change_log_probs_in_any_bit() -> None:
    model = tiny_models.shared_model("qwen3")
    groups = _groups(LENGTHS)
    view = training_view(model, numerics_of(model), gradient_checkpointing=False)
    whole, split = (
        torch.cat([score_tokens(view, b.pack, SamplingParams()).logprobs for b in _batches(model, groups, size)])
        for size in (10_000, 20)
    )
    assert torch.equal(whole, split)


def test_a_change_in_one_completion_leaves_the_others_alone() -> None:
    """Packed rows do not see each other."""
    model = tiny_models.shared_model("qwen2")
    groups = _groups([[6, 5, 5]])
    changed = [_group(groups[0].prompt_ids, [[7] * 5, groups[0].rollouts[1].completion_ids])]
    view = training_view(model, numerics_of(model), gradient_checkpointing=False)
    before, after = (
        score_tokens(view, _batches(model, g, 10_000)[0].pack, SamplingParams()).logprobs for g in (groups, changed)
    )
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.05}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_sees_the_generators_log_probs_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_models.random_model("qwen3", dtype=dtype)
    sampling = SamplingParams(max_new_tokens=12, seed=4, **options)
    with RolloutEngine(model) as engine:
        groups = engine.generate_rollouts(tiny_models.random_prompts([3, 20, 70]), 3, sampling)
        view = engine.training_view()
        (batch,) = micro_batches(
            StepTokens.of(groups, exact=True),
            engine.layer_group,
            engine.device,
            max_tokens=10_000,
            row_multiple=ROW_MULTIPLE,
        )
    scores = score_tokens(view, batch.pack, sampling)
    assert scores.logprobs.requires_grad
    assert torch.equal(scores.logprobs.detach(), batch.rollout_logprobs)
    with torch.no_grad():
        next(view.parameters())[:, 0] += 0.1
    assert not torch.equal(score_tokens(view, batch.pack, sampling).logprobs, batch.rollout_logprobs)


def test_a_user_s_default_dtype_takes_no_digits() -> None:
    group = _group([1, 2], [[3], [4]])
    group.rollouts[0].logprobs[0] = group.rollouts[1].logprobs[0] = -0.123456789
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = LayerGroup.of(tiny_models.shared_model("qwen3").config, torch.float32)
        given = torch.tensor([[0.7071067, -0.7071067]], dtype=torch.float32)
        step = StepTokens.of([group], exact=True)
        step = replace(step, advantages=step.spread(given))
        (batch,) = micro_batches(step, layer, torch.device("cpu"), max_tokens=99, row_multiple=ROW_MULTIPLE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch.rollout_logprobs.dtype == batch.advantages.dtype == torch.float32
    assert batch.rollout_logprobs.equal(torch.full((2,), -0.123456789))
    assert batch.advantages.equal(given[0])


@pytest.mark.parametrize("max_tokens", [10_000, 12])
def test_every_token_knows_its_rollout_however_the_step_is_split(max_tokens: int) -> None:
    groups = _groups(LENGTHS)
    batches = _batches(tiny_models.shared_model("qwen3"), groups, max_tokens)
    assert (len(batches) > 1) is (max_tokens == 12)
    ids = torch.cat([batch.rollout_ids for batch in batches])
    sizes = [size for _, *group in LENGTHS for size in group]
    assert ids.tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]
    # in _batches a rollout's advantage is its place in the step
    assert torch.equal(ids.float(), torch.cat([batch.advantages for batch in batches]))
    assert StepTotals.of(StepTokens.of(groups, exact=True)) == StepTotals(
        num_tokens=sum(sizes), num_rollouts=len(sizes)
    )
