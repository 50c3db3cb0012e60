"""`thread://module:function`: calls on threads of this process. Nothing starts and nothing is isolated.

For debugging, and for a run in one process (`runtime = "inline"`). A call that never returns keeps its thread.
"""

from __future__ import annotations

import msgspec

from rollart.data.serverless.endpoint import Answer, Capacity, EndpointOptions, Media
from rollart.data.serverless.handler import make_handler
from rollart.data.serverless.lanes import Lanes
from rollart.data.targets import named
from rollart.resource.devices import detect


class ThreadEndpoint:
    """`Endpoint` over threads of this process."""

    media: Media = "msgpack"
    remote = False

    def __init__(self, url: str, options: EndpointOptions) -> None:
        self.concurrency = options.max_concurrency or detect().num_cores
        self._handler = make_handler(named(url.partition("://")[2], url), options.arguments)
        self._lanes = Lanes(url)

    def capacity(self) -> Capacity:
        """Nothing of its own."""
        return Capacity()

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:  # noqa: ARG002 - delivered once anyway
        """Run one call on a free thread."""
        return Answer(await self._lanes.run(timeout_s, self._run, body))

    def _run(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._handler(msgspec.msgpack.decode(body), None))

    async def close(self) -> None:
        """End the idle threads."""
        self._lanes.end()
