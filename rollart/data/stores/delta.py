"""What changed between two versions of a bucket, as bytes.

Both are cut into blocks of `BLOCK_BYTES`. Of the blocks that differ, the exclusive or is kept, its bytes regrouped
(all first bytes of the elements, then all second bytes, ...: signs and exponents, which seldom change, come together as
zeros), and compressed: with zstandard where the extra `weights` is installed, else with zlib. The writer's choice
travels with the difference.

Invariant: `applied(base, difference(base, new)) == new`, bit for bit; what is no difference to a bucket of the base's
size raises. That the right base was taken is for the bucket's checksum to say (`data/weights.py`).

Shapes: N blocks of B bytes, E elements of W bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from typing import Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rollart.data.stores.checksum import Buffer
from rollart.errors import WeightsError, to_install

BLOCK_BYTES = 4096
MAX_BYTES = 1 << 31
"""Larger buckets are always written whole."""
WIDTHS = (1, 2, 4, 8)
LEVEL = 1
"""Of compression: faster than any network is worth more than small."""

Bytes = NDArray[np.uint8]
Codec = Literal["zstd", "zlib"]


class Difference(Struct, frozen=True, array_like=True):
    """`changed`: one bit per block; `width`: bytes per element; `payload`: the changed blocks, compressed."""

    num_bytes: int
    block_bytes: int
    width: int
    codec: Codec
    changed: bytes
    payload: bytes


def fastest() -> Codec:
    """The codec that a writer takes."""
    return "zstd" if importlib.util.find_spec("zstandard") is not None else "zlib"


def difference(base: Buffer, new: Buffer, width: int, codec: Codec | None = None) -> bytes | None:
    """What turns `base` into `new`, both of one length; None when they are equal. `width`: bytes per element."""
    before, after = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    blocks_NB = _empty_blocks(after.size)
    np.bitwise_xor(before, after, out=blocks_NB.reshape(-1)[: after.size])
    changed_N = blocks_NB.view(np.uint64).any(axis=1)
    if not changed_N.any():
        return None
    chosen = codec or fastest()
    payload = _compress(chosen, _planes(blocks_NB[changed_N].reshape(-1, width)))
    return msgspec.msgpack.encode(
        Difference(after.size, BLOCK_BYTES, width, chosen, np.packbits(changed_N).tobytes(), payload)
    )


def applied(base: Buffer, data: Buffer) -> memoryview:
    """The new bucket, in memory of its own. Raises, with an exception of any kind, when `data` does not fit."""
    change = msgspec.msgpack.decode(data, type=Difference)
    num_bytes = memoryview(base).nbytes
    if change.num_bytes != num_bytes or change.block_bytes != BLOCK_BYTES or change.width not in WIDTHS:
        raise ValueError(f"a difference for a bucket of {change.num_bytes} bytes, where the base has {num_bytes}")
    blocks_NB = _empty_blocks(num_bytes)
    blocks_NB.reshape(-1)[:num_bytes] = np.frombuffer(base, np.uint8)
    changed_N = np.unpackbits(np.frombuffer(change.changed, np.uint8), count=len(blocks_NB)).astype(bool)
    size = int(changed_N.sum()) * BLOCK_BYTES
    planes_WE = np.frombuffer(_decompress(change.codec, change.payload, size), np.uint8).reshape(change.width, -1)
    blocks_NB[changed_N] ^= _elements(planes_WE).reshape(-1, BLOCK_BYTES)
    return blocks_NB.reshape(-1)[:num_bytes].data


def _empty_blocks(num_bytes: int) -> Bytes:
    """Rows of one block each, of which the bytes beyond `num_bytes` are zero and the others anything."""
    count = -(-num_bytes // BLOCK_BYTES)
    blocks = np.empty(count * BLOCK_BYTES, np.uint8)
    blocks[num_bytes:] = 0
    return blocks.reshape(count, BLOCK_BYTES)


def _planes(elements_EW: Bytes) -> Bytes:
    """All first bytes, then all second bytes, and so on; plane by plane, which is several times as fast as `.T`."""
    planes_WE = np.empty(elements_EW.shape[::-1], np.uint8)
    for place, plane_E in enumerate(planes_WE):
        plane_E[:] = elements_EW[:, place]
    return planes_WE


def _elements(planes_WE: Bytes) -> Bytes:
    """The inverse of `_planes`."""
    elements_EW = np.empty(planes_WE.shape[::-1], np.uint8)
    for place, plane_E in enumerate(planes_WE):
        elements_EW[:, place] = plane_E
    return elements_EW


def _compress(codec: Codec, planes_WE: Bytes) -> bytes:
    if codec == "zlib":
        return zlib.compress(planes_WE.data, LEVEL)
    return cast(bytes, _zstandard().ZstdCompressor(level=LEVEL).compress(planes_WE.reshape(-1)))


def _decompress(codec: Codec, payload: bytes, size: int) -> bytes:
    """Exactly `size` bytes, and never the memory of more."""
    if codec == "zlib":
        stream = zlib.decompressobj()
        plain = stream.decompress(payload, size)
        whole = not stream.unconsumed_tail
    else:
        # The frame says how long it is; one that says more, or nothing, is not ours.
        library = _zstandard()
        whole = library.frame_content_size(payload) == size
        plain = library.ZstdDecompressor().decompress(payload) if whole else b""
    if not whole or len(plain) != size:
        raise ValueError(f"its changed blocks are not {size} bytes long")
    return plain


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        raise WeightsError(
            f"the weights' differences are compressed with zstandard, which is needed here too: {to_install('weights')}"
        ) from error
