"""MessagePack for schemathesis, which loads this by name (`fuzz.py`)."""

import msgspec
import schemathesis


@schemathesis.serializer("application/msgpack")
def packed(ctx, value):
    return msgspec.msgpack.encode(value)


@schemathesis.deserializer("application/msgpack")
def unpacked(ctx, response):
    return msgspec.msgpack.decode(response.content)
