"""Compiles the CPU's kernels with the machine's C++ compiler and keeps them in the cache directory.

A library's name holds a digest of what it was made from (sources, flags, and what the compiler says of itself and the
target) and one of its own bytes, so that a file that was cut short or written over is never loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_kernels.cache import cache_directory
from rollout_kernels.errors import RolloutError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_FLAGS = ["-O3", "-ffp-contract=off", "-std=c++17", "-fPIC"]

_CPU_FLAGS = {
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__BMI2__": "bmi2",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VNNI__": "avx512_vnni",
}
"""What a compiler says that it uses, and what Linux calls it where the CPU has it."""


def compiler_command() -> list[str]:
    """$CXX with its arguments, else g++ or clang++; FileNotFoundError if there is none."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise RolloutError(f"CXX={os.environ['CXX']!r}: {error}; give a command as a shell would take it") from error
    found = named if named and shutil.which(named[0]) else []
    if not named:
        found = next(([name] for name in ("g++", "clang++") if shutil.which(name)), [])
    if platform.system() != "Linux" or not found:
        wanted = named[0] if named else "g++ or clang++"
        raise FileNotFoundError(f"no C++ compiler on Linux ({wanted}; CXX names another)")
    return found


def load_library() -> ctypes.CDLL:
    """The library for these sources, this compiler and this target; built unless a whole one is in the cache.

    Raises OSError or CalledProcessError if it cannot be built, RolloutError if COWROLL_KERNELS_MARCH is at fault.
    """
    compiler = compiler_command()
    march = os.environ.get("COWROLL_KERNELS_MARCH") or "native"
    flags = [*_FLAGS, f"-march={march}"]
    macros = _target_macros(compiler, flags, march)
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_text() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256("\0".join((*texts, *flags, *compiler, macros)).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as passing:
        folder = _cache_folder() or Path(passing)
        for kept in sorted(folder.glob(f"{digest}-*.so")):
            if kept.is_file() and kept.stem.rpartition("-")[2] == _content_digest(kept):
                return ctypes.CDLL(str(kept))
            logger.warning("%s is damaged and is built anew", kept)
            _remove(kept)
        return _build([*compiler, *flags], sources, folder, digest)


def _target_macros(compiler: list[str], flags: list[str], march: str) -> str:
    """What the compiler defines under these flags; refuses a target that it does not know or this CPU lacks."""
    seen = [*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(seen, capture_output=True, text=True)
    if done.returncode and march != "native":
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise RolloutError(f"COWROLL_KERNELS_MARCH={march!r}: {compiler[0]} does not know this target ({reason})")
    done.check_returncode()
    cpuinfo = Path("/proc/cpuinfo")
    listed = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    used = {line.split()[1] for line in done.stdout.splitlines()}
    lacking = sorted(flag for macro, flag in _CPU_FLAGS.items() if macro in used and flag not in listed.split())
    if listed and lacking:
        raise RolloutError(
            f"COWROLL_KERNELS_MARCH={march!r}: this CPU lacks {', '.join(lacking)}; leave it out to build for this CPU"
        )
    return done.stdout


def _cache_folder() -> Path | None:
    """Where libraries are kept; None, with a warning, if that place cannot be used or is not safe to load from."""
    try:
        folder = cache_directory() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} is another user's, or others may write there")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RolloutError) as error:
        logger.warning("compiled kernels are not kept, but built at every start: %s; set COWROLL_CACHE", error)
        return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _content_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _build(compiler: list[str], sources: list[Path], folder: Path, digest: str) -> ctypes.CDLL:
    logger.info("compiling the CPU's kernels, once, into %s", folder)
    # under another name first: several processes may build at once
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:

        def run(*arguments: str | Path) -> None:
            subprocess.run([*compiler, *arguments], cwd=scratch, capture_output=True, text=True, check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: run("-c", source), sources))
        # linked without an OpenMP library: its entry point is that of the one that torch has loaded
        run("-shared", "-o", "kernels.so", *(f"{path.stem}.o" for path in sources))
        linked = Path(scratch) / "kernels.so"
        ctypes.CDLL(str(linked))  # what cannot be loaded is not kept
        with linked.open("rb") as file:
            os.fsync(file.fileno())
        target = folder / f"{digest}-{_content_digest(linked)}.so"
        linked.replace(target)
        return ctypes.CDLL(str(target))
