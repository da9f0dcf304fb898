"""What memory there is, how many KV blocks fit in a share of it, and what was used of it."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.model.kv_cache import LayerGroup, layer_groups
from rollout.model.loading import longest_sequence


def device_bytes(device: torch.device) -> int:
    """Total memory of the device: the GPU's, or the machine's (the container's, if that is less)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            limit = f.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pool_size(config: RolloutConfig, groups: Sequence[LayerGroup], max_model_len: int, total: int) -> int:
    """Blocks in the pool: num_blocks, else what memory_fraction allows or max_num_seqs sequences need, if less.

    total: bytes of the device's memory. The block that takes padding's writes counts in what memory_fraction allows.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    per_block = sum(group.bytes_per_token() for group in groups) * config.block_size
    budget = int(total * config.memory_fraction)
    allowed = budget // per_block - 1
    if allowed < 1:
        raise RolloutError(
            f"memory_fraction={config.memory_fraction} of {total} bytes leaves no room for a KV block of {per_block}"
            f" bytes and one for padding ({2 * per_block - budget} bytes are missing): raise it, or lower block_size"
        )
    return min(allowed, blocks_for(config.max_num_seqs, max_model_len, config.block_size))


def slot_bytes(groups: Sequence[LayerGroup], max_len: int) -> int:
    """Bytes of a slot: a row of the token table (int32), and what layers keep of a sequence whatever its length."""
    return 4 * max_len + sum(group.bytes_per_sequence() for group in groups)


def blocks_for(num_sequences: int, length: int, block_size: int) -> int:
    """Blocks for sequences of `length` tokens that share nothing, with the one beside each that admission looks for."""
    return num_sequences * (-(-length // block_size) + 1)


def sized_for(config: RolloutConfig, model: PreTrainedModel, num_sequences: int, length: int) -> RolloutConfig:
    """The configuration with its num_blocks, or a pool for num_sequences of `length` tokens (see pool_size)."""
    parameter = next(model.parameters())
    groups = layer_groups(model.config, parameter.dtype)
    step = replace(config, max_num_seqs=min(config.max_num_seqs, num_sequences))
    longest = min(length, longest_sequence(config, model.config))
    return replace(config, num_blocks=pool_size(step, groups, longest, device_bytes(parameter.device)))


def _status(field: str) -> int | None:
    """Bytes that Linux reports of this process under a name; None where it does not."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def in_process(device: torch.device) -> bool:
    """Whether the device's tensors lie in the process's own memory, beside all else that it holds."""
    return device.type == "cpu"


def used_bytes(device: torch.device) -> int:
    """Bytes in use now: by tensors on CUDA; by the whole process on a CPU (its peak, where only that is known)."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS") or _peak_of_process()


def peak_bytes(device: torch.device) -> int:
    """Highest use since the last reset_peak()."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM") or _peak_of_process()


def _peak_of_process() -> int:
    # Linux counts kilobytes, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def trim() -> None:
    """Give freed heap back to the system, so that what is in use can be seen; only glibc needs and knows it."""
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim_heap is not None:
        trim_heap(0)


def reset_peak(device: torch.device) -> bool:
    """Reset peak_bytes() to the present use; False where the system does not let us: it counts from the start then."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
