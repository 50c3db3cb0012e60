"""Prefill apart from decoding: the two kinds of inference worker that share a request (paper section 6).

    PrefillWorker   reads a prompt and gives the next token; hands the keys and values over
    DecodeWorker    takes them, and generates the rest

Keys and values go from worker to worker, only those of tokens that the worker which decodes does not keep from the
trajectory's earlier turns: through a file in shared memory (`parcels.py`), or, where the two share none or more is
missing than was believed, over a connection of their own. What an engine says in very few bytes, such as where its
peer may fetch them by itself, travels with the request.

Invariants: keys and values of one version of the weights are used under that version alone; a request that loses them
by an update goes back to be read again. An abort leaves nothing behind, at whatever stage. Without keys and values, for
whatever reason, the worker that decodes reads the tokens itself.
What this file leaves out: who reads and who decodes (`control/prefill.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from rollart.data.engines import EngineFactory
from rollart.data.inference import InferenceWorker
from rollart.data.parcels import Parcels
from rollart.data.peers import connect
from rollart.errors import ConfigError, WorkerDied
from rollart.protocols import Engine, HandsOver, Payload, WeightStore, WorkerHandle
from rollart.types import GenRequest, GenResult, Handoff

log = logging.getLogger(__name__)

TICKET_BYTES = 1024
"""Payloads up to here travel with the request."""


class PrefillWorker(InferenceWorker):
    """Reads for others. `parcels`: a folder in shared memory, "" where the workers have none in common.

    Raises ConfigError for an engine that cannot hand over.
    """

    def __init__(
        self,
        model_folder: str,
        engine: str | EngineFactory,
        engine_options: Mapping[str, Any],
        store: WeightStore,
        parcels: str = "",
    ) -> None:
        super().__init__(model_folder, engine, engine_options, store)
        self._hands = _handing_over(self._engine)
        self._parcels = Parcels(parcels)
        self._address = ""
        self._reading: dict[str, tuple[GenRequest, int]] = {}
        self._read: dict[str, Handoff] = {}

    async def listen_at(self, address: str) -> None:
        """Where workers that decode can ask for more (`fetch`)."""
        self._address = address

    async def prefill(self, request: GenRequest, so_far: GenResult, have: int) -> Handoff:
        """The token after `so_far`, and the keys and values of those that the decoding worker lacks when it has `have`.

        Returns when there is one, or the request was aborted. Raises GenerationError.
        """
        name = request.request_id
        self._hands.add_prefill(request, so_far)
        self._reading[name] = request, have
        try:
            result = await self._outcome(name)
            return self._read.pop(name, None) or Handoff(result)
        except asyncio.CancelledError:
            self._read.pop(name, None)
            self._parcels.drop(name)
            raise
        finally:
            self._reading.pop(name, None)

    async def fetch(self, request: GenRequest, so_far: GenResult, start: int, version: int) -> bytes:
        """Keys and values from token `start` on, under a version; nothing when they are not kept any more."""
        if version != self._engine.stats().version:
            return b""
        return bytes(self._hands.payload(request, so_far, start) or b"")

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests, and remove what was left for another worker to take."""
        await super().abort(request_ids)
        for request_id in request_ids:
            self._parcels.drop(request_id)

    def _resolve(self, result: GenResult) -> None:
        """Before anything else can happen to its keys and values, a request that was read leaves them behind."""
        asked = self._reading.get(result.request_id)
        if asked is not None and result.finish_reason == "handoff":
            self._read[result.request_id] = self._hand_over(*asked, result)
        super()._resolve(result)

    def _hand_over(self, request: GenRequest, have: int, result: GenResult) -> Handoff:
        grain = self._hands.grain
        start = min(have, len(request.prompt) + len(result.tokens) - 1) // grain * grain
        payload, version = self._hands.payload(request, result, start), result.versions[-1]
        if payload is None:
            return Handoff(result, version)
        small = len(payload) <= TICKET_BYTES
        return Handoff(
            result,
            version,
            start=start,
            in_file=not small and self._parcels.put(request.request_id, payload),
            ticket=bytes(payload) if small else b"",
            address=self._address,
        )


class DecodeWorker(InferenceWorker):
    """Generates what follows. `parcels`: as that of the workers that read.

    Raises ConfigError for an engine that cannot be handed over to.
    """

    def __init__(
        self,
        model_folder: str,
        engine: str | EngineFactory,
        engine_options: Mapping[str, Any],
        store: WeightStore,
        parcels: str = "",
    ) -> None:
        super().__init__(model_folder, engine, engine_options, store)
        self._hands = _handing_over(self._engine)
        self._parcels = Parcels(parcels)
        self._arriving: set[str] = set()
        self._decoding: set[str] = set()
        self._peers: dict[str, WorkerHandle] = {}
        self._connecting = asyncio.Lock()

    async def shutdown(self) -> None:
        """Stop stepping, fail whatever is still running, leave the other workers."""
        await super().shutdown()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                await peer.stop()
        self._peers.clear()

    async def decode(self, request: GenRequest, handoff: Handoff) -> GenResult:
        """ADD what another worker has read; returns when the request has finished or was aborted.

        It goes back, with finish_reason "handoff", when its keys and values are of other weights than the engine's now,
        or become so. Raises GenerationError.
        """
        name, so_far = request.request_id, handoff.result
        self._arriving.add(name)
        try:
            start, payload = await self._arrived(request, handoff)
            if name not in self._arriving:
                return replace(so_far, finish_reason="abort")
        finally:
            self._arriving.discard(name)
        if handoff.has_kv and handoff.version != self._engine.stats().version:
            return so_far
        self._hands.add_decode(request, so_far, start, payload)
        self._decoding.add(name)
        try:
            return await self._outcome(name)
        finally:
            self._decoding.discard(name)

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests, those too whose keys and values are still on their way."""
        for request_id in request_ids:
            self._arriving.discard(request_id)
            self._parcels.drop(request_id)
        await super().abort(request_ids)

    def _updated(self) -> None:
        """All keys and values are stale: who came here to be decoded is read again elsewhere."""
        for name in list(self._decoding):
            if (result := self._engine.abort(name)) is not None:
                self._resolve(replace(result, finish_reason="handoff"))

    async def _arrived(self, request: GenRequest, handoff: Handoff) -> tuple[int, Payload | None]:
        """The keys and values of a request, and from which token on: what is here already is asked of nobody."""
        parcel = self._parcels.take(request.request_id)  # also one that an earlier attempt has left
        if not handoff.has_kv or handoff.version != self._engine.stats().version:
            return 0, None
        start = self._hands.kept(request, handoff.result)
        if start == len(request.prompt) + len(handoff.result.tokens) - 1:
            return start, b""
        if handoff.start <= start:
            if handoff.ticket:
                return handoff.start, bytearray(handoff.ticket)
            if handoff.in_file and parcel is not None:
                return handoff.start, parcel
        return start, await self._asked_for(request, handoff, start) or None

    async def _asked_for(self, request: GenRequest, handoff: Handoff, start: int) -> bytearray:
        """From the worker that has read the request; nothing when it is gone, or has them no longer."""
        address = handoff.address
        if not address:
            return bytearray()
        arguments = request, handoff.result, start, handoff.version
        try:
            async with self._connecting:
                if address not in self._peers:
                    self._peers[address] = await connect("prefill", address)
            return bytearray(await self._peers[address].call("fetch", *arguments, returns=bytearray))
        except WorkerDied as error:
            log.warning("request %s: its keys and values did not come: %s", request.request_id, error)
            if (peer := self._peers.pop(address, None)) is not None:
                await peer.stop()
            return bytearray()


PARTS = MappingProxyType({"prefill": PrefillWorker, "decode": DecodeWorker})
"""What each is called in `roles.py`."""


def _handing_over(engine: Engine) -> HandsOver:
    if isinstance(engine, HandsOver):
        return engine
    raise ConfigError(
        f"roles.prefill: {type(engine).__name__} cannot hand keys and values from one worker to another; take engine "
        '"embedded" or "vllm", or leave the table out'
    )
