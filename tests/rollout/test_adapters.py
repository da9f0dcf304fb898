"""LoRA adapters that peft has injected: both views compute with them, and an engine switches between them by name."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.functional import set_adapter
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from backends import needs_stable_products, rows_are_stable
from rollout import RolloutEngine, RolloutError, RolloutGroup, SamplingParams
from rollout.engine import exactness
from rollout.forward import build_pack, score_tokens
from rollout.model import switch_adapter, training_view
from rollout.model.numerics import Numerics
from rollout.model.views import make_view
from rollout_kernels.reference.linear import narrow_linear
from tiny_models import ARCHITECTURES, assert_greedy, greedy_ids, numerics_of, random_prompts, small_engine

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PROMPTS = random_prompts([3, 70, 1, 130])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def inject(model: PreTrainedModel, name: str = "default", *, rank: int = 4, targets: list[str] = LINEAR) -> None:
    """An adapter of the base's dtype that changes what the model says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model, name)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(model.dtype)


def adapted(arch: str = "qwen3", *names: str, dtype: torch.dtype = torch.float32, rank: int = 4) -> PreTrainedModel:
    model = tiny_models.random_model(arch, dtype=dtype)
    for name in names or ("default",):
        inject(model, name, rank=rank)
    set_adapter(model, (names or ("default",))[0])
    return model


def trainer_logprobs(engine: RolloutEngine, groups: list[RolloutGroup], view: PreTrainedModel | None = None) -> Tensor:
    """[C], through a training view."""
    lists = [(group.prompt_ids, [rollout.completion_ids for rollout in group.rollouts]) for group in groups]
    pack = build_pack(lists, engine.layer_group, engine.device, row_multiple=engine.numerics.row_multiple)
    return score_tokens(view or engine.training_view(), pack, SamplingParams()).logprobs


def rollout_logprobs(groups: list[RolloutGroup]) -> Tensor:
    return torch.tensor([logprob for group in groups for rollout in group.rollouts for logprob in rollout.logprobs])


def ids_of(groups: list[RolloutGroup]) -> list[list[int]]:
    return [group.rollouts[0].completion_ids for group in groups]


# -- one adapter --------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("rank", [1, 3, 8, 64])
@pytest.mark.usefixtures("implementation")
def test_generator_and_trainer_agree_in_every_bit(threads: int, dtype: torch.dtype, rank: int) -> None:
    needs_stable_products(dtype)
    sampling = SamplingParams(max_new_tokens=10, seed=0)
    with small_engine(adapted(dtype=dtype, rank=rank), max_num_batched_tokens=64, exact="require") as engine:
        groups = engine.generate_rollouts(PROMPTS, 4, sampling)
        assert torch.equal(trainer_logprobs(engine, groups), rollout_logprobs(groups))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logprobs_are_those_of_transformers_with_the_adapter(arch: str) -> None:
    model = adapted(arch)
    with small_engine(model) as engine:
        (group,) = engine.generate_rollouts(PROMPTS[1:2], 1, SamplingParams(max_new_tokens=20, seed=0))
    (rollout,) = group.rollouts
    expected = tiny_models.eager_logprobs(model, group.prompt_ids, rollout.completion_ids)
    assert (torch.tensor(rollout.logprobs) - expected).abs().max() < tiny_models.LOGPROB_TOLERANCE
    switch_adapter(model, None)
    base = tiny_models.eager_logprobs(model, group.prompt_ids, rollout.completion_ids)
    assert (base - expected).abs().max() > 0.1  # the adapter is worth something


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.usefixtures("implementation")
def test_gradients_of_the_adapter_are_those_of_peft_s_own_forward(checkpointing: bool) -> None:
    """In fp32 against peft's modules in transformers' eager forward, in fp64."""
    model = adapted()
    with small_engine(model) as engine:
        groups = engine.generate_rollouts(PROMPTS[:2], 2, SamplingParams(max_new_tokens=6, seed=0))
        view = engine.training_view(gradient_checkpointing=checkpointing)
        trainer_logprobs(engine, groups, view).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(ours) == 2 * len(LINEAR) * 2
    assert all(".lora_" in name for name in ours)
    wide = adapted().double()
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            scores = wide(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            scores.gather(-1, torch.tensor(rollout.completion_ids)[:, None]).sum().backward()
    for name, parameter in wide.named_parameters():
        if parameter.grad is not None:
            largest = float(parameter.grad.abs().max())
            assert (ours[name].double() - parameter.grad).abs().max() < 1e-3 * largest, name


def test_an_adapter_of_the_head_alone_has_its_gradients() -> None:
    model = tiny_models.random_model("llama")
    inject(model, targets=["lm_head"])
    with small_engine(model) as engine:
        groups = engine.generate_rollouts(PROMPTS[:1], 2, SamplingParams(max_new_tokens=6, seed=0))
        scores = trainer_logprobs(engine, groups)
        assert torch.equal(scores.detach(), rollout_logprobs(groups))
        scores.sum().backward()
    assert sorted(name for name, p in model.named_parameters() if p.grad is not None) == [
        "lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight",
    ]  # fmt: skip


# -- the probe ----------------------------------------------------------------------------------------------------


def test_the_probe_sees_a_fresh_adapter_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second matrix is zero, so that nothing that goes wrong in it would show."""
    model = tiny_models.random_model("qwen3")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=LINEAR), model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    seen: list[bool] = []

    def looked_at(module: PreTrainedModel, numerics: Numerics) -> PreTrainedModel:
        seen.append(all(bool(p.any()) for name, p in module.named_parameters() if "lora_B" in name))
        return make_view(module, numerics)

    monkeypatch.setattr(exactness, "make_view", looked_at)
    small_engine(model, exact="require").close()
    assert seen == [True]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


@DTYPES
@pytest.mark.parametrize("rank", [1, 4, 16, 64])
def test_narrow_products_do_not_depend_on_the_number_of_rows(threads: int, dtype: torch.dtype, rank: int) -> None:
    if rank > 16 and not rows_are_stable(torch.float32, 1):
        pytest.skip("what is not narrow is as stable as torch's other products, which are not here")
    generator = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(n, 1536, generator=generator).to(dtype) for n in (512, rank))
    whole = narrow_linear(x, weight)
    for rows in (16, 48, 272):
        assert torch.equal(narrow_linear(x[:rows], weight), whole[:rows])
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2)
    assert torch.get_num_threads() == threads


def test_gradients_of_narrow_products() -> None:
    x, weight = (torch.randn(n, 5, dtype=torch.float32, requires_grad=True) for n in (6, 2))
    ours = torch.autograd.grad((narrow_linear(x, weight) ** 2).sum(), [x, weight])
    theirs = torch.autograd.grad(((x @ weight.T) ** 2).sum(), [x, weight])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


# -- several adapters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_adapter_generates_what_transformers_does_with_it(arch: str) -> None:
    with small_engine(adapted(arch, "a", "b")) as engine:
        for name in ("b", None, "a", "b"):
            engine.use_adapter(name)
            alone = tiny_models.random_model(arch)
            if name is not None:
                inject(alone, name)
            groups = engine.generate_rollouts(PROMPTS, 1, tiny_models.greedy(12))
            for prompt, ids in zip(PROMPTS, ids_of(groups), strict=True):
                assert_greedy(alone, prompt, ids, greedy_ids(alone, prompt, 12))
            logits = [tiny_models.eager_logits(model, PROMPTS[1]) for model in (alone, engine.module)]
            assert torch.equal(*logits)


def test_a_switch_is_a_new_policy_and_finds_nothing_cached_under_another() -> None:
    with small_engine(adapted("qwen3", "a", "b")) as engine:
        first = engine.generate_rollouts(PROMPTS, 1, tiny_models.greedy())
        engine.use_adapter("b")
        other = engine.generate_rollouts(PROMPTS, 1, tiny_models.greedy())
        assert engine.stats().cache_hit_tokens == 0
        engine.use_adapter("a")
        again = engine.generate_rollouts(PROMPTS, 1, tiny_models.greedy())
    assert ids_of(first) == ids_of(again) != ids_of(other)
    versions = [groups[0].rollouts[0].policy_version for groups in (first, other, again)]
    assert versions == [0, 1, 2]


def test_training_views_follow_those_made_before_too() -> None:
    model = adapted("qwen3", "a", "b")
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with small_engine(model, exact="require") as engine:
        early = engine.training_view()
        engine.use_adapter("b")
        groups = engine.generate_rollouts(PROMPTS, 2, SamplingParams(max_new_tokens=5, seed=0))
        for view in (early, engine.training_view()):
            assert torch.equal(trainer_logprobs(engine, groups, view), rollout_logprobs(groups))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained


def test_a_reference_view_has_the_adapter_off_and_leaves_the_engine_s_alone() -> None:
    model, base = adapted(), tiny_models.random_model("qwen3")
    with small_engine(model) as engine:
        reference = training_view(model, engine.numerics, gradient_checkpointing=False)
        switch_adapter(reference, None)
        groups = engine.generate_rollouts(PROMPTS[:2], 2, SamplingParams(max_new_tokens=5, seed=0))
        assert torch.equal(trainer_logprobs(engine, groups), rollout_logprobs(groups))
        frozen = training_view(base, numerics_of(base), gradient_checkpointing=False)
        scores = [trainer_logprobs(engine, groups, view).detach() for view in (reference, frozen)]
    assert torch.equal(*scores)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


def test_running_requests_are_settled_first() -> None:
    with small_engine(adapted("qwen3", "a", "b")) as engine:
        handle = engine.submit(PROMPTS[0], 1, tiny_models.greedy(8))
        engine.step()
        with pytest.raises(RolloutError, match="requests have begun under the old weights"):
            engine.use_adapter("b")
        assert not handle.done
        engine.use_adapter("b", running="drain")
        assert handle.done
        expected = greedy_ids(adapted("qwen3", "a"), PROMPTS[0], 8)
        assert handle.group().rollouts[0].completion_ids == expected


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (("a", "b"), "c", r"^adapter 'c' is not in the module; those there are: a, b$"),
        (("a",), 3, r"^adapter 3 is not in the module"),
        ((), "a", r"^adapter 'a' is not in the module; it has none; inject one with peft$"),
        ((), None, r"^adapter None: the module has no adapters"),
    ],
)
def test_an_adapter_that_is_not_there_is_named(names: tuple[str, ...], wanted: str, message: str) -> None:
    model = adapted("qwen3", *names) if names else tiny_models.random_model("qwen3")
    with small_engine(model) as engine:
        with pytest.raises(RolloutError, match=message):
            engine.use_adapter(wanted)
        assert engine.policy_version == 0


def test_a_switch_behind_the_engine_s_back_is_refused_at_the_next_request() -> None:
    model = adapted("qwen3", "a", "b")
    with small_engine(model) as engine:
        set_adapter(model, "b")
        with pytest.raises(RolloutError, match=r"engine\.use_adapter"):
            engine.generate_rollouts(PROMPTS[:1], 1)
        set_adapter(model, "a")
        engine.generate_rollouts(PROMPTS[:1], 1)
        inject(model, "late")
        with pytest.raises(RolloutError, match="new engine after one was injected"):
            engine.use_adapter("late")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_s_own_wrapper_is_refused_and_what_it_wraps_runs() -> None:
    config = LoraConfig(target_modules=LINEAR, init_lora_weights=False)
    wrapped = get_peft_model(tiny_models.random_model("qwen3"), config)
    with pytest.raises(RolloutError, match=r"^PeftModel is not a causal .*: pass its get_base_model\(\)"):
        small_engine(wrapped)
    with small_engine(wrapped.get_base_model(), exact="require") as engine:
        groups = engine.generate_rollouts(PROMPTS[:1], 1, tiny_models.greedy())
    assert ids_of(groups) == [greedy_ids(wrapped, PROMPTS[0], 8)]


def test_an_adapter_that_is_merged_is_refused() -> None:
    model = adapted()
    model.model.layers[0].mlp.up_proj.merge()
    with pytest.raises(RolloutError, match=r"^adapter 'default' is merged into the weights: unmerge it"):
        small_engine(model)


def test_an_adapter_in_another_dtype_is_refused() -> None:
    model = tiny_models.random_model("qwen3", dtype=torch.bfloat16)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=LINEAR), model)
    model.model.layers[0].mlp.up_proj.lora_A.float()
    with pytest.raises(RolloutError, match="use one of float32 and bfloat16 for all"):
        small_engine(model)
