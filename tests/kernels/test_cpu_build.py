"""Building and loading the compiled kernels, what stands in for them, and their values on every target at hand."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends import CPU, choose_anew, has_kernels
from rollout_kernels import cpu
from rollout_kernels.attention import training_attention
from rollout_kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from rollout_kernels.cpu import bindings, library
from rollout_kernels.cpu import build as cpu_build
from rollout_kernels.cpu.linear import linear
from rollout_kernels.cpu.rows import rms_norm, swiglu
from rollout_kernels.errors import RolloutError
from rollout_kernels.ops import choose

COMPILED = pytest.mark.usefixtures("compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EPS = 1e-6


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    """A process that runs this and prints; it builds without optimisation, which is quicker."""
    start = (
        "import torch\nfrom rollout_kernels import cpu\nfrom rollout_kernels.cpu import build, library\n"
        "build._FLAGS[0] = '-O0'\n"
    )
    arguments, pipe = [sys.executable, "-c", start + code], subprocess.PIPE
    return subprocess.Popen(arguments, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def printed(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


# -- without kernels -----------------------------------------------------------------------------------------------


def test_a_compiler_command_that_no_shell_would_take_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'unbalanced")
    with pytest.raises(RolloutError, match=r"CXX=.*unbalanced.*No closing quotation"):
        choose(CPU, torch.float32)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of a look for the library, in vain."""
    with caplog.at_level(logging.WARNING, logger="rollout_kernels"):
        kinds = {choose(CPU, dtype).identity for dtype in (torch.float32, torch.bfloat16, torch.float32)}
    assert kinds == {"torch"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_without_a_compiler_a_warning_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in warned(caplog)


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_a_compiler_that_fails_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert compiler in warned(caplog)


@COMPILED
@pytest.mark.parametrize("below", ["file", pytest.param("file/below", marks=pytest.mark.slow)])
def test_a_cache_that_cannot_be_written_is_done_without(fresh: Path, tmp_path: Path, below: str) -> None:
    """The kernels are built for the process alone, with a warning."""
    (tmp_path / "file").touch()
    code = "import logging; logging.basicConfig(format='%(message)s'); print(cpu.identity())"
    process = python(code, COWROLL_KERNELS="native", COWROLL_CACHE=str(tmp_path / below))
    out, err = process.communicate(timeout=300)
    assert out.startswith("cpu"), err
    assert "compiled kernels are not kept" in err
    assert str(tmp_path / below) in err


def test_kernels_that_are_insisted_on_are_not_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COWROLL_KERNELS", "native")
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(ValueError, match=r"COWROLL_KERNELS=native, but .*/bin/false"):
        choose(CPU, torch.float32)


def test_a_folder_that_others_may_write_is_not_loaded_from(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="rollout_kernels"):
        choose(CPU, torch.float32)
    assert f"{fresh} is another user's, or others may write there" in caplog.text
    assert list(fresh.iterdir()) == []


# -- the build ----------------------------------------------------------------------------------------------------

STUB = """case "$*" in
*-dM*) echo stub 1 ;;
*) {work} ;;
esac"""
OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"'


@pytest.mark.parametrize(
    "work",
    [
        "for f in linear attention; do echo half > $f.o; done; echo no room >&2; exit 1",
        f"case $* in *-shared*) {OUTPUT}; echo no room >&2; exit 1 ;; esac",
    ],
    ids=["compiling", "linking"],
)
def test_a_build_that_breaks_off_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, work: str
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", STUB.format(work=work))))
    assert "no room" in warned(caplog)
    assert list(fresh.iterdir()) == []


def test_what_is_not_a_library_is_not_loaded(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    work = f"case $* in *-shared*) {OUTPUT} ;; esac"
    monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", STUB.format(work=work))))
    assert "could not be built" in warned(caplog)
    assert list(fresh.iterdir()) == []


@COMPILED
def test_a_library_is_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By one process; later ones, and later looks, find it there."""
    log = tmp_path / "log"
    compiler = script(tmp_path / "compiler", f'echo "$@" >> {log}; exec {shutil.which("g++")} "$@"')
    code = "cpu.identity(); library.kernels.cache_clear(); print(cpu.identity())"
    first = printed(python(code, CXX=str(compiler))).strip()
    (built,) = fresh.iterdir()
    assert built.name.split("-")[0] == first.split("-")[-1]
    before = built.stat().st_mtime_ns
    assert printed(python(code, CXX=str(compiler))).strip() == first
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [before]
    assert log.read_text().count("-shared") == 1


@COMPILED
@pytest.mark.parametrize(
    "damage", ["one byte", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("half", "folder"))]
)
def test_a_damaged_library_is_built_anew(fresh: Path, damage: str) -> None:
    """It is never loaded: one whose pages are missing would end the process with SIGBUS."""
    name = printed(python("print(cpu.identity())")).strip()
    (built,) = fresh.iterdir()
    whole = built.read_bytes()
    cut, turned = whole[: len(whole) // 2], whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    if damage == "folder":
        built.unlink()
        built.mkdir()
    else:
        built.write_bytes(cut if damage == "half" else turned)
    assert printed(python("print(cpu.identity())")).strip() == name
    (again,) = fresh.iterdir()
    assert again.read_bytes() == whole


@COMPILED
@pytest.mark.slow
def test_two_processes_may_build_at_once(fresh: Path, tmp_path: Path) -> None:
    """Each waits, when it has found the cache empty, for the other to be there too."""
    wait = f"touch {tmp_path}/at.$PPID; while [ $(ls {tmp_path}/at.* | wc -l) -lt 2 ]; do sleep 0.05; done"
    meet = f'case "$*" in *" -c "*) {wait} ;; esac'
    compiler = script(tmp_path / "compiler", f'{meet}\nexec {shutil.which("g++")} "$@"')
    code = (
        "from rollout_kernels.cpu.linear import linear\n"
        "print(cpu.identity(), linear(torch.full((3, 4), 2.0), torch.full((5, 4), 3.0)).unique().tolist())"
    )
    outs = [printed(process) for process in [python(code, CXX=str(compiler)) for _ in range(2)]]
    assert [path.suffix for path in fresh.iterdir()] == [".so"]
    digest = next(fresh.iterdir()).name.split("-")[0]
    assert [out.split("-")[-1] for out in outs] == [f"{digest} [24.0]\n"] * 2


@COMPILED
def test_kernels_run_in_torchs_own_pool_of_threads() -> None:
    """One library of OpenMP in the process, torch's."""
    code = (
        "from rollout_kernels.cpu.linear import linear\n"
        "torch.set_num_threads(2); linear(torch.ones(900, 64), torch.ones(900, 64))\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split('/')[-1]}, sep='\\n')"
    )
    paths = [Path(line) for line in printed(python(code)).split()]
    assert len(paths) == 1
    assert paths[0].name.startswith("libgomp")


# -- the target ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_target_is_another_identity(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "_FLAGS", ["-O0", *cpu_build._FLAGS[1:]])
    seen = set()
    for march in ("", "x86-64-v2", "x86-64"):
        monkeypatch.setenv("COWROLL_KERNELS_MARCH", march)
        choose_anew()
        seen.add(cpu.identity())
    assert len(seen) == 3


@COMPILED
@pytest.mark.parametrize("march", ["pentium-9", "x86-64-v9", "-O3", "a b"])
def test_an_unknown_target_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch, march: str) -> None:
    monkeypatch.setenv("COWROLL_KERNELS_MARCH", march)
    with pytest.raises(RolloutError, match=f"COWROLL_KERNELS_MARCH='{march}'"):
        cpu.identity()


@COMPILED
@pytest.mark.skipif("avx512_fp16" in Path("/proc/cpuinfo").read_text(), reason="this CPU has it all")
def test_a_target_that_this_cpu_lacks_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COWROLL_KERNELS_MARCH", "sapphirerapids")
    with pytest.raises(RolloutError, match=r"COWROLL_KERNELS_MARCH='sapphirerapids': this CPU lacks .*avx512_fp16"):
        cpu.identity()


@COMPILED
@pytest.mark.parametrize("field", ["version", "attention_size", "attention_scale", "span_size", "segment_size"])
def test_kernels_that_mean_other_structures_are_not_called(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    class Other:
        def __getattr__(self, name: str) -> object:
            return getattr(library.kernels().library, name)

        @staticmethod
        def kernel_interface(out: object) -> None:
            library.kernels().library.kernel_interface(out)
            interface = ctypes.cast(out, ctypes.POINTER(bindings.Interface)).contents  # type: ignore[arg-type]
            setattr(interface, field, getattr(interface, field) + 1)

    with pytest.raises(AssertionError):
        bindings.bind(Other())  # type: ignore[arg-type]


# -- values, on every target that is at hand -----------------------------------------------------------------------

USUALLY = [("", ""), ("g++", "x86-64-v3"), ("g++", "x86-64-v2")]
ON_REQUEST = [("g++", "native"), *(("clang++", march) for march in ("native", "x86-64-v3", "x86-64-v2"))]
BUILDS = [*USUALLY, *(pytest.param(build, marks=pytest.mark.slow) for build in ON_REQUEST)]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(params=BUILDS, ids=lambda build: "-".join(build).strip("-") or "usual")
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caches: Path) -> Iterator[None]:
    """The kernels as they are usually built, and those of each compiler for this CPU and for lesser ones."""
    cxx, march = request.param
    if cxx:
        if shutil.which(cxx) is None:
            pytest.skip(f"no {cxx} here")
        monkeypatch.setenv("CXX", cxx)
        monkeypatch.setenv("COWROLL_KERNELS_MARCH", march)
        monkeypatch.setenv("COWROLL_CACHE", str(caches))
    choose_anew()
    if not has_kernels():
        pytest.skip("no compiled kernels here")
    yield
    choose_anew()


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k and v [heads, T, D]."""
    heads, size, _ = q.shape
    span = QuerySpan(np.arange(size), np.arange(1, size + 1), np.arange(size))
    layout = KVLayout(len(k), heads // len(k), 1, size)
    plan, scale = AttentionPlan([span], layout, CPU), q.shape[-1] ** -0.5
    rows = q.transpose(0, 1).contiguous()
    return training_attention(choose(CPU, q.dtype), rows, k, v, plan, scale).transpose(0, 1)


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    weights: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ v


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * F.rms_norm(wide, wide.shape[-1:], eps=EPS).to(x.dtype)


QKV = ((4, 150, 32), (2, 150, 32), (2, 150, 32))
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (linear, F.linear, ((400, 72), (100, 72), (100,))),
    "rms_norm": (lambda x, w: rms_norm(x, w, EPS), plain_norm, ((400, 100), (100,))),
    "swiglu": (swiglu, lambda g, u: F.silu(g) * u, ((400, 100), (400, 100))),
    "attention": (causal, plain_causal, QKV),
}


@pytest.mark.parametrize("case", CASES)
@DTYPES
def test_values_and_gradients_equal_fp64(build: None, case: str, dtype: torch.dtype) -> None:
    """Errors at most 1.75 times those of torch in the same dtype; its fp32 sums may be of more and shorter ones."""
    ours, plain, shapes = CASES[case]
    *tensors, upstream = randoms(*shapes, ours(*randoms(*shapes, dtype=dtype)).shape, dtype=dtype)
    results = []
    for function, kind in ((ours, dtype), (plain, dtype), (plain, torch.float64)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in tensors]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(kind, copy=True))])
    for mine, usual, exact in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert (mine - exact).norm() <= 1.75 * (usual - exact).norm()


@pytest.mark.parametrize("row", [0, 17, 63, 64, 149])
@DTYPES
def test_a_row_has_the_bits_of_the_row_alone(build: None, threads: int, dtype: torch.dtype, row: int) -> None:
    """Row-wise kernels give the row of a batch; attention gives the last row of what ends there."""
    alone = slice(row, row + 1)
    for case in ("linear", "rms_norm", "swiglu"):
        function, _, shapes = CASES[case]
        x, *others = randoms(*shapes, dtype=dtype)
        own = [y[alone] if case == "swiglu" else y for y in others]
        assert torch.equal(function(x[alone], *own), function(x, *others)[alone]), case
    q, k, v = randoms(*QKV, dtype=dtype)
    span = QuerySpan(np.array([0]), np.array([row + 1]), np.arange(row + 1))
    plan = AttentionPlan([span], KVLayout(2, 2, 1, 150), CPU)
    one = q[:, alone].transpose(0, 1).contiguous()
    single = training_attention(choose(CPU, dtype), one, k, v, plan, q.shape[-1] ** -0.5)[0]
    assert torch.equal(single, causal(q, k, v)[:, row])


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even(build: None) -> None:
    """Sums that lie between two bf16 numbers, or are none."""
    terms = [(1, 2**-8), (1, 3 * 2**-8), (-1, -(2**-8)), (1, 1.5 * 2**-8), (1, 2**-9), (torch.inf, 1), (torch.nan, 1)]
    out = linear(torch.tensor(terms, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16))[:, 0]
    expected = [1, 1 + 2**-6, -1, 1 + 2**-7, 1, torch.inf, torch.nan]
    assert out.tolist() == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


# -- nan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 5, 63, 64, 149])
@DTYPES
def test_nan_in_a_query_reaches_its_row_only(build: None, dtype: torch.dtype, place: int) -> None:
    q, k, v = randoms(*QKV, dtype=dtype)
    clean = causal(q, k, v)
    q[1, place, 3] = torch.nan
    out = causal(q, k, v)
    assert out[1, place].isnan().all()
    out[1, place] = clean[1, place]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("place", [0, 5, 63, 64, 149])
@DTYPES
def test_nan_in_a_key_reaches_the_rows_that_see_it_only(build: None, dtype: torch.dtype, place: int) -> None:
    q, k, v = randoms(*QKV, dtype=dtype)
    clean = causal(q, k, v)
    k[1, place, 3] = torch.nan
    out = causal(q, k, v)
    assert out[2:, place:].isnan().all()
    out[2:, place:] = clean[2:, place:]
    assert torch.equal(out, clean)


def test_any_nan_in_a_query_reaches_its_row(build: None) -> None:
    q, k, v = randoms(*QKV, dtype=torch.float32)
    q[0, 9, 3] = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0]
    assert causal(q, k, v)[0, 9].isnan().all()


def test_flushing_denormals_changes_nothing(build: None) -> None:
    q, k, v = randoms(*QKV, dtype=torch.float32)
    expected = causal(20 * q, 20 * k, v)
    torch.set_flush_denormal(True)
    try:
        out = causal(20 * q, 20 * k, v)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out, expected)
