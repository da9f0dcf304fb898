"""The training view's log-probs of a packed rollout against those that the engine returned: equal in every bit.

The pack's forward builds the graph that a backward uses, so what holds here holds for the trainer's own log-probs.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout import ExactnessError, RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.forward.packing import build_pack
from rollout.forward.sampler import processed_logits
from rollout.model import numerics
from rollout.model.substitutions import fuse
from rollout.model.views import AttentionContext, raw_logits
from rollout_kernels.logprobs import token_logprobs
from rollout_kernels.ops import Ops
from tiny_models import ARCHITECTURES, LOGPROB_TOLERANCE, eager_logprobs, random_model, random_prompts, small_engine

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def trainer_logprobs(
    engine: RolloutEngine, groups: Sequence[RolloutGroup], sampling: SamplingParams, *, checkpointing: bool = False
) -> Tensor:
    """Log-probs [C] of all completion tokens through the training view, with gradients."""
    view = engine.training_view(gradient_checkpointing=checkpointing)
    lists = [(group.prompt_ids, [rollout.completion_ids for rollout in group.rollouts]) for group in groups]
    pack = build_pack(lists, engine.layer_group, engine.device, row_multiple=engine.numerics.row_multiple)
    logits = raw_logits(view, AttentionContext(pack.plan, view.numerics.ops), pack.ids, pack.positions, pack.logit_rows)
    z, kept = processed_logits(logits, [sampling] * len(logits))
    count = len(pack.targets)
    return token_logprobs(z[:count], pack.targets, None if kept is None else kept[:count])


def rollout_logprobs(groups: Sequence[RolloutGroup]) -> Tensor:
    return torch.tensor([logprob for group in groups for rollout in group.rollouts for logprob in rollout.logprobs])


def assert_same_bits(engine: RolloutEngine, groups: Sequence[RolloutGroup], sampling: SamplingParams) -> None:
    theirs, ours = rollout_logprobs(groups), trainer_logprobs(engine, groups, sampling)
    assert ours.requires_grad
    assert torch.equal(ours, theirs), f"gap {(ours - theirs).abs().max()} at {int((ours != theirs).sum())} tokens"


# -- equal bits ---------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_trainer_logprobs_equal_rollout_logprobs(threads: int, arch: str, dtype: torch.dtype) -> None:
    """Prompts on both sides of a segment, siblings that share it, several chunks of prefill."""
    sampling = SamplingParams(temperature=0.9, max_new_tokens=10, seed=0)
    with small_engine(random_model(arch, dtype=dtype), max_num_batched_tokens=64, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([3, 70, 1, 130]), 4, sampling)
        assert_same_bits(engine, groups, sampling)


@DTYPES
@pytest.mark.parametrize(
    ("num_prompts", "n", "new_tokens"), [(1, 1, 1), (3, 1, 3), (1, 17, 1), (1, 1, 211), (5, 8, 25)], ids=str
)
def test_batches_of_1_to_1000_tokens(
    threads: int, num_prompts: int, n: int, new_tokens: int, dtype: torch.dtype
) -> None:
    sampling = SamplingParams(max_new_tokens=new_tokens, seed=0)
    prompts = random_prompts([1 + 7 * i for i in range(num_prompts)])
    with small_engine(random_model("qwen3", dtype=dtype), exact="require") as engine:
        groups = engine.generate_rollouts(prompts, n, sampling)
        assert len(rollout_logprobs(groups)) == num_prompts * n * new_tokens
        assert_same_bits(engine, groups, sampling)


@DTYPES
@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads"), [(40, 160, 4), (40, 1536, 5), (160, 40, 4), (1536, 40, 12)], ids=str
)
def test_widths(threads: int, hidden: int, intermediate: int, heads: int, dtype: torch.dtype) -> None:
    """Head sizes 10, 8, 40 and 128; few of these fill vector registers evenly."""
    kv_heads = 1 if heads == 5 else 2
    model = random_model(
        "llama",
        dtype=dtype,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    sampling = SamplingParams(max_new_tokens=9, seed=0)
    with small_engine(model, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([5, 66]), 3, sampling)
        assert_same_bits(engine, groups, sampling)


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 300), (7, 43), (16, 19), (1, 800), (7, 200), (128, 20)])
def test_block_sizes_and_a_pool_that_preempts(block_size: int, num_blocks: int) -> None:
    """The first three pools hold 300 tokens, where 8 sequences of up to 120 want to run."""
    sampling = SamplingParams(max_new_tokens=60, seed=0)
    with small_engine(random_model("qwen3"), block_size=block_size, num_blocks=num_blocks, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([60, 33]), 4, sampling)
        assert (engine.stats().preemptions > 0) == (block_size * num_blocks < 400)
        assert_same_bits(engine, groups, sampling)


@DTYPES
@pytest.mark.parametrize("intermediate", [400, 1536])
def test_how_completions_are_packed_changes_no_bit(threads: int, intermediate: int, dtype: torch.dtype) -> None:
    """1,000 tokens in packs of more and more completions, whose tensors are cut among threads at other places."""
    sampling = SamplingParams(max_new_tokens=125, seed=0)
    with small_engine(random_model("llama", dtype=dtype, intermediate_size=intermediate), exact="require") as engine:
        (group,) = engine.generate_rollouts(random_prompts([77]), 8, sampling)
        for count in range(1, 9):
            assert_same_bits(engine, [replace(group, rollouts=group.rollouts[:count])], sampling)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9}],
    ids=str,
)
@DTYPES
def test_sampling_options(options: dict[str, float], dtype: torch.dtype) -> None:
    sampling = SamplingParams(max_new_tokens=12, seed=0, **options)  # type: ignore[arg-type]
    with small_engine(random_model("qwen2", dtype=dtype), exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([5, 30]), 4, sampling)
        assert_same_bits(engine, groups, sampling)


@DTYPES
def test_gradient_checkpointing_changes_no_bit(threads: int, dtype: torch.dtype) -> None:
    """Neither of the log-probs nor of the gradients, which land on the caller's own parameters."""
    model = random_model("qwen3", dtype=dtype)
    sampling = SamplingParams(max_new_tokens=10, seed=0)
    gradients: list[list[Tensor]] = []
    with small_engine(model, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([5, 70]), 3, sampling)
        for checkpointing in (False, True):
            ours = trainer_logprobs(engine, groups, sampling, checkpointing=checkpointing)
            assert torch.equal(ours, rollout_logprobs(groups))
            gradients.append(list(torch.autograd.grad(ours.sum(), list(model.parameters()))))
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_are_those_of_an_eager_forward(arch: str) -> None:
    """Of the sum of all completions' log-probs, against transformers, one unpacked row at a time."""
    model = random_model(arch)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=10, seed=0)
    parameters = list(model.parameters())
    with small_engine(model) as engine:
        groups = engine.generate_rollouts(random_prompts([5, 70]), 3, sampling)
        ours = torch.autograd.grad(trainer_logprobs(engine, groups, sampling).sum(), parameters)
    total = torch.zeros(())
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1] / 0.8
            total = total + logits.log_softmax(-1).gather(-1, ids[0, len(group.prompt_ids) :, None]).sum()
    for mine, right in zip(ours, torch.autograd.grad(total, parameters), strict=True):
        assert (mine - right).norm() < 1e-4 * right.norm()


def test_one_changed_weight_opens_a_gap() -> None:
    model = random_model("qwen3")
    sampling = SamplingParams(max_new_tokens=10, seed=0)
    with small_engine(model, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([5, 70]), 3, sampling)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[7, 11] += 0.1
        gap = (trainer_logprobs(engine, groups, sampling) - rollout_logprobs(groups)).abs().max()
    assert 0.0 < gap < 1.0


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("hidden", [40, 160, 1536])
@pytest.mark.parametrize("intermediate", [40, 160, 1536])
@pytest.mark.parametrize(("n", "new_tokens"), [(1, 1), (9, 1), (17, 1), (1, 211), (8, 125)], ids=str)
def test_all_widths_and_batches(
    threads: int, arch: str, hidden: int, intermediate: int, n: int, new_tokens: int, dtype: torch.dtype
) -> None:
    model = random_model(arch, dtype=dtype, hidden_size=hidden, intermediate_size=intermediate)
    sampling = SamplingParams(max_new_tokens=new_tokens, seed=0)
    with small_engine(model, exact="require") as engine:
        groups = engine.generate_rollouts(random_prompts([19]), n, sampling)
        assert_same_bits(engine, groups, sampling)


# -- a machine or a model where it does not hold ------------------------------------------------------------------


class SizeDependent(nn.Module):
    """A SiLU whose value hangs, a little, on how many rows it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) * (1.0 + 1e-6 * x.shape[-2])


class Doubled(nn.Module):
    """No SiLU at all."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * nn.functional.silu(x)


def replace_activation(monkeypatch: pytest.MonkeyPatch, activation: type[nn.Module]) -> None:
    def substitute(view: PreTrainedModel, ops: Ops) -> None:
        for layer in view.model.layers:
            layer.mlp.act_fn = activation()

    monkeypatch.setattr(numerics, "EXACT", (substitute, fuse))


def test_auto_says_that_bits_differ_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_activation(monkeypatch, SizeDependent)
    with caplog.at_level(logging.WARNING, "rollout"), small_engine(random_model("llama"), exact="auto") as engine:
        assert not engine.numerics.exact
        assert "generator and trainer differ at" in engine.stats().exact_reason
    assert "exact=auto" in caplog.text
    assert "recompute log-probs" in caplog.text


def test_require_refuses_where_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_activation(monkeypatch, SizeDependent)
    with pytest.raises(ExactnessError, match=r"differ at .* tokens"):
        small_engine(random_model("llama"), exact="require")


def test_one_record_says_how_both_views_compute() -> None:
    with small_engine(random_model("llama")) as engine:
        before = engine.numerics
        assert engine._core.runner is not None
        assert engine._core.runner.view.numerics is engine.training_view().numerics is before
        engine.fall_back("a step differs")
        assert engine.numerics == replace(before, exact=False, reason="a step differs")
        assert engine.training_view().numerics is engine.numerics
        assert (engine.stats().exact, engine.stats().exact_reason) == (False, "a step differs")


def test_nothing_is_said_where_bits_agree(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), small_engine(random_model("llama"), exact="auto") as engine:
        assert engine.numerics.exact
        assert engine.stats().exact
        assert "agree in every bit" in engine.stats().exact_reason
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("activation", "intermediate"),
    [("gelu_pytorch_tanh", 160), ("mish", 160), ("mish", 400), ("quick_gelu", 176), ("sigmoid", 176)],
)
def test_exactness_is_not_claimed_where_larger_batches_break_it(
    restore_threads: None, activation: str, intermediate: int
) -> None:
    """torch's own activations compute the end of each thread's share otherwise: seen where a tensor is split."""
    torch.set_num_threads(3)
    sampling = SamplingParams(max_new_tokens=40, seed=0)
    with small_engine(random_model("llama", hidden_act=activation, intermediate_size=intermediate)) as engine:
        groups = engine.generate_rollouts(random_prompts([50, 66, 190, 131, 7, 80]), 6, sampling)
        num_differing = int((trainer_logprobs(engine, groups, sampling) != rollout_logprobs(groups)).sum())
    assert num_differing == 0 or not engine.numerics.exact


@pytest.mark.parametrize("exact", ["auto", "require"])
def test_a_model_that_the_engine_does_not_run_right_is_refused(monkeypatch: pytest.MonkeyPatch, exact: str) -> None:
    replace_activation(monkeypatch, Doubled)
    with pytest.raises(RolloutError, match="does not run this model right"):
        small_engine(random_model("llama"), exact=exact)


@pytest.mark.parametrize("exact", ["off", "auto"])
def test_without_exactness_logprobs_are_right_within_rounding(monkeypatch: pytest.MonkeyPatch, exact: str) -> None:
    """exact=off, and exact=auto after its probe has failed: the model's own activations are back."""
    replace_activation(monkeypatch, SizeDependent)
    model = random_model("llama")
    sampling = SamplingParams(max_new_tokens=10, seed=0)
    with small_engine(model, exact=exact) as engine:
        groups = engine.generate_rollouts(random_prompts([5, 70]), 3, sampling)
        assert not engine.stats().exact
        gap = (trainer_logprobs(engine, groups, sampling) - rollout_logprobs(groups)).abs().max()
    assert gap < LOGPROB_TOLERANCE
    for group in groups:
        for rollout in group.rollouts:
            expected = eager_logprobs(model, group.prompt_ids, rollout.completion_ids)
            assert (torch.tensor(rollout.logprobs) - expected).abs().max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("where", ["attention_dropout", "nn.Dropout"])
def test_dropout_is_refused_in_training(where: str) -> None:
    """Rollouts are drawn without it, so log-probs could not agree."""
    model = random_model("llama", attention_dropout=0.1 if where == "attention_dropout" else 0.0)
    if where == "nn.Dropout":
        model.model.layers[1].mlp.drop = nn.Dropout(0.1)
    with small_engine(model) as engine, pytest.raises(RolloutError, match="dropout"):
        engine.training_view()
