"""One bucket as bytes, in safetensors format, written and read without a copy of any tensor.

    8 bytes    length of the header
    header     JSON: name -> dtype, shape, begin and end; padded with spaces, so that what follows begins at a multiple
               of `ALIGNMENT`
    data       the tensors' bytes one after the other, those with the widest elements first

The safetensors library reads such a bucket like any other file of its format.
Invariant: what `tensors_of` yields has the names, in the order asked for, and lies within the buffer.
What this file leaves out: where the bytes lie, and whether they are those that were written (`data/weights.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from rollart.data.stores.checksum import Buffer
from rollart.errors import WeightsError

ALIGNMENT = 64
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

Whole = Annotated[int, Meta(ge=0)]


class Entry(Struct):
    """What the header says of one tensor. `data_offsets`: begin and end, counted from the end of the header."""

    dtype: str
    shape: list[Whole]
    data_offsets: tuple[Whole, Whole]


def in_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors in their order into buckets of at most `bucket_bytes`; a larger tensor stands alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > bucket_bytes or name in bucket):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def num_bytes(parts: Iterable[memoryview]) -> int:
    """Of a bucket."""
    return sum(part.nbytes for part in parts)


def parts_of(group: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes of a bucket in order: the header, then each tensor's own memory. Raises WeightsError for its dtype.

    Tensors are on CPU; one that is not contiguous is copied.
    """
    entries: dict[str, Entry] = {}
    data: list[memoryview] = []
    end = 0
    for name, tensor in sorted(group.items(), key=lambda pair: -pair[1].element_size()):
        if tensor.dtype not in TAGS:
            raise WeightsError(f"parameter {name!r} is of {tensor.dtype}, which the safetensors format cannot hold")
        begin, end = end, end + tensor.nbytes
        entries[name] = Entry(TAGS[tensor.dtype], list(tensor.shape), (begin, end))
        data.append(_bytes_of(tensor))
    header = msgspec.json.encode(entries)
    header += b" " * (-(HEADER_LENGTH_BYTES + len(header)) % ALIGNMENT)
    return [memoryview(len(header).to_bytes(HEADER_LENGTH_BYTES, "little") + header), *data]


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensors_of(buffer: Buffer, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the buffer's own memory. Raises, whatever the exception, when it is no bucket of these names."""
    view = memoryview(buffer)
    entries, begin = _read_header(view)
    if set(entries) != set(names):
        raise ValueError(f"a bucket holds {sorted(entries)}, its manifest says {sorted(names)}")
    for name in names:
        yield name, _tensor(buffer, view.nbytes, begin, name, entries[name])


def _read_header(view: memoryview) -> tuple[dict[str, Entry], int]:
    if view.nbytes < HEADER_LENGTH_BYTES:
        raise ValueError(f"a bucket of {view.nbytes} bytes has no header")
    begin = HEADER_LENGTH_BYTES + int.from_bytes(view[:HEADER_LENGTH_BYTES], "little")
    if begin > min(view.nbytes, MAX_HEADER_BYTES):
        raise ValueError(f"a bucket of {view.nbytes} bytes cannot have a header of {begin} bytes")
    return msgspec.json.decode(view[HEADER_LENGTH_BYTES:begin], type=dict[str, Entry]), begin


def _tensor(buffer: Buffer, size: int, begin: int, name: str, entry: Entry) -> Tensor:
    dtype = DTYPES.get(entry.dtype)
    first, last = (begin + offset for offset in entry.data_offsets)
    count = math.prod(entry.shape)
    if dtype is None or not first <= last <= size or last - first != count * dtype.itemsize:
        raise ValueError(f"a bucket's header is wrong about {name!r}: {entry}")
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=first).reshape(entry.shape)
