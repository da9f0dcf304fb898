"""How many KV blocks fit."""

import os

import torch

from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.kv_cache import LayerGroup


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


def pool_size(config: RolloutConfig, group: LayerGroup, max_model_len: int, device: torch.device) -> int:
    """Blocks in the pool: num_blocks, else what memory_fraction allows or max_num_seqs sequences need, if less."""
    if config.num_blocks is not None:
        return config.num_blocks
    per_block = group.bytes_per_token() * config.block_size
    total = device_bytes(device)
    allowed = int(total * config.memory_fraction) // per_block
    needed = config.max_num_seqs * -(-max_model_len // config.block_size)
    if allowed < 1:
        missing = per_block - int(total * config.memory_fraction)
        raise RolloutError(
            f"memory_fraction={config.memory_fraction} of {total} bytes leaves no room for one KV block of {per_block}"
            f" bytes ({missing} bytes are missing): raise it, or lower block_size"
        )
    return min(allowed, needed)
