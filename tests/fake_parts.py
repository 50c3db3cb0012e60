"""Fakes of inference workers that share requests: one reads, the other decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from rollart.errors import GenerationError
from rollart.types import GenRequest, GenResult, Handoff
from tests.fakes import FakeInference, FakeStore


class FakeDecoder(FakeInference):
    """As `FakeInference`, for what follows a handoff; `used` lists (version of the KV, version held) of each taken."""

    def __init__(self, store: FakeStore, name: str = "inference-0", token_s: float = 0.1, num_tokens: int = 3) -> None:
        super().__init__(store, name, token_s)
        self.handoffs: list[Handoff] = []
        self.used: list[tuple[int, int]] = []
        self.decode_s = token_s
        self.total = num_tokens
        self.loses_kv = False

    async def decode(self, request: GenRequest, handoff: Handoff) -> GenResult:
        self._alive()
        if self.failing(request):
            raise GenerationError("the engine is out of KV memory")
        self.handoffs.append(handoff)
        held, versions = self.version, list(handoff.result.versions)
        if handoff.has_kv and handoff.version != held:
            return handoff.result
        received = 0
        if handoff.has_kv and not self.loses_kv:
            self.used.append((handoff.version, held))
            received = len(request.prompt) + len(versions) - 1 - handoff.start
        while len(versions) < self.total:
            await self._going.wait()
            await asyncio.sleep(self.decode_s)
            await self._going.wait()
            self._alive()
            if request.request_id in self.aborted:
                return answer(request, handoff.result, versions, "abort")
            if self.version != held:
                return answer(request, handoff.result, versions, "handoff", received)
            versions.append(held)
        return answer(request, handoff.result, versions, "stop", received)


class FakeReader(FakeInference):
    """Reads a prompt in `read_s`. `first`: the answer's length; 1 ends it here."""

    def __init__(self, store: FakeStore, name: str = "prefill-0", read_s: float = 0.1, total: int = 3) -> None:
        super().__init__(store, name)
        self.read_s, self.total = read_s, total
        self.read: list[tuple[str, int, int]] = []
        self.reading = 0
        self.has_kv: Callable[[GenRequest], bool] = lambda request: True

    async def prefill(self, request: GenRequest, so_far: GenResult, have: int) -> Handoff:
        self._alive()
        if self.failing(request):
            raise GenerationError("the engine is out of KV memory")
        self.read.append((request.request_id, len(so_far.tokens), have))
        self.reading += 1
        try:
            await self._going.wait()
            await asyncio.sleep(self.read_s)
            await self._going.wait()
        finally:
            self.reading -= 1
        self._alive()
        if request.request_id in self.aborted:
            return Handoff(replace(so_far, finish_reason="abort"))
        versions = [*so_far.versions, self.version]
        if len(versions) >= self.total:
            return Handoff(answer(request, so_far, versions, "stop"))
        result = answer(request, so_far, versions, "handoff")
        if not self.has_kv(request):
            return Handoff(result, version=self.version)
        return Handoff(result, version=self.version, start=have, address=f"fake:{self.name}")


def answer(request: GenRequest, before: GenResult, versions: list[int], reason: str, received: int = 0) -> GenResult:
    """Tokens 100, 101, ...; each second of work counts where it is done."""
    new = len(versions) - len(before.versions)
    return replace(
        before,
        tokens=list(range(100, 100 + len(versions))),
        logprobs=[-0.5] * len(versions),
        versions=versions,
        finish_reason=reason,
        prefill_s=before.prefill_s + (0.0 if received else 1.0),
        decode_s=before.decode_s + new,
        received_tokens=before.received_tokens + received,
    )
