"""Shapes under which a matrix product gives a row the same bits whatever else is in the batch.

CPU libraries block a product by rows and handle what is left over in other code, which rounds otherwise. A row count
that is a multiple of 16 never reaches that code, so every product that must agree between the generator and the
trainer is padded to one. Key/value positions are cut at absolute multiples of 64 for the same reason.
"""

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
