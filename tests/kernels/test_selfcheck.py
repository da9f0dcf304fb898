"""The kernels' C++ self-check, on this CPU and, where the tools are, on an emulated one of another kind."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rollout_kernels.cpu.build import SOURCES

SELFCHECK = Path(__file__).with_name("selfcheck.cpp")
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "here": (["g++", "-march=native"], []),
    "aarch64": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]),
}


@pytest.mark.parametrize("target", [pytest.param("here", marks=pytest.mark.slow), "aarch64"])
def test_selfcheck(target: str, tmp_path: Path) -> None:
    compiler, emulator = TARGETS[target]
    for tool in (compiler[0], *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    program = tmp_path / "selfcheck"
    flags = ["-O1", "-ffp-contract=off", "-std=c++17", f"-I{SOURCES}", "-o", str(program)]
    subprocess.run([*compiler, *flags, SELFCHECK, *SOURCES.glob("*.cpp"), "-fopenmp"], check=True)
    done = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "WRONG" not in done.stdout
