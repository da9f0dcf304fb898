"""The CPU's compiled kernels: C++ sources, their build, their bindings, and the operations that call them."""

from collections.abc import Callable
from typing import Any

from rollout_kernels.cpu.attention import segment_attention, segment_attention_backward
from rollout_kernels.cpu.library import DTYPES, identity
from rollout_kernels.cpu.linear import fits_linear, linear
from rollout_kernels.cpu.rows import draw_tokens, rms_norm, swiglu, write_rows

_PRODUCTS = (linear, fits_linear, segment_attention, segment_attention_backward)
_ROWS = (rms_norm, swiglu, write_rows, draw_tokens)
OPERATIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*_PRODUCTS, *_ROWS)}

__all__ = ["DTYPES", "OPERATIONS", "identity"]
