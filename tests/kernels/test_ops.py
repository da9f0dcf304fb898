"""Which backend runs the operations, and that the reference has them all, with the right values."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from backends import CPU, choose_anew
from rollout_kernels import ops, reference
from rollout_kernels.errors import BackendUnavailableError, RolloutError
from rollout_kernels.ops import Backend, choose, holds_values

FP32, BF16, FP64, FP16 = torch.float32, torch.bfloat16, torch.float64, torch.float16
CUDA = torch.device("cuda")
EPS = 1e-5

UseKernels = Callable[[str], None]


def toy(identity: Callable[[], str] = lambda: "toy-1", device: str = "cpu") -> Backend:
    """A backend whose one operation says that it has run."""

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise InterruptedError

    return Backend("toy", device, (FP32,), identity, {"swiglu": swiglu})


def missing() -> str:
    raise BackendUnavailableError("there is no toy")


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch, use_kernels: UseKernels) -> Callable[[Backend], None]:
    """Called with a backend, makes it the best."""

    def added(backend: Backend) -> None:
        monkeypatch.setattr(ops, "BACKENDS", (backend, *ops.BACKENDS))
        use_kernels("")

    return added


# -- which --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("wanted", ["", "auto", "native", "cpu"])
def test_compiled_kernels_run_what_they_can(use_kernels: UseKernels, wanted: str, dtype: torch.dtype) -> None:
    use_kernels(wanted)
    chosen = choose(CPU, dtype)
    assert chosen.identity.startswith("cpu")
    assert chosen.own == reference.OPERATIONS.keys()


@pytest.mark.parametrize(
    ("device", "dtype", "identity"),
    [("cpu", FP64, "torch"), ("cpu", FP16, "torch"), ("cuda", FP32, "cuda"), ("cuda:1", BF16, "cuda")],
    ids=str,
)
def test_the_reference_runs_the_rest(use_kernels: UseKernels, device: str, dtype: torch.dtype, identity: str) -> None:
    use_kernels("auto")
    chosen = choose(torch.device(device), dtype)
    assert (chosen.identity, chosen.own) == (identity, frozenset())


@pytest.mark.parametrize("wanted", ["torch", "reference"])
def test_the_reference_can_be_asked_for(fresh: Path, use_kernels: UseKernels, wanted: str) -> None:
    use_kernels(wanted)
    chosen = choose(CPU, FP32)
    assert (chosen.identity, chosen.own) == ("torch", frozenset())
    assert {name: getattr(chosen, name) for name in reference.OPERATIONS} == reference.OPERATIONS
    assert not fresh.exists()


def test_another_choice_is_refused(use_kernels: UseKernels) -> None:
    use_kernels("fast")
    with pytest.raises(RolloutError, match="COWROLL_KERNELS='fast': set it to one of auto, torch, native, cpu"):
        choose(CPU, FP32)


@pytest.mark.parametrize(("device", "dtype"), [(CUDA, FP32), (CPU, FP64)], ids=str)
@pytest.mark.parametrize("wanted", ["native", "cpu"])
def test_a_wish_that_cannot_be_met_is_refused(
    use_kernels: UseKernels, wanted: str, device: torch.device, dtype: torch.dtype
) -> None:
    use_kernels(wanted)
    kind = f"on {device} in {str(dtype).removeprefix('torch.')}"
    with pytest.raises(RolloutError, match=f"COWROLL_KERNELS={wanted}, but no such kernels run {kind}"):
        choose(device, dtype)


def test_the_choice_is_made_once(use_kernels: UseKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels("torch")
    chosen = choose(CPU, FP32)
    monkeypatch.setenv("COWROLL_KERNELS", "fast")
    assert choose(CPU, FP32) is chosen
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.identity = "other"  # type: ignore[misc]


# -- a backend more -----------------------------------------------------------------------------------------------


def test_the_first_backend_that_serves_is_taken_and_borrows_what_it_lacks(add: Callable[[Backend], None]) -> None:
    backend = toy()
    add(backend)
    chosen = choose(CPU, FP32)
    assert (chosen.identity, chosen.own) == ("toy-1", frozenset({"swiglu"}))
    assert chosen.swiglu is backend.operations["swiglu"]
    assert chosen.linear is reference.OPERATIONS["linear"]
    assert choose(CPU, BF16).identity != "toy-1"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", [toy(missing), toy(device="cuda")], ids=["missing", "elsewhere"])
def test_the_next_backend_steps_in(add: Callable[[Backend], None], backend: Backend) -> None:
    add(backend)
    assert choose(CPU, FP32).identity.startswith("cpu")


def test_a_named_backend_is_not_done_without(add: Callable[[Backend], None], use_kernels: UseKernels) -> None:
    add(toy(missing))
    use_kernels("toy")
    with pytest.raises(RolloutError, match="COWROLL_KERNELS=toy, but there is no toy"):
        choose(CPU, FP32)


def test_a_backend_of_another_device_is_its_choice(add: Callable[[Backend], None]) -> None:
    add(toy(device="cuda"))
    assert choose(CUDA, FP32).identity == "toy-1"


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_reference_has() -> None:
    fields = {field.name for field in dataclasses.fields(ops.Ops)} - {"identity", "own"}
    assert fields == reference.OPERATIONS.keys()


@pytest.mark.parametrize("backend", ops.BACKENDS, ids=lambda backend: backend.name)
def test_a_backends_operations_have_the_references_signatures(backend: Backend) -> None:
    for name, function in backend.operations.items():
        assert inspect.signature(function) == inspect.signature(reference.OPERATIONS[name]), name


def test_values_are_what_tells_the_meta_device_apart() -> None:
    assert holds_values(torch.zeros(2))
    assert not holds_values(torch.zeros(2, device="meta"))


# -- the reference's values; those of attention, KV writes and draws are tested beside the compiled ones ------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_references_values_are_those_of_fp64(dtype: torch.dtype, use_kernels: UseKernels) -> None:
    use_kernels("torch")
    generator = torch.Generator().manual_seed(0)
    x, up, weight, scale, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((30, 40), (30, 40), (17, 40), (40,), (17,))
    )
    wide, tolerance = x.double(), 4 * torch.finfo(dtype).eps
    mine = choose(CPU, dtype)
    for out, exact in (
        (mine.linear(x, weight, bias), wide @ weight.double().T + bias.double()),
        (mine.rms_norm(x, scale, EPS), scale.double() * wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()),
        (mine.swiglu(x, up), F.silu(wide) * up.double()),
    ):
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= tolerance * exact.norm()
    assert mine.fits_linear(torch.zeros(5, 7, dtype=dtype))


def test_choosing_anew_reads_the_settings_again(monkeypatch: pytest.MonkeyPatch, use_kernels: UseKernels) -> None:
    """What the other tests rely on."""
    use_kernels("torch")
    assert choose(CPU, FP32).own == frozenset()
    monkeypatch.setenv("COWROLL_KERNELS", "fast")
    choose_anew()
    with pytest.raises(RolloutError):
        choose(CPU, FP32)
