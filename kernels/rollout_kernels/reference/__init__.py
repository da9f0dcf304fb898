"""Every operation in torch: the oracle of the tests, and what runs where no other backend does."""

from collections.abc import Callable
from typing import Any

from rollout_kernels.reference.attention import segment_attention, segment_attention_backward
from rollout_kernels.reference.gated import swiglu
from rollout_kernels.reference.kv import write_rows
from rollout_kernels.reference.linear import fits_linear, linear
from rollout_kernels.reference.norms import rms_norm
from rollout_kernels.reference.sampling import draw_tokens

_PRODUCTS = (linear, fits_linear, segment_attention, segment_attention_backward)
_ROWS = (rms_norm, swiglu, write_rows, draw_tokens)
OPERATIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*_PRODUCTS, *_ROWS)}
