"""Logits in chunks: the same bits as all at once, the same gradients, and a fraction of the memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from rollout import SamplingParams
from rollout.forward import Pack, TokenScores, build_pack, score_tokens, scoring
from rollout.forward.sampler import processed_logits
from rollout.model import LayerGroup, training_view
from rollout.model.views import AttentionContext, raw_logits
from rollout_kernels.logprobs import entropy, token_logprobs
from rollout_kernels.shapes import ROW_MULTIPLE
from tiny_models import numerics_of
from trainer.config import OptimConfig
from trainer.weights.optimizer import MasterAdamW

GROUPS = [(p, tiny_models.random_prompts((19, 2, 36), seed=1)) for p in tiny_models.random_prompts((1, 75, 5))]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.7, top_k=20), SamplingParams(top_p=0.8)]


def pack_of(model: PreTrainedModel, groups: list[tuple[list[int], list[list[int]]]] = GROUPS) -> Pack:
    layer = LayerGroup.of(model.config, model.dtype)
    return build_pack(groups, layer, torch.device("cpu"), row_multiple=ROW_MULTIPLE)


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    return training_view(model, numerics_of(model), gradient_checkpointing=False)


def whole(view: PreTrainedModel, pack: Pack, sampling: SamplingParams) -> TokenScores:
    """From logits of all rows."""
    context = AttentionContext(pack.plan, view.numerics.ops)
    logits = raw_logits(view, context, pack.ids, pack.positions, pack.logit_rows)[: len(pack.targets)]
    z, kept = processed_logits(logits, [sampling] * len(logits))
    return TokenScores(token_logprobs(z, pack.targets, kept), entropy(z, kept))


@pytest.fixture(params=[1, 16, 48, 1024])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "chunk_rows", lambda vocab_size: max(ROW_MULTIPLE, request.param))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_have_the_bits_of_the_whole(dtype: torch.dtype, sampling: SamplingParams) -> None:
    model = tiny_models.random_model("qwen3", dtype=dtype)
    view, pack = view_of(model), pack_of(model)
    scores, expected = score_tokens(view, pack, sampling), whole(view, pack, sampling)
    assert torch.equal(scores.logprobs, expected.logprobs)
    assert torch.equal(scores.entropy, expected.entropy)


def gradients(model: PreTrainedModel, loss: Callable[[PreTrainedModel, Pack], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss(view_of(model), pack_of(model)))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_gradients_are_those_of_the_whole(arch: str, coefficient: float) -> None:
    """The head's too, tied or not; coefficient: of the entropies."""
    model = tiny_models.random_model(arch)
    weights = torch.randn(len(pack_of(model).targets), generator=torch.Generator().manual_seed(2))

    def loss(scores: TokenScores) -> Tensor:
        return (weights * scores.logprobs).sum() + coefficient * (weights * scores.entropy).sum()

    graded = coefficient > 0
    ours = gradients(model, lambda v, p: loss(score_tokens(v, p, SAMPLINGS[1], entropy_gradient=graded)))
    theirs = gradients(model, lambda v, p: loss(whole(v, p, SAMPLINGS[1])))
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-7, name


def test_the_optimizer_sums_the_chunks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 weights: as near to the gradient in fp64 with many chunks as with one."""
    errors = []
    for rows in (1024, 16):
        monkeypatch.setattr(scoring, "chunk_rows", lambda vocab_size, rows=rows: rows)
        model = tiny_models.random_model("llama", dtype=torch.bfloat16)
        optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
        score_tokens(view_of(model), pack_of(model), SAMPLINGS[0]).logprobs.sum().backward()
        gradient = optimizer.masters["lm_head.weight"].grad
        assert gradient is not None
        assert gradient.dtype == torch.float32
        exact = tiny_models.random_model("llama", dtype=torch.bfloat16).double()
        gradients(exact, lambda view, pack: whole(view, pack, SAMPLINGS[0]).logprobs.sum())
        expected = exact.get_output_embeddings().weight.grad
        errors.append(float((gradient.double() - expected).norm() / expected.norm()))
        optimizer.close()
    assert errors[1] <= 1.1 * errors[0]


def test_only_the_head_may_have_gradients() -> None:
    model = tiny_models.random_model("llama")
    model.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_()
    found = gradients(model, lambda view, pack: score_tokens(view, pack, SAMPLINGS[0]).logprobs.sum())
    assert list(found) == ["lm_head.weight"]
    assert found["lm_head.weight"].any()


@pytest.mark.slow
def test_a_large_vocabulary_takes_a_fraction_of_the_memory() -> None:
    """4,096 tokens of 32,768 words: log-probs and their backward in less than a quarter of what all logits take."""
    model = tiny_models.random_model("llama", vocab_size=32_768, max_position_embeddings=8192)
    pack = pack_of(model, [([1], [list(range(4096))])])
    view = view_of(model)

    def peak(loss: Callable[[], Tensor]) -> int:
        model.zero_grad()
        return tiny_models.allocated_peak(lambda: torch.autograd.backward(loss()))

    ours = peak(lambda: score_tokens(view, pack, SAMPLINGS[0]).logprobs.sum())
    theirs = peak(lambda: whole(view, pack, SAMPLINGS[0]).logprobs.sum())
    assert theirs > 2 * 4 * 4096 * 32_768
    assert ours < theirs / 4


@pytest.mark.parametrize(("vocab", "rows"), [(260, 1024), (8192, 1024), (32_768, 256), (151_936, 48), (10**9, 16)])
def test_a_chunk_is_bounded_by_its_bytes(vocab: int, rows: int) -> None:
    assert scoring.chunk_rows(vocab) == rows
