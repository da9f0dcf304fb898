"""Writes to the KV pool."""

from torch import Tensor


def write_rows(keys: Tensor, values: Tensor, key_pool: Tensor, value_pool: Tensor, rows: Tensor) -> None:
    """Rows of keys and values [R, D] go to `rows` [R] (int64) of contiguous pools [N, D], of one dtype."""
    key_pool.index_copy_(0, rows, keys)
    value_pool.index_copy_(0, rows, values)
