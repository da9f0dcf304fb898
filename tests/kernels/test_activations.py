"""SiLU and powers of two against fp64, and that their bits hang on the element alone."""

import pytest
import torch
from torch import Tensor

from rollout_kernels.reference.activations import SiLU, exp2_, silu

ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2.0**-8}
"""Relative: four roundings of fp32, one of bf16."""
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["fp32", "bf16"])


def inputs(dtype: torch.dtype, size: int = 100_003) -> Tensor:
    return (8 * torch.randn(size, generator=torch.Generator().manual_seed(0))).to(dtype)


def gradient(x: Tensor, upstream: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    silu(x).backward(upstream)
    assert x.grad is not None
    return x.grad


@DTYPES
def test_values_equal_the_fp64_formula(dtype: torch.dtype) -> None:
    x = inputs(dtype)
    exact = x.double() / (1 + (-x.double()).exp())
    out = silu(x)
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() / exact.abs()).max() < ROUNDING[dtype]


@DTYPES
def test_gradients_equal_the_fp64_formula(dtype: torch.dtype) -> None:
    """silu'(x) = s + x s (1 - s), within 1.5 times the error of torch's own SiLU in the same dtype."""
    x, upstream = inputs(dtype), inputs(dtype).flip(0)
    s = x.double().sigmoid()
    exact = upstream.double() * (s + x.double() * s * (1 - s))
    plain = x.clone().requires_grad_()
    torch.nn.functional.silu(plain).backward(upstream)
    assert plain.grad is not None
    grad = gradient(x, upstream)
    assert grad.dtype == dtype
    assert (grad - exact).abs().max() <= 1.5 * (plain.grad - exact).abs().max()
    assert (grad - exact).norm() <= 1.5 * (plain.grad - exact).norm()


@pytest.mark.parametrize(("value", "slope"), [(0.0, 0.5), (-500.0, 0.0), (500.0, 1.0), (-88.8, 0.0)])
def test_extremes(value: float, slope: float) -> None:
    x = torch.tensor([value])
    assert silu(x).item() == pytest.approx(max(value, 0.0), abs=1e-30)
    assert gradient(x, torch.ones(1)).item() == pytest.approx(slope, abs=1e-30)


@DTYPES
def test_bits_do_not_depend_on_the_size(threads: int, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    whole, whole_grad = silu(x), gradient(x, x)
    for size in [*range(1, 70), 211, 1000, 32_768, 32_769, 65_537]:
        assert torch.equal(silu(x[:size].clone()), whole[:size])
        assert torch.equal(gradient(x[:size], x[:size]), whole_grad[:size])


@DTYPES
def test_bits_do_not_depend_on_the_place(threads: int, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    whole, whole_grad = silu(x), gradient(x, x)
    for start in (1, 3, 8, 17, 33_333, 99_990):
        assert torch.equal(silu(x[start:].clone()), whole[start:])
        assert torch.equal(gradient(x[start:], x[start:]), whole_grad[start:])


def test_bits_do_not_depend_on_the_number_of_threads(restore_threads: None) -> None:
    x = inputs(torch.float32)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(silu(x))
    assert all(torch.equal(out, results[0]) for out in results)


def test_module_form_is_the_function() -> None:
    x = inputs(torch.float32, 64).view(2, 4, 8)
    assert torch.equal(SiLU()(x), silu(x))


def test_powers_of_two_equal_the_fp64_formula() -> None:
    x = -30 * torch.rand(100_003, generator=torch.Generator().manual_seed(0))
    exact = x.double().exp2()
    assert ((exp2_(x.clone()).double() - exact).abs() / exact).max() < 2.0**-23
    assert exp2_(torch.tensor([0.0, -1.0, -torch.inf, 3.0])).tolist() == [1.0, 0.5, 0.0, 8.0]


def test_bits_of_powers_of_two_do_not_depend_on_the_size(threads: int) -> None:
    x = -30 * torch.rand(300_001, generator=torch.Generator().manual_seed(0))
    whole = exp2_(x.clone())
    for size in [*range(1, 70), 211, 1000, 32_768, 32_769, 65_537, 98_304, 200_000]:
        assert torch.equal(exp2_(x[:size].clone()), whole[:size]), size
        assert torch.equal(exp2_(x[-size:].clone()), whole[-size:]), size
