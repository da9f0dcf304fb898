"""Compiled linear layers, RMS norms and gated activations against fp64, and that a row's bits hang on the row alone."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends import CPU, has_kernels
from rollout_kernels.cpu.linear import fits_linear, linear
from rollout_kernels.cpu.rows import rms_norm, swiglu
from rollout_kernels.ops import choose

BOTH = [torch.float32, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", BOTH, ids=["fp32", "bf16"])
ROWS = pytest.mark.parametrize("rows", [1, 5, 16, 385, 800])
"""On both sides of a tile's 384 rows."""
COLUMNS = pytest.mark.parametrize("columns", [1, 17, 64, 100])
DEPTHS = pytest.mark.parametrize("depth", [2, 40, 72, 700])
"""Up to several panels of 128 words."""
DIMS = pytest.mark.parametrize("dim", [8, 40, 64, 100])
LEADING = pytest.mark.parametrize("leading", [(30,), (5, 6), (2, 3, 5)], ids=str)
EPS = 1e-5

Function = Callable[..., Tensor]

norm = partial(rms_norm, eps=EPS)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if not has_kernels():
        pytest.skip("no compiled kernels here")


def randoms(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's norm: in fp32 at least, and rounded before the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def running_sums(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T in fp32: of each 128 terms one after another, rounded once with each; then of those sums."""
    total = torch.zeros(len(x), len(weight))
    for piece, factor in zip(x.double().split(128, 1), weight.double().split(128, 1), strict=True):
        out = torch.zeros_like(total)
        for a, b in zip(piece.T, factor.T, strict=True):
            out = (out.double() + a[:, None] * b).float()
        total += out
    return total if bias is None else total + bias


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def assert_as_good(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """No worse than 1.5 times the error of the plain form in the same dtype."""
    assert ours.dtype == plain.dtype
    assert ours.shape == exact.shape
    assert error(ours, exact) <= 1.5 * error(plain, exact)


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


def check_values(ours: Function, plain: Function, dtype: torch.dtype, *shapes: Sequence[int], width: float = 1) -> None:
    """Over as many draws as make a few hundred elements: errors of a few are chance."""
    outs: list[list[Tensor]] = [[], [], []]
    for seed in range(1 + 400 // math.prod(shapes[0])):
        tensors = [width * x for x in randoms(*shapes, dtype=dtype, seed=seed)]
        for out, function, given in zip(outs, (ours, plain, plain), (tensors, tensors, doubles(tensors)), strict=True):
            out.append(function(*given).flatten())
    assert_as_good(*map(torch.cat, outs))


# -- values -------------------------------------------------------------------------------------------------------


@ROWS
@COLUMNS
@DEPTHS
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_bf16_linear_equals_fp64(rows: int, columns: int, depth: int, biased: bool) -> None:
    bias = [(columns,)] if biased else []
    check_values(linear, F.linear, torch.bfloat16, (rows, depth), (columns, depth), *bias)


@ROWS
@COLUMNS
@DEPTHS
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_fp32_linear_equals_fp64(rows: int, columns: int, depth: int, biased: bool) -> None:
    """No worse than 1.5 times the error of running sums; torch's own may be of more and shorter sums.

    Small products are drawn often: the rounding of a few numbers is luck.
    """
    seen = []
    for seed in range(max(1, 200 // (rows * columns))):
        x, weight, bias = randoms((rows, depth), (columns, depth), (columns,), seed=seed)
        tensors = [x, weight, bias] if biased else [x, weight]
        seen.append((linear(*tensors), running_sums(*tensors), F.linear(*doubles(tensors))))
    assert_as_good(*(torch.stack(outs) for outs in zip(*seen, strict=True)))


@DTYPES
@ROWS
@DIMS
def test_rms_norm_equals_fp64(dtype: torch.dtype, rows: int, dim: int) -> None:
    check_values(norm, plain_norm, dtype, (rows, dim), (dim,))


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 17, 1000, 1024, 1033, 40_007])
def test_swiglu_equals_fp64(dtype: torch.dtype, size: int) -> None:
    check_values(swiglu, plain_swiglu, dtype, (size,), (size,), width=4)


def test_the_first_factor_is_rounded_to_bf16() -> None:
    """So nearly every element has the bits of that, done in fp64; one in a thousand may lie too near a tie."""
    x, y, weight = randoms((400, 100), (400, 100), (100,), dtype=torch.bfloat16)
    wide = x.double()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    for out, first, second in ((swiglu(x, y), F.silu(wide), y), (norm(x, weight), normal, weight)):
        expected = (first.bfloat16().double() * second.double()).bfloat16()
        assert (out != expected).float().mean() < 1e-3


@DTYPES
@LEADING
def test_leading_dimensions_are_rows(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    x, up, weight, scale = randoms((30, 40), (30, 40), (17, 40), (40,), dtype=dtype)
    shaped, shaped_up = (t.view(*leading, 40) for t in (x, up))
    assert torch.equal(linear(shaped, weight), linear(x, weight).view(*leading, 17))
    assert torch.equal(norm(shaped, scale), norm(x, scale).view(*leading, 40))
    assert torch.equal(swiglu(shaped, shaped_up), swiglu(x, up).view(*leading, 40))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_is_added_to_the_mean_square(eps: float) -> None:
    """A row of 3 has mean square 9, a row of zeros has none."""
    out = rms_norm(torch.tensor([[3.0] * 8, [0.0] * 8]), torch.full((8,), 2.0), eps)
    assert out[0].tolist() == pytest.approx([6 / (9 + eps) ** 0.5] * 8, rel=3e-7)
    assert out[1].tolist() == [0.0] * 8


@DTYPES
def test_without_gradients_the_bits_are_the_same(dtype: torch.dtype) -> None:
    x, weight, scale, bias = randoms((20, 40), (17, 40), (40,), (17,), dtype=dtype)
    calls = [partial(linear, x, weight, bias), partial(norm, x, scale), partial(swiglu, x, x)]
    graded = [call() for call in calls]
    with torch.no_grad():
        assert all(torch.equal(call(), out) for call, out in zip(calls, graded, strict=True))


# -- gradients ----------------------------------------------------------------------------------------------------


def gradients(function: Function, tensors: Sequence[Tensor], wanted: Sequence[int], upstream: Tensor) -> list[Tensor]:
    """Of the wanted tensors only; no other needs one."""
    leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    torch.autograd.backward(function(*leaves), upstream)
    assert all((leaf.grad is not None) == (i in wanted) for i, leaf in enumerate(leaves))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def check_gradients(ours: Function, plain: Function, wanted: Sequence[int], *draws: Sequence[Tensor]) -> None:
    """Of all draws together: the rounding of a few numbers is luck."""
    seen: list[list[list[Tensor]]] = [[], [], []]
    for tensors in draws:
        upstream = randoms(plain(*tensors).shape, dtype=tensors[0].dtype, seed=1)[0]
        seen[0].append(gradients(ours, tensors, wanted, upstream))
        seen[1].append(gradients(plain, tensors, wanted, upstream))
        seen[2].append(gradients(plain, doubles(tensors), wanted, upstream.double()))
    for mine, usual, exact in zip(*(zip(*grads, strict=True) for grads in seen), strict=True):
        assert_as_good(torch.stack(mine), torch.stack(usual), torch.stack(exact))


@DTYPES
@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(5, 17, 40), (385, 64, 72), (1, 100, 700)], ids=str)
def test_gradients_of_linear(dtype: torch.dtype, wanted: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    tensors = randoms((rows, depth), (columns, depth), (columns,), dtype=dtype)
    check_gradients(linear, F.linear, wanted, tensors)


@DTYPES
@LEADING
def test_gradients_of_linear_without_bias(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    check_gradients(linear, F.linear, (0, 1), randoms((*leading, 40), (17, 40), dtype=dtype))


@DTYPES
@DIMS
@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
@LEADING
def test_gradients_of_rms_norm(dtype: torch.dtype, dim: int, wanted: tuple[int, ...], leading: tuple[int, ...]) -> None:
    check_gradients(norm, plain_norm, wanted, randoms((*leading, dim), (dim,), dtype=dtype))


@DTYPES
@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("size", [1, 17, 1033, 40_007])
def test_gradients_of_swiglu(dtype: torch.dtype, wanted: tuple[int, ...], size: int) -> None:
    check_gradients(swiglu, plain_swiglu, wanted, [4 * x for x in randoms((size,), (size,), dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_leaves_swiglu_and_its_upstream_gradient_as_they_were(dtype: torch.dtype) -> None:
    check_backward_writes_nothing(swiglu, randoms((20, 40), (20, 40), dtype=dtype))


@DTYPES
def test_backward_leaves_linear_and_norm_and_their_upstream_gradient_as_they_were(dtype: torch.dtype) -> None:
    x, weight, scale = randoms((20, 40), (40, 40), (40,), dtype=dtype)
    check_backward_writes_nothing(linear, [x, weight])
    check_backward_writes_nothing(norm, [x, scale])


def check_backward_writes_nothing(function: Function, tensors: list[Tensor]) -> None:
    upstream = randoms(tensors[0].shape, dtype=tensors[0].dtype, seed=1)[0]
    leaves, given = [t.clone().requires_grad_() for t in tensors], upstream.clone()
    torch.autograd.backward(function(*leaves), given)
    assert torch.equal(given, upstream)
    assert all(torch.equal(leaf, t) for leaf, t in zip(leaves, tensors, strict=True))


def test_gradients_of_a_single_row_without_leading_dimension() -> None:
    draws = [randoms((40,), (17, 40), (40,), seed=seed) for seed in range(40)]
    check_gradients(linear, F.linear, (0, 1), *([x, weight] for x, weight, _ in draws))
    check_gradients(norm, plain_norm, (0, 1), *([x, scale] for x, _, scale in draws))


# -- bits ---------------------------------------------------------------------------------------------------------

PARTS = [slice(0, 1), slice(383, 384), slice(384, 385), slice(799, 800), slice(3, 8), slice(380, 400), slice(7, 792)]


def check_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Each part of x alone, on one thread, has the bits that it has among all rows, on those set before."""
    whole = function(x)
    torch.set_num_threads(1)
    for part in PARTS:
        assert torch.equal(function(x[part].clone()), whole[part]), part


@DTYPES
@COLUMNS
@DEPTHS
def test_a_row_of_linear_has_the_bits_of_the_row_alone(
    threads: int, dtype: torch.dtype, columns: int, depth: int
) -> None:
    x, weight, bias = randoms((800, depth), (columns, depth), (columns,), dtype=dtype)
    check_parts(lambda part: linear(part, weight, bias), x)


@DTYPES
@DIMS
def test_a_row_of_rms_norm_has_the_bits_of_the_row_alone(threads: int, dtype: torch.dtype, dim: int) -> None:
    x, weight = randoms((4800, dim), (dim,), dtype=dtype)
    check_parts(lambda part: norm(part, weight), x)


@DTYPES
@pytest.mark.parametrize("dim", [1, 17, 100])
def test_a_row_of_swiglu_has_the_bits_of_the_row_alone(threads: int, dtype: torch.dtype, dim: int) -> None:
    pairs = 4 * randoms((40_007, 2, dim), dtype=dtype)[0]
    check_parts(lambda part: swiglu(part[:, 0], part[:, 1]), pairs)


@DTYPES
def test_a_tensor_that_is_not_contiguous_has_the_bits_of_its_copy(dtype: torch.dtype) -> None:
    x, up, weight, scale = randoms((40, 50), (40, 50), (17, 40), (40,), dtype=dtype)
    x, up = x.T, up.T
    assert torch.equal(linear(x, weight), linear(x.clone(memory_format=torch.contiguous_format), weight))
    assert torch.equal(norm(x, scale), norm(x.clone(memory_format=torch.contiguous_format), scale))
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (x, up)]
    assert torch.equal(swiglu(x, up), swiglu(*copies))


@DTYPES
def test_upstream_gradients_need_not_be_contiguous(dtype: torch.dtype) -> None:
    x, weight, scale, upstream = randoms((20, 40), (40, 40), (40,), (40, 20), dtype=dtype)
    for function, tensors in ((linear, [x, weight]), (norm, [x, scale]), (swiglu, [x, x])):
        runs = [gradients(function, tensors, (0, 1), g) for g in (upstream.T, upstream.T.contiguous())]
        assert all(error(ours, theirs.double()) < 1e-6 for ours, theirs in zip(*runs, strict=True))


# -- nan, inf and large values ------------------------------------------------------------------------------------


def check_spoilt(function: Function, plain: Function, x: Tensor, others: list[Tensor], value: float) -> None:
    """Row 7 takes a value that is not finite: its output is the plain form's in this, and no other row changes."""
    clean, spoilt = function(x, *others), x.clone()
    spoilt[7, 3] = value
    out, expected = function(spoilt, *others), plain(spoilt, *others)[7]
    assert not out[7].isfinite().all()
    assert torch.equal(out[7].isnan(), expected.isnan())
    assert torch.equal(out[7] * out[7].isinf(), expected * expected.isinf()) or expected.isnan().any()
    rest = torch.arange(len(x)) != 7
    assert torch.equal(out[rest], clean[rest])


SPOILT = pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])


@DTYPES
@SPOILT
@pytest.mark.parametrize("rows", [8, 400])
def test_what_is_not_finite_stays_in_its_row_of_linear(dtype: torch.dtype, value: float, rows: int) -> None:
    x, weight = randoms((rows, 40), (100, 40), dtype=dtype)
    check_spoilt(linear, F.linear, x, [weight], value)


@DTYPES
@SPOILT
@pytest.mark.parametrize("dim", [8, 40, 100])
def test_what_is_not_finite_stays_in_its_row_of_rms_norm(dtype: torch.dtype, value: float, dim: int) -> None:
    x, weight = randoms((40, dim), (dim,), dtype=dtype)
    check_spoilt(norm, plain_norm, x, [weight], value)


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dim", [8, 40, 100])
def test_what_is_not_finite_stays_in_its_element_of_swiglu(dtype: torch.dtype, value: float, dim: int) -> None:
    gate, up = randoms((40, dim), (40, dim), dtype=dtype)
    check_spoilt(swiglu, plain_swiglu, gate, [up], value)
    check_spoilt(lambda u, g: swiglu(g, u), lambda u, g: plain_swiglu(g, u), up, [gate], value)


@DTYPES
@pytest.mark.parametrize("place", [3, 39])
def test_nan_in_a_weight_reaches_its_column(dtype: torch.dtype, place: int) -> None:
    x, weight = randoms((20, 40), (70, 40), dtype=dtype)
    weight[66, place] = torch.nan
    assert linear(x, weight).isnan().all(0).nonzero()[:, 0].tolist() == [66]
    assert linear(x, weight).isnan().sum() == 20


@DTYPES
def test_swiglu_of_large_gates(dtype: torch.dtype) -> None:
    """silu is the identity far to the right, and nothing far to the left."""
    gate = torch.tensor([1e4, -1e4, 100.0, -100.0, -87.5, -90.0], dtype=dtype)
    out = swiglu(gate, torch.full_like(gate, 2.0))
    assert out.isfinite().all()
    assert torch.equal(out[[0, 2]], 2 * gate[[0, 2]])
    assert out[[1, 3, 4, 5]].abs().max() < 1e-33


def test_swiglu_of_the_largest_gates() -> None:
    assert swiglu(torch.tensor([-3e38, -1e35]), torch.ones(2)).abs().max() < 1e-33


# -- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "dtype", "fits"),
    [(7, torch.bfloat16, False), (8, torch.bfloat16, True), (7, torch.float32, True), (1, torch.bfloat16, False)],
    ids=str,
)
def test_linear_takes_whole_words(depth: int, dtype: torch.dtype, fits: bool) -> None:
    assert fits_linear(torch.zeros(5, depth, dtype=dtype)) is fits


def test_what_lies_transposed_gives_the_same_bits() -> None:
    x, weight, scale = randoms((5, 40), (40, 17), (40, 2))
    assert torch.equal(linear(x, weight.T, scale[:17, 0]), linear(x, weight.T.contiguous(), scale[:17, 0].contiguous()))
    assert torch.equal(norm(x, scale[:, 1]), norm(x, scale[:, 1].contiguous()))


@DTYPES
@LEADING
@pytest.mark.parametrize("graded", [False, True], ids=["no_grad", "grad"])
def test_shapes_without_data(dtype: torch.dtype, leading: tuple[int, ...], graded: bool) -> None:
    x, weight, scale = (torch.empty(s, device="meta", dtype=dtype) for s in ((*leading, 40), (17, 40), (40,)))
    with torch.set_grad_enabled(graded):
        outs = [linear(x, weight), norm(x, scale), swiglu(x, x)]
    assert all(out.is_meta and out.dtype == dtype for out in outs)
    assert [tuple(out.shape) for out in outs] == [(*leading, 17), (*leading, 40), (*leading, 40)]


@DTYPES
def test_gradients_without_data(dtype: torch.dtype) -> None:
    x, weight, scale = (torch.empty(s, device="meta", dtype=dtype) for s in ((6, 40), (40, 40), (40,)))
    leaves = [t.requires_grad_() for t in (x, weight, scale)]
    torch.autograd.backward(swiglu(linear(leaves[0], leaves[1]), norm(leaves[0], leaves[2])).sum())
    assert all(t.grad is not None and t.grad.is_meta and t.grad.shape == t.shape for t in leaves)


@DTYPES
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    x, weight, scale = randoms((0, 40), (17, 40), (40,), dtype=dtype)
    assert [out.shape[0] for out in (linear(x, weight), norm(x, scale), swiglu(x, x))] == [0, 0, 0]


@DTYPES
def test_rows_are_written_where_they_belong(implementation: None, dtype: torch.dtype) -> None:
    keys, values = (x.to(dtype) for x in randoms((3, 8), (3, 8)))
    key_pool, value_pool = (torch.zeros(6, 8, dtype=dtype) for _ in "kv")
    choose(CPU, dtype).write_rows(keys, values, key_pool, value_pool, torch.tensor([4, 0, 5]))
    for pool, rows in ((key_pool, keys), (value_pool, values)):
        assert torch.equal(pool[[4, 0, 5]], rows)
        assert pool[[1, 2, 3]].eq(0).all()
