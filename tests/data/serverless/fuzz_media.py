"""MessagePack for schemathesis, which loads this by name (`fuzz.py`)."""

import msgspec
import schemathesis

NO_MESSAGE = b"\xc1"


@schemathesis.serializer("application/msgpack")
def packed(ctx, value):
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # MessagePack has no such number
        return NO_MESSAGE


@schemathesis.deserializer("application/msgpack")
def unpacked(ctx, response):
    return msgspec.msgpack.decode(response.content)
