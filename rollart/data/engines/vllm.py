"""vLLM as an engine: our command loop drives vLLM's engine inside this process, one step at a time.

The life of a request: `add` queues it here; a step hands it to vLLM as soon as one of the `slots` is free, and each
further step brings a token; it ends by the same rules as in the embedded engine, which vLLM is told where it cannot
know (stop strings). vLLM keeps keys and values by blocks of tokens, shares them among prompts that begin alike, also
after their requests have ended, and evicts those not used for longest.

Where another engine reads prompts, a request ends there with its first token, and the blocks that its step has left are
read at once; it comes here with them, and vLLM takes those that it does not have, unless blocks before them are gone.

To park a request is to take it out of vLLM and queue it again with the tokens that it has. All are parked before
weights are loaded, so that no key or value of older weights can be in use, and before anything is computed while the
engine is suspended, so that none moves.

Invariants (`check`): vLLM runs exactly the requests in `_seated`; every token has the version of the weights that were
whole when it was drawn; nothing is drawn from weights of which only a part arrived.
Left out: whatever touches vLLM (`vllm_core.py`, `vllm_weights.py`, `vllm_connector.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollart.data.engines.parameters import check_positions, of_checkpoint, vetted
from rollart.data.engines.request import Running, check_request, check_vocabulary, go_on_after, load_tokenizer
from rollart.data.engines.sampling import seed_of
from rollart.data.engines.stage_times import StageTimes
from rollart.data.engines.vllm_seam import Core, News, Parcel, start_here
from rollart.engine_options import COOLEST, HOTTEST
from rollart.errors import ConfigError, GenerationError, WeightsError, boundary
from rollart.protocols import Payload, Tensors
from rollart.types import EngineStats, FinishReason, GenRequest, GenResult, ParameterInfo

SCORED = "rollart/logprobs"
"""Id of the request by which log-probabilities are asked for."""


class VLLMEngine:
    """Implements `protocols.Engine` and `protocols.HandsOver`.

    `slots`, `max_model_tokens`, `seed`, `device`: as for every engine. `prefill_tokens`: most tokens computed in one
    step, at least one for each slot. `dtype`: of the weights and the cache, by default float32 on CPU and bfloat16
    elsewhere. `published_dtype`: of the weights that the trainer publishes; vLLM converts them. `enable_sleep_mode`:
    while suspended the device's memory is given back. `options`: further arguments of vLLM's `EngineArgs`, such as
    `gpu_memory_utilization`. `hands_over`: requests may be read here and decoded elsewhere, or the other way round.
    `start`: how vLLM is started, for tests.
    Raises ConfigError for what is not there or cannot be, GenerationError when vLLM does not start.
    """

    def __init__(
        self,
        model_folder: str,
        slots: int = 64,
        max_model_tokens: int = 1024,
        device: str = "cpu",
        seed: int = 0,
        prefill_tokens: int = 2048,
        dtype: str = "",
        published_dtype: str = "float32",
        enable_sleep_mode: bool = False,
        hands_over: bool = False,
        start: Callable[..., Core] | None = None,
        **options: Any,
    ) -> None:
        if slots < 1 or prefill_tokens < 1 or max_model_tokens < 2:
            raise ConfigError("vllm engine: needs slots and prefill_tokens >= 1, max_model_tokens >= 2")
        # One more than of requests, where the model has the positions, so that one of full length can be scored.
        self._longest = min(max_model_tokens + 1, check_positions(model_folder, max_model_tokens))
        self._own = {each.name: each for each in of_checkpoint(model_folder, published_dtype)}
        self._core = (start or start_here)(
            model_folder,
            max_requests=slots + 1,  # one more for log-probabilities
            max_tokens=self._longest,
            step_tokens=max(prefill_tokens, slots + 1),
            device=device,
            dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
            enable_sleep_mode=enable_sleep_mode,
            hands_over=hands_over,
            **options,
        )
        self._tokenizer = load_tokenizer(Path(model_folder) / "tokenizer.json")
        self._max_slots, self._max_model_tokens, self._seed = slots, max_model_tokens, seed
        self._sleeps, self._suspended = enable_sleep_mode, False
        self._version, self._broken, self._unclean = 0, "", False
        self._waiting: deque[Running] = deque()
        self._seated: dict[str, Running] = {}
        self._ended: list[GenResult] = []
        self._parcels: dict[str, Parcel] = {}
        self._left: dict[str, list[int]] = {}
        self._times = StageTimes()
        self._steps = self._generated_tokens = self._prefilled_tokens = 0
        self._cached_tokens = self._recomputed_tokens = self._received_tokens = 0
        self._busy_s = self._unclaimed_s = 0.0

    # ------------------------------------------------------------------------------------------------- commands
    def add(self, request: GenRequest) -> None:
        """Enqueue. Raises GenerationError when the request can never run."""
        check_request(request, self._max_model_tokens, self._core.vocabulary, self._tokenizer)
        temperature = request.sampling.temperature
        if temperature and not COOLEST <= temperature <= HOTTEST:
            raise GenerationError(f"temperature {temperature}: vLLM takes 0, or {COOLEST} to {HOTTEST:g}")
        name = request.request_id
        if name in self._seated or any(each.request.request_id == name for each in self._waiting):
            raise GenerationError(f"request {name}: this id is already running")
        self._waiting.append(Running(request, self._max_model_tokens, self._tokenizer))

    def abort(self, request_id: str) -> GenResult | None:
        """Cancel a request and free its keys and values; the partial result, or None when it is not here."""
        self._parcels.pop(request_id, None)
        running = self._seated.pop(request_id, None)
        if running is not None:
            self._core.abort([request_id])
            return running.result("abort")
        for running in self._waiting:
            if running.request.request_id == request_id:
                self._waiting.remove(running)
                return running.result("abort")
        return None

    @property
    def grain(self) -> int:
        """Tokens of a block: keys and values are kept, and leave, in whole blocks."""
        return self._core.block_tokens

    def add_prefill(self, request: GenRequest, so_far: GenResult) -> None:
        """Enqueue a request that ends with the token after `so_far`."""
        self._add_after(request, so_far).hands_over = True

    def add_decode(self, request: GenRequest, so_far: GenResult, start: int, payload: Payload | None) -> None:
        """Enqueue a request that goes on after `so_far`, with the keys and values in `payload`."""
        end = len(request.prompt) + len(so_far.tokens) - 1
        parcel = None if payload is None else self._parcel(start, end, payload)
        self._add_after(request, so_far)
        if parcel is not None:
            self._parcels[request.request_id] = parcel

    def payload(self, request: GenRequest, so_far: GenResult, start: int) -> Payload | None:
        """Keys and values of a request that the last step has ended, else the whole blocks that are still kept."""
        tokens = request.prompt + so_far.tokens
        blocks = self._left.get(request.request_id) or self._core.cached(tokens)
        first, last = start // self.grain, -(-(len(tokens) - 1) // self.grain)
        return self._core.read(blocks[first:last]) if len(blocks) > first else None

    def kept(self, request: GenRequest, so_far: GenResult) -> int:
        """Of how many of the request's first tokens vLLM keeps blocks; at least one token is left to come."""
        tokens = request.prompt + so_far.tokens
        return min(len(self._core.cached(tokens)), (len(tokens) - 2) // self.grain) * self.grain

    def _add_after(self, request: GenRequest, so_far: GenResult) -> Running:
        self.add(request)
        return go_on_after(self._waiting, so_far)

    def _parcel(self, start: int, end: int, payload: Payload) -> Parcel:
        num_blocks, odd = divmod(memoryview(payload).nbytes, self._core.block_bytes)
        end = min(end, start + num_blocks * self.grain)
        if odd or start % self.grain or num_blocks != -(-(end - start) // self.grain):
            raise GenerationError(
                f"keys and values came as {memoryview(payload).nbytes} bytes, but a block of {self.grain} tokens has "
                f"{self._core.block_bytes}: the engine that computed them has another model or dtype"
            )
        return Parcel(start, end, bytearray(payload) if memoryview(payload).readonly else payload)

    def release(self, trajectory_id: str) -> None:
        """Nothing to do: what trajectories leave behind counts as free, and vLLM takes it when it needs the room."""

    def suspend(self) -> None:
        """No step advances until `resume`."""
        if self._sleeps and not self._suspended:
            self._park()
            self._core.sleep()
        self._suspended = True

    def resume(self) -> None:
        """Let steps advance again."""
        if self._sleeps and self._suspended:
            self._core.wake()
        self._suspended = False

    def update(self, version: int, tensors: Tensors) -> None:
        """Load weights in place; the cache is emptied; running requests queue first and are computed again.

        Raises WeightsError: with nothing changed where the first tensor does not fit, or any of those that lie ready in
        a list; else, as when a stream breaks off, nothing is generated until an update succeeds.
        """
        pairs = vetted(self._own, tensors)
        first = next(pairs)
        self._parcels.clear()
        self._recomputed_tokens += sum(running.computed for running in self._seated.values())
        self._park()
        if self._sleeps and self._suspended:
            self._core.wake(weights_only=True)
        try:
            with boundary(WeightsError, f"loading version {version} into vLLM"):
                self._core.load(itertools.chain([first], pairs))
                self._core.forget()
        except WeightsError as error:
            self._broken = f"the weights are no longer whole, since version {version} was not: {error}"
            raise
        self._version, self._broken = version, ""

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token given those before it, from no cache; length len(tokens) - 1.

        Requests that run go on meanwhile, unless the engine is suspended. Raises GenerationError.
        """
        if not tokens:
            raise GenerationError("logprobs of no tokens")
        check_vocabulary(tokens, self._core.vocabulary)
        if len(tokens) >= self._longest:
            raise GenerationError(f"logprobs of {len(tokens)} tokens: vLLM takes {self._longest - 1} at most here")
        if len(tokens) == 1:
            return []
        if not self._suspended:
            return self._score(tokens)
        self._park()
        if not self._sleeps:
            return self._score(tokens)
        self._core.wake()
        try:
            return self._score(tokens)
        finally:
            self._core.sleep()

    def _score(self, tokens: Sequence[int]) -> list[float]:
        self._clean()
        self._core.score(SCORED, list(tokens))
        try:
            while not (scores := self._advance()):
                pass
        finally:
            self._core.abort([SCORED])
        return scores

    def forget(self) -> None:
        """Empty the prefix cache; what runs is computed again."""
        self._park()
        self._core.forget()

    def parameters(self) -> list[ParameterInfo]:
        """Names and shapes that `update` expects: those of the checkpoint, whatever vLLM fuses."""
        return list(self._own.values())

    # ----------------------------------------------------------------------------------------------------- steps
    def has_work(self) -> bool:
        """Whether `step` would advance anything now."""
        return not self._suspended and bool(self._seated or self._waiting or self._ended)

    def step(self) -> list[GenResult]:
        """One step of vLLM; the requests that ended since the last."""
        if not self.has_work():
            return []
        self._clean()
        self._seat()
        if self._seated and not self._ended:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def _seat(self) -> None:
        """Hand waiting requests to vLLM while there are free slots."""
        while self._waiting and len(self._seated) < self._max_slots:
            running = self._waiting.popleft()
            request = running.request
            seed = seed_of(self._seed, request.trajectory_id) + len(running.tokens)
            left = 1 if running.hands_over else running.limit - len(running.tokens)
            hands = running.hands_over, self._parcels.get(request.request_id)
            self._seated[request.request_id] = running
            running.queue_s = running.queue_s or time.perf_counter() - running.added_s
            try:
                self._core.add(request.request_id, list(running.tokens), request.sampling, left, seed, *hands)
            except Exception as error:  # it is refused, which is no other request's affair
                self._end(running, "error", f"vLLM refuses the request: {error}")

    def _park(self) -> None:
        """Take all requests out of vLLM; they queue first, with the tokens that they have."""
        self._core.abort(list(self._seated))
        for name, running in self._seated.items():
            running.computed = 0
            self._parcels.pop(name, None)
        self._waiting.extendleft(reversed(self._seated.values()))
        self._seated, self._left = {}, {}

    def _clean(self) -> None:
        """After something that is not finite: vLLM's kernels would mix it into whatever gets its place in memory."""
        if self._unclean:
            self._park()
            self._core.forget(clean=True)
            self._unclean = False

    def _advance(self) -> list[float]:
        """One step of vLLM; the log-probabilities that were asked for, once they are there."""
        if self._broken:
            raise GenerationError(self._broken)
        began = time.perf_counter()
        news = self._core.step()
        self._left = {each.request_id: each.left for each in news if each.left}
        self._charge(time.perf_counter() - began, [each for each in news if each.request_id in self._seated])
        scores: list[float] = []
        stopped: list[str] = []
        for each in news:
            if each.request_id == SCORED:
                scores = each.scores
                self._unclean |= not all(map(math.isfinite, scores))
            elif (running := self._seated.get(each.request_id)) and self._take(running, each) and not each.ended:
                stopped.append(each.request_id)
        self._core.abort(stopped)
        self._steps += 1
        return scores

    def _charge(self, seconds: float, news: list[News]) -> None:
        """Share a step's time among its requests; that of steps without any token goes to the next one with some."""
        rows = [
            (running, self._num_read(running, each)) for each in news for running in [self._seated[each.request_id]]
        ]
        self._unclaimed_s += seconds
        if not rows:
            return
        decoding = [running for running, num_read in rows if not num_read]
        self._times.charge(self._unclaimed_s, decoding, [row for row in rows if row[1]])
        self._busy_s += self._unclaimed_s
        self._unclaimed_s = 0.0

    def _take(self, running: Running, news: News) -> bool:
        """Append what a step brought; whether the request has ended with it."""
        if not running.computed:
            received = parcel.num_tokens if (parcel := self._parcels.pop(news.request_id, None)) else 0
            running.received += received
            self._received_tokens += received
            self._prefilled_tokens += self._num_read(running, news)
            self._cached_tokens += news.cached - received
            running.cached = running.cached if running.versions else news.cached
        for token, logprob in zip(news.tokens, news.logprobs, strict=True):
            if not math.isfinite(logprob):
                self._unclean = True
                return self._end(running, "error", f"logits of version {self._version} are not finite")
            self._generated_tokens += 1
            if reason := running.accept(token, logprob, self._version):
                return self._end(running, reason)
        running.computed = len(running.tokens) - 1
        return bool(news.ended) and self._end(running, "error", f"vLLM ended the request: {news.ended}")

    def _num_read(self, running: Running, news: News) -> int:
        """Tokens that a step has read of a request; one that lacked but the last that was drawn, it decoded."""
        num_new = len(running.tokens) - news.cached
        return 0 if running.computed or (num_new == 1 and running.versions) else num_new

    def _end(self, running: Running, reason: FinishReason, error: str = "") -> bool:
        del self._seated[running.request.request_id]
        self._ended.append(running.result(reason, error))
        return True

    # ----------------------------------------------------------------------------------------------------- state
    def stats(self) -> EngineStats:
        """Counters since the start. `kv_tokens`: of running requests; what is left of others counts as free."""
        return EngineStats(
            version=self._version,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            received_tokens=self._received_tokens,
            running=len(self._seated),
            waiting=len(self._waiting),
            kv_tokens=sum(running.computed for running in self._seated.values()),
            suspended=self._suspended,
        )

    def check(self) -> None:
        """Assert the invariants."""
        assert self._core.num_requests == len(self._seated) <= self._max_slots
        assert all(0 <= each.computed < len(each.tokens) < each.limit for each in self._seated.values())
        assert all(each.computed == 0 for each in self._waiting)
        assert self._parcels.keys() <= self._seated.keys() | {each.request.request_id for each in self._waiting}
        waiting = {each.request.request_id for each in self._waiting}
        assert len(waiting) == len(self._waiting)
        assert not waiting & set(self._seated)
