"""TensorBoard's event files, written: protocol buffers in TFRecord frames, without either library.

Field numbers are those of tensorboard/compat/proto: event.proto, summary.proto, tensor.proto.
"""

import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from os import getpid
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
"""CRC-32C (RFC 3720, B.4), bits reversed."""
_MASK_DELTA = 0xA282EAD8
_STRING = 7
"""DT_STRING of types.proto."""
_numbers = count()


def _crc_row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_row(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """A TFRecord: length, masked checksum of the length, data, masked checksum of the data."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


# -- protocol buffers ---------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    """value: 0 or more."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", errors="replace"))


def _float(field: int, value: float) -> bytes:
    """The nearest float32; what is beyond its range is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _scalar(tag: str, value: float) -> bytes:
    return _bytes(1, _text(1, tag) + _float(2, value))


def _table(tag: str, rows: Sequence[Sequence[str]]) -> bytes:
    """A value of the text plugin; rows have one length."""
    shape = b"".join(_bytes(2, _integer(1, size)) for size in (len(rows), len(rows[0])))
    tensor = _integer(1, _STRING) + _bytes(2, shape) + b"".join(_text(8, cell) for row in rows for cell in row)
    metadata = _bytes(1, _text(1, "text"))
    return _bytes(1, _text(1, tag) + _bytes(9, metadata) + _bytes(8, tensor))


# -- the file -----------------------------------------------------------------------------------------------------


class EventFile:
    """A new event file in a folder; each event goes to the system as soon as it is added."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{getpid()}.{next(_numbers)}"
        self.path = folder / name
        self._file = self.path.open("xb", buffering=0)
        self._add(_text(3, "brain.Event:2"))
        # a TensorBoard that is watching forgets what earlier files said: SessionLog.START, at step 0
        self._add(_bytes(7, _integer(1, 1)))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        self._summary((_scalar(tag, value) for tag, value in values.items()), step)

    def add_table(self, tag: str, rows: Sequence[Sequence[str]], step: int) -> None:
        """Cells are Markdown."""
        self._summary([_table(tag, rows)], step)

    def close(self) -> None:
        self._file.close()

    def _summary(self, values: Iterable[bytes], step: int) -> None:
        self._add(_integer(2, step) + _bytes(5, b"".join(values)))

    def _add(self, event: bytes) -> None:
        self._file.write(record(_double(1, time.time()) + event))
