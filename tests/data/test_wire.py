"""Frames over a stream: however they are cut up or run together, and that a burst leaves with one send."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.data.wire import HEADER, MAX_FRAME_BYTES, SMALL_BYTES, FrameWriter, frames
from rollart.errors import WorkerError


async def received(chunks: list[bytes]) -> list[bytes]:
    reader = asyncio.StreamReader()
    found: list[bytes] = []

    async def read() -> None:
        async for frame in frames(reader):
            found.append(frame)  # noqa: PERF401  (the loop ends by an error)

    reading = asyncio.ensure_future(read())
    for chunk in chunks:
        reader.feed_data(chunk)
        await asyncio.sleep(0)
    reader.feed_eof()
    with pytest.raises(ConnectionError):
        await reading
    return found


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_frames_arrive_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)
    chunks, at, turn = list[bytes](), 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        chunks.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert asyncio.run(received(chunks)) == payloads


def test_a_frame_of_absurd_length_is_a_damaged_stream() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(HEADER.pack(MAX_FRAME_BYTES + 1))
        with pytest.raises(WorkerError, match="is beyond the limit of"):
            await anext(frames(reader))

    asyncio.run(main())


def test_a_burst_leaves_with_one_send_and_keeps_its_order_beside_large_frames() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, other = await asyncio.open_connection(sock=theirs)
        _, stream = await asyncio.open_connection(sock=ours)
        writer, large = FrameWriter(stream), bytes(SMALL_BYTES + 1)
        for payload in (b"one", b"two", large, b"three"):
            writer.write(payload)
        arriving = frames(reader)
        assert [await anext(arriving) for _ in range(4)] == [b"one", b"two", large, b"three"]
        for _ in range(3):
            writer.write(b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await reader.read(1 << 16) == (HEADER.pack(1) + b"x") * 3
        writer.write(b"last")
        writer.flush()
        assert await anext(arriving) == b"last"
        stream.close()
        other.close()

    asyncio.run(main())
