"""The engine's word about kernels that are slower than torch, as a build without optimisation is ten times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends import has_kernels

CODE = """
import logging, torch
logging.basicConfig(format='%(message)s')
from rollout_kernels.cpu import build
from rollout_kernels.ops import choose
from rollout_kernels.pace import warn_if_slow
build._FLAGS[0] = "-O0"
cpu = torch.device('cpu')
for _ in range(2):
    warn_if_slow(choose(cpu, torch.float32), cpu, torch.float32, 1)
"""


def test_slow_kernels_are_told_once_with_both_figures(tmp_path: Path) -> None:
    if not has_kernels():
        pytest.skip("no compiled kernels here")
    environment = os.environ | {"COWROLL_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("GF/s, torch at") == done.stderr.count("COWROLL_KERNELS=torch") == 1, done.stderr
