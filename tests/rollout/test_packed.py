"""Packed weights: a second copy that changes no bit and never lags behind."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import tiny_models
from rollout import RolloutConfig, RolloutEngine, RolloutError, RolloutGroup, SamplingParams

PROMPTS = [list(range(5, 75)), [9, 8, 7]]
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3)


def make_engine(model: PreTrainedModel, *, packed: bool) -> RolloutEngine:
    config = RolloutConfig(device="cpu", num_blocks=200, max_num_seqs=16, packed_weights=packed)
    return RolloutEngine(model, None, config)


def model_of(arch: str) -> PreTrainedModel:
    return tiny_models.random_model(arch, dtype=torch.bfloat16)


def draws(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    groups: list[RolloutGroup] = engine.generate_rollouts(PROMPTS, 5, SAMPLING)
    return [(rollout.completion_ids, rollout.logprobs) for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_packed_weights_change_no_bit(arch: str, threads: int) -> None:
    model = model_of(arch)
    packed = make_engine(model, packed=True)
    assert packed.exact
    assert draws(packed) == draws(make_engine(model, packed=False))


@pytest.mark.parametrize("announce", [True, False])
def test_an_optimizers_step_is_seen(announce: bool) -> None:
    model = model_of("qwen3")
    engine = make_engine(model, packed=True)
    before = draws(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.02) * torch.randn_like(parameter)
    optimizer.step()
    if announce:
        engine.weights_updated()
    after = draws(engine)
    assert after != before
    assert after == draws(make_engine(model, packed=False))


def test_an_explicit_update_is_seen() -> None:
    model, other = model_of("llama"), tiny_models.random_model("llama", seed=1, dtype=torch.bfloat16)
    engine = make_engine(model, packed=True)
    engine.update_weights(other.state_dict())
    assert draws(engine) == draws(make_engine(other, packed=False))


def test_a_write_behind_torchs_back_is_seen_by_its_values() -> None:
    model = model_of("qwen2")
    engine = make_engine(model, packed=True)
    for parameter in model.parameters():
        parameter.data.mul_(1.05)
    assert draws(engine) == draws(make_engine(model, packed=False))


def test_the_copy_is_as_large_as_the_linear_layers() -> None:
    model = model_of("qwen3")
    engine = make_engine(model, packed=True)
    assert engine.packed is not None
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert engine.packed.num_bytes == sum(2 * weight.numel() for weight in linear)
    engine.close()
    assert engine.packed is None


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"packed_weights=True .* torch.float32 .* set it to False"):
        make_engine(tiny_models.shared_model("qwen3"), packed=True)
