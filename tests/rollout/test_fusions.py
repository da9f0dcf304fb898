"""Which modules of a view compiled kernels run, that they hold the caller's parameters, and that the model is the same.

The reference is transformers' own forward of the caller's modules, with eager attention.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends import has_kernels
from rollout.forward.packing import build_pack
from rollout.model.kv_cache import LayerGroup
from rollout.model.substitutions import FusedLinear, FusedMLP, FusedRMSNorm, HeadTap
from rollout.model.views import AttentionContext, bare_view, make_view, raw_logits
from rollout_kernels.shapes import ROW_MULTIPLE
from tiny_models import ARCHITECTURES, numerics_of, random_model, random_prompts, shared_model

ARCHS = pytest.mark.parametrize("arch", ARCHITECTURES)
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "off"])
NORMS = {"qwen3": 4 * 2 + 1, "qwen2": 2 * 2 + 1, "llama": 2 * 2 + 1}
"""Of two layers and the model; Qwen3 norms queries and keys too."""
LINEARS = 7 * 2 + 1
GRADIENT_ROUNDING = 4e-6
"""Most at the bias of keys, which all but cancels from softmax."""
GROUPS = [(prompt, random_prompts((9, 2, 6), seed=1)) for prompt in random_prompts((1, 75, 5))]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if not has_kernels():
        pytest.skip("no compiled kernels here")


def kinds(model: PreTrainedModel) -> Counter[str]:
    """How many modules there are of the kinds that may be replaced; transformers' norms and MLPs by their suffix."""
    heads = [module.head for module in model.modules() if isinstance(module, HeadTap)]
    names = [type(module).__name__ for module in (*model.modules(), *heads)]
    theirs = [n if n.startswith("Fused") else next((s for s in ("RMSNorm", "MLP") if n.endswith(s)), n) for n in names]
    return Counter(n for n in theirs if n in {"Linear", "RMSNorm", "MLP", "FusedLinear", "FusedRMSNorm", "FusedMLP"})


def untouched(arch: str) -> dict[str, int]:
    return {"Linear": LINEARS, "RMSNorm": NORMS[arch], "MLP": 2}


def fused(arch: str) -> dict[str, int]:
    return {f"Fused{kind}": count for kind, count in untouched(arch).items()}


def view_of(model: PreTrainedModel, *, exact: bool = True) -> PreTrainedModel:
    return make_view(model, numerics_of(model, exact=exact))


def parameters(model: PreTrainedModel, **options: bool) -> list[tuple[str, int]]:
    return [(name, p.data_ptr()) for name, p in model.named_parameters(**options)]


@ARCHS
@EXACT
def test_every_layer_that_kernels_can_run_is_replaced(arch: str, exact: bool) -> None:
    model = random_model(arch)
    view = view_of(model, exact=exact)
    assert kinds(view) == fused(arch)
    assert kinds(model) == untouched(arch)


@ARCHS
def test_bf16_models_are_fused_too(arch: str) -> None:
    assert kinds(view_of(random_model(arch, dtype=torch.bfloat16))) == fused(arch)


@ARCHS
@EXACT
def test_a_view_has_the_very_parameters_in_their_order(arch: str, exact: bool) -> None:
    model = shared_model(arch)
    view = view_of(model, exact=exact)
    assert parameters(view) == parameters(model)
    assert parameters(view, remove_duplicate=False) == parameters(model, remove_duplicate=False)
    assert all(ours is theirs for ours, theirs in zip(view.parameters(), model.parameters(), strict=True))
    assert list(view.state_dict()) == list(model.state_dict())


@ARCHS
def test_a_bare_view_replaces_nothing(arch: str) -> None:
    assert kinds(bare_view(shared_model(arch))) == untouched(arch)


@ARCHS
@EXACT
def test_nothing_is_replaced_where_there_are_no_kernels(
    arch: str, exact: bool, use_kernels: Callable[[str], None]
) -> None:
    use_kernels("torch")
    assert kinds(view_of(shared_model(arch), exact=exact)) == untouched(arch)


def test_fp64_is_left_to_torch() -> None:
    model = random_model("qwen3", dtype=torch.float64)
    assert kinds(view_of(model)) == untouched("qwen3")


@ARCHS
def test_an_mlp_with_another_activation_keeps_its_own_forward(arch: str) -> None:
    view = view_of(random_model(arch, hidden_act="gelu"))
    assert kinds(view) == {"FusedLinear": LINEARS, "FusedRMSNorm": NORMS[arch], "MLP": 2}


def test_a_layer_of_broken_words_is_left_to_torch() -> None:
    """Rows of 161 bf16 elements: the down projections of both layers."""
    view = view_of(random_model(dtype=torch.bfloat16, intermediate_size=161))
    left = [name for name, module in view.named_modules() if type(module) is nn.Linear]
    assert left == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


@ARCHS
def test_epsilon_and_bias_are_the_layers_own(arch: str) -> None:
    model = random_model(arch, rms_norm_eps=0.25)
    modules = dict(model.named_modules())
    for name, module in view_of(model).named_modules():
        assert not isinstance(module, FusedRMSNorm) or module.eps == modules[name].variance_epsilon == 0.25
        assert not isinstance(module, FusedLinear) or module.bias is modules[name].bias


# -- the whole model ----------------------------------------------------------------------------------------------


def view_logits(view: PreTrainedModel) -> Tensor:
    """Of every completion token of GROUPS, in one pack, as the engine runs it."""
    pack = build_pack(GROUPS, LayerGroup.of(view.config, view.dtype), torch.device("cpu"), row_multiple=ROW_MULTIPLE)
    count = sum(len(completion) for _, completions in GROUPS for completion in completions)
    context = AttentionContext(pack.plan, view.numerics.ops)
    return raw_logits(view, context, pack.ids, pack.positions, pack.logit_rows)[:count]


def eager_logits(model: PreTrainedModel) -> Tensor:
    view = bare_view(model)
    view.set_attn_implementation("eager")
    rows = [(len(p), p + c[:-1]) for p, completions in GROUPS for c in completions]
    return torch.cat([view(input_ids=torch.tensor([ids]), use_cache=False).logits[0, n - 1 :] for n, ids in rows])


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact.double()).norm() / exact.double().norm())


@ARCHS
@EXACT
@torch.no_grad()
def test_logits_are_those_of_transformers_own_forward(arch: str, exact: bool) -> None:
    """In fp32, within the rounding of sums in another order."""
    model = shared_model(arch)
    view = view_of(model, exact=exact)
    assert any(isinstance(module, FusedMLP) for module in view.modules())
    assert error(view_logits(view), eager_logits(model)) < 1.5e-6


@ARCHS
def test_gradients_are_those_of_transformers_own_forward(arch: str) -> None:
    """On the caller's own parameters, for a weighted sum of all logits."""
    runs = []
    for ours in (True, False):
        model = random_model(arch)
        logits = view_logits(view_of(model)) if ours else eager_logits(model)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        torch.autograd.backward((logits * weights).sum())
        runs.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert runs[0].keys() == runs[1].keys() == dict(random_model(arch).named_parameters()).keys()
    for name, grad in runs[0].items():
        assert error(grad, runs[1][name]) < GRADIENT_ROUNDING, name
