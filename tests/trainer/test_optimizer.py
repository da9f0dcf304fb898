"""MasterAdamW against torch's own AdamW in fp32 and hand-worked schedules."""

import math

import pytest
import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.weights.optimizer import MasterAdamW, learning_rate


def _layer(dtype: torch.dtype, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 4).to(dtype)


def _train(layer: nn.Linear, optimizer: MasterAdamW, steps: int, lr: float, splits: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator).to(layer.weight.dtype)
        for part in x.chunk(splits):
            (layer(part).float().pow(2).sum() / 8).backward()
        optimizer.step(lr)


def test_fp32_steps_are_torch_adamw() -> None:
    ours, theirs = _layer(torch.float32), _layer(torch.float32)
    config = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    _train(ours, MasterAdamW(ours.named_parameters(), config), 5, 1e-2)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        adamw.zero_grad()
        (theirs(torch.randn(8, 6, generator=generator)).pow(2).sum() / 8).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_bf16_weights_follow_an_fp32_master_at_a_small_learning_rate() -> None:
    """Steps of 1e-4 are below bf16's spacing at 1; a hundred of them are 1e-2, which shows."""
    layer = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = MasterAdamW(layer.named_parameters(), OptimConfig(max_grad_norm=1e9))
    for _ in range(100):
        layer.weight.float().sum().backward()
        optimizer.step(1e-4)
    assert torch.allclose(optimizer.masters["weight"], torch.full((4, 4), 0.99), atol=1e-5)
    assert torch.equal(layer.weight, optimizer.masters["weight"].bfloat16())


def test_gradients_accumulate_in_fp32() -> None:
    """1 + 256 additions of 1/512: bf16 sums would stay at 1, since 1/512 is half its spacing there."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("p", parameter)], OptimConfig())
    for scale in [1.0] + [2.0**-9] * 256:
        (parameter * scale).sum().backward()
    assert parameter.grad is None
    gradient = optimizer.masters["p"].grad
    assert gradient is not None
    assert gradient.item() == 1.5


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_the_split_into_micro_batches_does_not_matter(splits: int) -> None:
    whole, split = _layer(torch.float32), _layer(torch.float32)
    _train(whole, MasterAdamW(whole.named_parameters(), OptimConfig()), 3, 1e-2)
    _train(split, MasterAdamW(split.named_parameters(), OptimConfig()), 3, 1e-2, splits)
    assert torch.allclose(whole.weight, split.weight, atol=1e-6)


def test_the_working_weights_stay_where_they_are() -> None:
    layer = _layer(torch.bfloat16)
    before, version = layer.weight.data_ptr(), layer.weight.clone()
    _train(layer, MasterAdamW(layer.named_parameters(), OptimConfig()), 1, 0.1)
    assert layer.weight.data_ptr() == before
    assert not torch.equal(layer.weight, version)


def test_neither_no_gradient_nor_a_bad_one_moves_anything() -> None:
    layer = _layer(torch.float32)
    optimizer = MasterAdamW(layer.named_parameters(), OptimConfig(weight_decay=0.5))
    before = layer.weight.clone()
    assert optimizer.step(0.1) == 0.0
    (layer(torch.ones(1, 6)) * 0.0).sum().backward()
    assert optimizer.step(0.1) == 0.0
    (layer(torch.ones(1, 6)) * math.inf).sum().backward()
    assert not math.isfinite(optimizer.step(0.1))
    assert torch.equal(layer.weight, before)
    assert optimizer.step(0.1) == 0.0  # and it is gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_in_another_optimizer_bit_for_bit(dtype: torch.dtype) -> None:
    whole, first = _layer(dtype), _layer(dtype)
    _train(whole, MasterAdamW(whole.named_parameters(), OptimConfig()), 6, 1e-2)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 6, generator=generator).to(dtype) for _ in range(6)]
    optimizer = MasterAdamW(first.named_parameters(), OptimConfig())
    for step, x in enumerate(batches):
        if step == 3:
            state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
            optimizer.close()
            optimizer = MasterAdamW(first.named_parameters(), OptimConfig())
            optimizer.load_state_tensors(state)
        (first(x).float().pow(2).sum() / 8).backward()
        optimizer.step(1e-2)
    assert torch.equal(whole.weight, first.weight)
    assert torch.equal(whole.bias, first.bias)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.5]), ("cosine", [0.5, 1.0, 1.0, 0.5])],
)
def test_learning_rate_by_hand(schedule: str, expected: list[float]) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    assert [learning_rate(config, step, 4) for step in range(4)] == pytest.approx(expected)
