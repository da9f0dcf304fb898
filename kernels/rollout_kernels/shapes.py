"""Shapes under which a matrix product gives a row the same bits whatever else is in the batch.

CPU libraries block a product by rows and handle what is left over in other code, which rounds otherwise. A row count
that is a multiple of 16 never reaches that code, so every product that must agree between the generator and the
trainer is padded to one. Key/value positions are cut at absolute multiples of 64 for the same reason.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROW_MULTIPLE = 16
SEGMENT_SIZE = 64


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def pad_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """`x` [R, ...] with rows of zeros appended until R is a multiple of `multiple`; `x` itself if it already is."""
    missing = round_up(x.shape[0], multiple) - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


@dataclass
class AttentionTiles:
    """W equal-shaped tiles: M query rows, each against the same S consecutive KV segments.

    query_rows: [W, M] int64, row of q that fills the place; padding repeats any row.
    lengths: [W, R] int64, how many KV positions (counted from position 0) the row may see; 0 for padding.
    kv_units: [W, K, P / U] int64, which units of the flat KV hold those positions; padding points at any unit that
        holds finite numbers.
    first_positions, end_positions: [W] int64, the absolute positions where each tile's own segments begin and end
        (multiples of SEGMENT_SIZE); what lies between the end and S segments is padding.
    places, rows: [n] int64, the places in the flattened [W * R] that hold real rows, and which rows they are.
    reach: how many positions from first_positions on some row of some tile sees.
    seen_by_all: how many positions from first_positions on every real row of every tile sees, but for windows.
    begins: whether the tiles begin at position 0.
    chained: whether other tiles hold further segments of these rows.
    """

    query_rows: Tensor
    lengths: Tensor
    kv_units: Tensor
    first_positions: Tensor
    end_positions: Tensor
    places: Tensor
    rows: Tensor
    reach: int
    seen_by_all: int
    begins: bool = True
    chained: bool = False
    _bias: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_real_rows(self) -> int:
        """R, the most real rows of a tile."""
        return self.lengths.shape[1]

    def bias(self, start: int, end: int, window: int | None) -> Tensor:
        """fp32 [W, 1, R, 1, end - start]: 0 where the row sees the position, -inf elsewhere. Kept for all layers."""
        key = (start, end, window or 0)
        if key not in self._bias:
            offsets = torch.arange(start, end, device=self.lengths.device)
            positions = (self.first_positions[:, None] + offsets)[:, None]
            lengths = self.lengths[:, :, None]
            visible = (positions < lengths) & (positions < self.end_positions[:, None, None])
            if window:
                visible &= positions >= lengths - window
            bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._bias[key] = bias[:, None, :, None]
        return self._bias[key]
