"""TensorBoard's event format, written by hand: scalars only, no thread, no framework to import.

An event file is a row of records: length (8 bytes), its checksum, payload, its checksum; little-endian, the checksum a
masked CRC-32C. The payload is a protocol buffer: Event {1: wall time, 2: step, 3: file version, 5: Summary}, where
Summary is repeated {1: Value {1: tag, 2: simple value}}. Invariant: `records` is a whole number of records, so a writer
that appends all of it or none leaves a file that TensorBoard can read. What this file leaves out: files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

FIRST_PAYLOAD = "brain.Event:2"


def header(wall_time_s: float) -> bytes:
    """The record that every event file starts with."""
    return _record(_event(wall_time_s) + _bytes(3, FIRST_PAYLOAD.encode()))


def records(wall_time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """One record that holds `values` at `step`."""
    summary = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _tag(2, 5) + _single(value)) for name, value in values.items()
    )
    return _record(_event(wall_time_s) + _tag(2, 0) + _varint(step) + _bytes(5, summary))


def _single(value: float) -> bytes:
    """Single precision; what is larger than it can hold becomes infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _event(wall_time_s: float) -> bytes:
    return _tag(1, 1) + struct.pack("<d", wall_time_s)


def _bytes(number: int, payload: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(payload)) + payload


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _checksum(length) + payload + _checksum(payload)


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
