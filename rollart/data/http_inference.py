"""An inference worker in front of a server that runs already, of vLLM or of SGLang.

The life of a request: it waits for one of the `slots` and for the engine to be resumed, and is sent; what comes back is
taken token by token, by the same rules as in the embedded engine. SUSPEND ends whatever the server is generating: the
tokens so far come back, and after RESUME the request is sent again from there. So no token can be older than it says,
and keys and values are always those of the weights in force.

Weights go through files in `weights_folder`, which the server must be able to read: written while generation goes on,
read by the server at the UPDATE, then removed.

A server that does not answer, or is not the one that the weights were loaded into, is lost: calls raise WorkerDied, the
worker is ended, and its successor waits for the server and loads the weights of then.

Invariants: every accepted `generate` ends exactly once; between SUSPEND and RESUME no call that generates is under way;
every token has the version that the server held when it was sent for, and says that it held when it was generated: what
a worker loads has a name that nobody else gives.
Left out: the server's life, which is its owner's business, and who replaces a worker (`workers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import safetensors.torch

from rollart.checks import nearest
from rollart.data.engines.parameters import INDEX, check_positions, config_of, of_checkpoint, read_checkpoint, vetted
from rollart.data.engines.request import Running, check_request, check_vocabulary, load_tokenizer
from rollart.data.engines.sampling import seed_of
from rollart.data.http_servers import SERVERS, Answer, Server, Wire, check_answer
from rollart.data.stores.bucket import in_buckets
from rollart.data.weights_folder import SHARED_MEMORY, WeightsFolder, sweep_stale
from rollart.errors import ConfigError, GenerationError, ServerAway, WeightsError, WorkerDied, boundary
from rollart.protocols import Tensors, WeightStore
from rollart.types import EngineStats, FinishReason, GenRequest, GenResult, ParameterInfo

BUCKET_BYTES = 1 << 30
"""Of one file of weights."""
MAX_EMPTY = 3
"""Answers in a row without a token to one request, while the engine is not suspended."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between two looks for a server that is away."""
SMALL = (".json", ".jinja", ".txt", ".model")
"""What a model's folder holds besides its weights."""


class Flight:
    """One request: its tokens, its call while it is on the server, and whether it was ended; `wake`: it may act.

    `num_empty`: answers in a row that had no token.
    """

    def __init__(self, running: Running) -> None:
        self.running, self.wake, self.aborted = running, asyncio.Event(), False
        self.call: asyncio.Task[Answer] | None = None
        self.num_empty = 0


class HTTPInference:
    """What lives in an inference process where `engine = "http"`. Has the methods of `InferenceWorker`.

    `store`: None where every version has the weights of `model_folder`, which a server need not hold.
    `url`, `kind`: the server's; `token_env`: environment variable with its bearer token; `timeout_s`: of one call;
    `slots`, `max_model_tokens`, `seed`, `published_dtype`: as of the vLLM engine; `weights_folder`: a folder that this
    process writes and the server reads, by default shared memory. `patience_s`: in which a server that was told to end
    a request answers, unless the request reached it later than that. `away_s`: how long `start` waits for a server.
    Raises ConfigError.
    """

    def __init__(
        self,
        model_folder: str,
        store: WeightStore | None,
        url: str,
        kind: str,
        slots: int = 64,
        max_model_tokens: int = 1024,
        seed: int = 0,
        token_env: str = "",
        timeout_s: float = 600.0,
        published_dtype: str = "float32",
        weights_folder: str = str(SHARED_MEMORY),
        patience_s: float = 10.0,
        away_s: float = 300.0,
    ) -> None:
        if kind not in SERVERS:
            raise ConfigError(f"engine_options.kind: {kind!r} is no kind of server{nearest(kind, list(SERVERS))}")
        check_positions(model_folder, max_model_tokens)
        self._server: Server = SERVERS[kind](Wire(url, token_env, timeout_s))
        self._url, self._store, self._seed, self._slots, self._patience_s = url, store, seed, slots, patience_s
        self._away_s, self._lost, self._losing = away_s, "", asyncio.Event()
        self._model_folder, self._max_model_tokens = Path(model_folder), max_model_tokens
        self._own = {each.name: each for each in of_checkpoint(model_folder, published_dtype)}
        self._tokenizer = load_tokenizer(self._model_folder / "tokenizer.json")
        self._vocabulary: int = config_of(model_folder)["vocab_size"]
        if not Path(weights_folder).is_dir():
            raise ConfigError(f"engine_options.weights_folder: no folder {weights_folder!r}")
        sweep_stale(Path(weights_folder))
        self._folder = WeightsFolder(Path(weights_folder), "served")
        self._flights: dict[str, Flight] = {}
        self._num_sent, self._landed = 0, asyncio.Event()
        self._suspended, self._version, self._broken = False, 0, ""
        self._own_name, self._loaded = f"rollart-{secrets.token_hex(4)}", ""
        self._writing: tuple[int, asyncio.Task[list[Path]]] | None = None
        self._generated_tokens = self._prefilled_tokens = self._cached_tokens = self._recomputed_tokens = 0
        self._num_calls, self._busy_s, self._busy_since = 0, 0.0, 0.0

    async def start(self) -> None:
        """Wait for the server, which is asked again and again, ever less often. Raises ServerAway."""
        end, pause_s = time.monotonic() + self._away_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._server.alive()
            except GenerationError as error:
                if time.monotonic() + pause_s > end:
                    raise ServerAway(str(error)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def wait_lost(self) -> str:
        """Why this worker is of no use any more, once its server is lost."""
        await self._losing.wait()
        return self._lost

    async def shutdown(self) -> None:
        """End what is still running there, and leave nothing behind."""
        self._broken = "the inference worker is closing"
        for flight in self._flights.values():
            flight.wake.set()
            if flight.call is not None:
                flight.call.cancel()
        if self._writing is not None:
            self._writing[1].cancel()
        if self._suspended and not self._lost:
            with contextlib.suppress(GenerationError):  # it is away
                await self._server.leave()
        await self._server.close()
        self._folder.close()

    # ------------------------------------------------------------------------------------------------ generation
    async def generate(self, request: GenRequest) -> GenResult:
        """ADD; returns when the request has finished or was aborted. Raises GenerationError, WorkerDied."""
        self._check(request)
        flight = Flight(Running(request, self._max_model_tokens, self._tokenizer))
        self._flights[request.request_id] = flight
        try:
            while (ended := await self._turn(flight)) is None:
                pass
            return ended
        finally:
            del self._flights[request.request_id]

    def _check(self, request: GenRequest) -> None:
        check_request(request, self._max_model_tokens, self._vocabulary, self._tokenizer)
        sampling = request.sampling
        if self._server.refused and sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            raise GenerationError(f"request {request.request_id}: {self._server.refused}")
        if request.request_id in self._flights:
            raise GenerationError(f"request {request.request_id}: this id is already running")

    async def _turn(self, flight: Flight) -> GenResult | None:
        """Send a request once it may go; its result, or None when it is to be sent again."""
        running = flight.running
        while not (flight.aborted or self._broken or self._lost) and (self._suspended or self._num_sent >= self._slots):
            flight.wake.clear()
            await flight.wake.wait()
        if flight.aborted:
            return running.result("abort")
        if self._lost:
            raise WorkerDied(self._lost)
        if self._broken:
            raise GenerationError(self._broken)
        answer = await self._send(flight)
        if answer.weights and self._loaded not in ("", answer.weights):
            raise self._lose(
                f"{self._url} generated with weights {answer.weights!r}, not {self._loaded!r}; was it started again, "
                "or does another run use it?"
            )
        flight.num_empty = 0 if answer.tokens or self._suspended else flight.num_empty + 1
        if flight.num_empty > MAX_EMPTY and not flight.aborted:
            raise GenerationError(
                f"{self._url} ended request {running.request.request_id} {flight.num_empty} times in a row without a "
                "token, though nobody asked it to; does somebody else end its requests?"
            )
        reason, error = self._take(running, answer)
        if reason is None and not _is_given_up(flight):
            return None
        return running.result(reason or "abort", error)

    async def _send(self, flight: Flight) -> Answer:
        """One call; nothing where it was cancelled, which ends the request on the server."""
        now = time.perf_counter()
        flight.running.queue_s = flight.running.queue_s or now - flight.running.added_s
        self._busy_since = self._busy_since if self._num_sent else now
        self._num_sent, self._num_calls = self._num_sent + 1, self._num_calls + 1
        flight.call = call = asyncio.create_task(self._generate(flight.running))
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()  # whoever asked has gone, or it is done
            self._land(flight)
        return Answer([], [], "abort") if call.cancelled() else call.result()

    async def _generate(self, running: Running) -> Answer:
        request, left = running.request, running.limit - len(running.tokens)
        seed = seed_of(self._seed, request.trajectory_id)
        async with self._asking():
            answer = await self._server.generate(request.request_id, running.tokens, request.sampling, left, seed)
            check_answer(answer, self._vocabulary, left)
            return answer

    def _land(self, flight: Flight) -> None:
        """A call has come back: there is room for others."""
        flight.call, self._num_sent = None, self._num_sent - 1
        if not self._num_sent:
            self._busy_s += time.perf_counter() - self._busy_since
        self._landed.set()
        self._wake_next()

    def _wake_next(self) -> None:
        """Those that have waited longest, as many as there is room for."""
        waiting = (flight for flight in self._flights.values() if flight.call is None)
        for flight in itertools.islice(waiting, self._slots - self._num_sent):
            flight.wake.set()

    def _take(self, running: Running, answer: Answer) -> tuple[FinishReason | None, str]:
        """Append what came, up to where the request ends; None when the server was told to end it."""
        if answer.tokens:
            self._prefilled_tokens += len(running.tokens) - answer.cached
            self._cached_tokens += answer.cached
            running.cached = running.cached if running.versions else answer.cached
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            if logprob is None or not math.isfinite(logprob):
                return "error", f"logits of version {self._version} are not finite"
            self._generated_tokens += 1
            running.computed = len(running.tokens)
            if reason := running.accept(token, logprob, self._version):
                return reason, ""
        return (None if answer.ended == "abort" else answer.ended), ""

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """What is asked of the server. Raises GenerationError, or WorkerDied where it failed and does not answer."""
        try:
            with boundary(GenerationError, f"the answer of {self._url}"):
                yield
        except GenerationError as error:
            try:
                await self._server.alive()
            except GenerationError:
                raise self._lose(str(error)) from error
            raise

    def _lose(self, reason: str) -> WorkerDied:
        """This worker is of no use any more; whatever waits in it goes elsewhere."""
        self._lost = self._lost or reason
        self._losing.set()
        for flight in self._flights.values():
            flight.wake.set()
        return WorkerDied(self._lost)

    # -------------------------------------------------------------------------------------------------- commands
    async def abort(self, request_ids: list[str]) -> None:
        """Cancel requests; each `generate` returns its partial result. Unknown ids are ignored."""
        for request_id in request_ids:
            if (flight := self._flights.get(request_id)) is not None:
                flight.aborted = True
                flight.wake.set()
                if flight.call is not None:
                    async with self._asking():
                        await self._server.abort(request_id)
                    await self._answered([flight.call])

    async def release(self, trajectory_ids: list[str]) -> None:
        """Nothing to do: the server gives up what was not used for longest."""

    async def suspend(self) -> None:
        """No request advances until `resume`; returns once what the server had is here."""
        self._suspended = True
        async with self._asking():
            await self._server.pause()
        await self._answered([flight.call for flight in self._flights.values() if flight.call is not None])
        while self._num_sent:
            self._landed.clear()
            await self._landed.wait()

    async def _answered(self, calls: list[asyncio.Task[Answer]]) -> None:
        """Wait for calls whose requests were ended; those that are not answered in time are given up."""
        if calls:
            _, late = await asyncio.wait(calls, timeout=self._patience_s)
            for call in late:
                call.cancel()

    async def resume(self) -> None:
        """Let requests advance again."""
        async with self._asking():
            await self._server.go_on()
        self._suspended = False
        self._wake_next()

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first. Raises GenerationError."""
        if not tokens:
            raise GenerationError("logprobs of no tokens")
        check_vocabulary(tokens, self._vocabulary)
        if len(tokens) == 1:
            return []
        if not self._suspended:
            async with self._asking():
                return await self._server.logprobs(tokens)
        async with self._asking():
            await self._server.go_on()  # requests wait here, not there
            try:
                return await self._server.logprobs(tokens)
            finally:
                await self._server.pause()

    async def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes that `update` expects: those of the checkpoint."""
        return list(self._own.values())

    async def forget(self) -> None:
        """Empty the server's prefix cache."""
        async with self._asking():
            await self._server.forget()

    async def stats(self) -> EngineStats:
        """Counters as seen from here: `steps` are calls, `busy_s` the time with a call under way."""
        return EngineStats(
            version=self._version,
            busy_s=self._busy_s + (time.perf_counter() - self._busy_since if self._num_sent else 0.0),
            steps=self._num_calls,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            running=self._num_sent,
            waiting=len(self._flights) - self._num_sent,
            suspended=self._suspended,
        )

    # --------------------------------------------------------------------------------------------------- weights
    async def prefetch(self, version: int) -> None:
        """Write a published version where the server can read it, while generation goes on. Raises WeightsError."""
        await self._written(version)

    async def update(self, version: int) -> int:
        """Let the server load a version, prefetched or not; requests advance no further meanwhile. The version held.

        Raises WeightsError: with nothing changed when the weights are missing or do not fit; else nothing is generated
        until an update succeeds.
        """
        files = await self._written(version)
        self._writing = None
        suspended = self._suspended
        try:
            if not suspended:
                await self.suspend()
            await self._load(version, files)
        finally:
            shutil.rmtree(files[0].parent, ignore_errors=True)
            if not suspended:
                await self.resume()
        return self._version

    async def _load(self, version: int, files: list[Path]) -> None:
        name = f"{self._own_name}/{version}"
        try:
            async with self._asking():
                await self._server.load(name, files)
        except GenerationError as error:
            self._broken = (
                f"{self._url} may not hold the weights of one version, since loading {version} failed: {error}"
            )
            raise WeightsError(self._broken) from error
        self._version, self._loaded, self._broken = version, name, ""
        for flight in self._flights.values():
            self._recomputed_tokens += flight.running.computed
            flight.running.computed = 0

    async def _written(self, version: int) -> list[Path]:
        """The files of a version: those being written already, or written now."""
        if self._writing is None or self._writing[0] != version:
            self._writing = version, asyncio.create_task(asyncio.to_thread(self._write, version))
        task = self._writing[1]
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._writing is not None and self._writing[1] is task:
                self._writing = None
            raise

    def _write(self, version: int) -> list[Path]:
        place = self._folder.path / f"v{version}"
        try:
            with boundary(WeightsError, f"writing version {version} into {place}"):
                return write_checkpoint(place, self._model_folder, vetted(self._own, self._tensors(version)))
        except WeightsError:
            shutil.rmtree(place, ignore_errors=True)
            raise

    def _tensors(self, version: int) -> Tensors:
        if self._store is None:
            return read_checkpoint(str(self._model_folder), self._own)
        return self._store.fetch(version)


def write_checkpoint(place: Path, model_folder: Path, tensors: Tensors) -> list[Path]:
    """A folder in Hugging Face format: a model's small files, and other weights. The files of these."""
    place.mkdir()
    for file in model_folder.iterdir():
        if file.suffix in SMALL and file.name != INDEX:
            shutil.copyfile(file, place / file.name)
    files: list[Path] = []
    names: dict[str, str] = {}
    for bucket in in_buckets(tensors, BUCKET_BYTES):
        files.append(place / f"model-{len(files):05d}.safetensors")
        whole = {name: tensor.contiguous() for name, tensor in bucket.items()}
        safetensors.torch.save_file(whole, files[-1], metadata={"format": "pt"})
        names |= dict.fromkeys(whole, files[-1].name)
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    return files


def _is_given_up(flight: Flight) -> bool:
    """Asked again: it may have changed while a call was under way."""
    return flight.aborted
