"""Paged KV tensors, one pair per layer, laid out [block, kv_head, block_size, head_dim]."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from rollout.schedule.block_pool import BlockCopy
from rollout_kernels.attention_plan import KVLayout
from rollout_kernels.ops import Ops
from rollout_kernels.shapes import ROW_MULTIPLE, SEGMENT_SIZE, round_up


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind, which share a block table: what a block costs and how attention reads it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """As stored: the model's, rounded up to a multiple of 16 (attention products round alike only at whole tiles)."""
    dtype: torch.dtype

    @staticmethod
    def of(config: PretrainedConfig, dtype: torch.dtype) -> "LayerGroup":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return LayerGroup(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=round_up(head_dim, ROW_MULTIPLE),
            dtype=dtype,
        )

    @property
    def num_groups(self) -> int:
        return self.num_heads // self.num_kv_heads

    def bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def bytes_per_sequence(self) -> int:
        """Of states that do not grow with a sequence; attention has none."""
        return 0


def layer_groups(config: PretrainedConfig, dtype: torch.dtype) -> list[LayerGroup]:
    """All of a model's layers, by kind: one group, since windows are masks over KV that stays."""
    return [LayerGroup.of(config, dtype)]


class KVCache:
    """The pool's tensors for one layer group, and the arithmetic from block tables to storage."""

    def __init__(self, group: LayerGroup, num_blocks: int, block_size: int, device: torch.device) -> None:
        # block 0 takes the writes of padding rows; zeros, since a masked position still meets a weight of 0
        shape = (group.num_layers, num_blocks + 1, group.num_kv_heads, block_size, group.head_dim)
        self.group = group
        self.block_size = block_size
        self.keys = torch.zeros(shape, dtype=group.dtype, device=device)
        self.values = torch.zeros(shape, dtype=group.dtype, device=device)
        # attention gathers runs of `unit` positions: the largest that neither a block nor a segment cuts
        self.unit = math.gcd(block_size, SEGMENT_SIZE)
        self.layout = KVLayout(group.num_kv_heads, group.num_groups, self.unit, block_size // self.unit)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, held or not."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def held_bytes(self) -> int:
        return 0 if self.released else self.num_bytes

    @property
    def released(self) -> bool:
        return self.keys.untyped_storage().nbytes() == 0

    def release(self) -> None:
        """Free the storage; contents are lost, shapes stay."""
        for tensor in (self.keys, self.values):
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the storage again, zeroed, if it was given back."""
        for tensor in (self.keys, self.values) if self.released else ():
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()

    def units(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Units of kv head 0, in order of position, that the blocks of a table hold."""
        per_block = self.block_size // self.unit
        first = np.asarray(blocks, np.int64) * (self.group.num_kv_heads * per_block)
        return first if per_block == 1 else (first[:, None] + np.arange(per_block)).reshape(-1)

    def rows(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Storage rows [T, kv_heads] for tokens at `positions` [T], each in its block [T]."""
        heads = np.arange(self.group.num_kv_heads)
        return (blocks[:, None] * self.group.num_kv_heads + heads) * self.block_size + (positions % self.block_size)[
            :, None
        ]

    def write(self, ops: Ops, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T * kv_heads, head_dim] at `rows` [T * kv_heads]."""
        key_pool, value_pool = (pool[layer].view(-1, self.group.head_dim) for pool in (self.keys, self.values))
        ops.write_rows(keys, values, key_pool, value_pool, rows)

    def clear(self) -> None:
        """Overwrite what is stored: a masked position has a weight of 0, and 0 times a stale nan would be nan."""
        self.keys.zero_()
        self.values.zero_()

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as [units, unit, head_dim]."""
        shape = (-1, self.unit, self.group.head_dim)
        return self.keys[layer].view(shape), self.values[layer].view(shape)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of every layer; no destination is a source."""
        source, destination = torch.tensor(copies, device=self.keys.device).unbind(1)
        for storage in (self.keys, self.values):
            storage.index_copy_(1, destination, storage.index_select(1, source))
