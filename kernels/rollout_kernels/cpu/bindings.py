"""The compiled kernels' functions and structures, as ctypes sees them."""

import ctypes

from rollout_kernels.shapes import SEGMENT_SIZE

_VERSION = 2
"""Raised with every change of a function's or a structure's meaning, here and in cpu/interface.cpp."""


class Attention(ctypes.Structure):
    """The arguments of segment attention, as cpu/attention.h has them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "lse", "states", "grad_out", "delta")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_keys", "grad_values")),
        *((name, ctypes.c_void_p) for name in ("rows", "lengths", "units", "spans")),
        *((name, ctypes.c_int64) for name in ("num_spans", "num_first", "heads", "kv_heads", "dim", "unit")),
        *((name, ctypes.c_int64) for name in ("head_stride", "window", "num_threads", "bf16")),
        ("scale", ctypes.c_float),
    ]


SPAN_FIELDS = 6
"""Of 64 bits each, as cpu/attention.h has them."""


class Interface(ctypes.Structure):
    """What both sides must agree on, and what follows from the target."""

    version: int
    attention_size: int
    attention_scale: int
    span_size: int
    segment_size: int
    lanes: int
    """Floats of a vector."""
    bf16_pairs: int
    """Whether bf16 products are computed from pairs of bf16; otherwise in fp32."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("version", "attention_size", "attention_scale", "span_size")),
        *((name, ctypes.c_int64) for name in ("segment_size", "lanes", "bf16_pairs")),
    ]


_ARGUMENTS = {
    "segment_attention": [ctypes.POINTER(Attention)],
    "segment_attention_backward": [ctypes.POINTER(Attention)],
    # x, weight, bias, out, rows, columns, depth, whether the weight is [depth, columns], threads, whether bf16
    "linear": [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 3,
    # x, weight, out, rows, columns, eps, threads, whether bf16
    "row_rms_norm": [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float] + [ctypes.c_int] * 2,
    # gate, up, out, elements, threads, whether bf16
    "gated_silu": [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_int] * 2,
    # scaled logits, uniform numbers, tokens, rows, vocabulary, threads
    "draw_tokens": [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_int],
    # keys, values, their pools, rows, how many rows, bytes of a row
    "write_rows": [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2,
    "kernel_interface": [ctypes.POINTER(Interface)],
    # rounds, threads, whether bf16; returns flops
    "multiply_in_registers": [ctypes.c_int64] + [ctypes.c_int] * 2,
}


def bind(library: ctypes.CDLL) -> Interface:
    """Give the library's functions their argument types; AssertionError if it means other structures or constants."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int64 if name == "multiply_in_registers" else None
    interface = Interface()
    library.kernel_interface(ctypes.byref(interface))
    meant = (interface.version, interface.attention_size, interface.attention_scale)
    assert meant == (_VERSION, ctypes.sizeof(Attention), Attention.scale.offset), meant
    assert interface.span_size == SPAN_FIELDS * 8, interface.span_size
    assert interface.segment_size == SEGMENT_SIZE, interface.segment_size
    return interface
