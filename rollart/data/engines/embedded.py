"""Continuous batching over any Hugging Face causal LM with full attention: the default engine, on CPU or one GPU.

The life of a request: `add` queues it; the next step gives it a slot with what its trajectory's last turn left behind,
or with a copy of what another request that begins alike has, and computes the rest of its prompt, while the others go
on decoding in the same pass; each later step adds one token; when it ends, its keys and values are kept for the
trajectory's next turn and its slot is closed up. Of requests that come together and begin alike, as the members of a
group do, one computes the prompt and the others wait for it. Where another engine computes prompts, a request ends
there with its first token and comes here with its keys and values, as far as they are not kept here.

Invariants (`check`): `_rows[i]` owns slot i, without gaps; the first `_num_decoding` rows have exactly one token to
compute, the others are still being prefilled; no keys or values survive an `update`.
Left out: preemption (a slot always has room up to `max_model_tokens`), speculation, several devices.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollart.data.engines.attention import Work, plan
from rollart.data.engines.causal_lm import CausalLM
from rollart.data.engines.prefixes import Kept, Prefixes, most_alike
from rollart.data.engines.request import Arrived, Running, check_request, check_vocabulary, go_on_after, load_tokenizer
from rollart.data.engines.sampling import Sampler
from rollart.data.engines.slots import Slots
from rollart.data.engines.stage_times import StageTimes
from rollart.errors import ConfigError, GenerationError, boundary
from rollart.protocols import Payload, Tensors
from rollart.sections import LoraConfig
from rollart.types import EngineStats, FinishReason, GenRequest, GenResult, ParameterInfo, Sampling

SHORTEST = 16
"""The self-check needs this many tokens."""


class EmbeddedEngine:
    """Implements `protocols.Engine` and `protocols.HandsOver`.

    `slots`: requests that run at once. `max_model_tokens`: longest sequence, prompt and generated. `prefill_tokens`:
    most prompt tokens, padding included, computed in one step. `kept_tokens`: most tokens kept for trajectories between
    turns, default half of `slots * max_model_tokens`. Memory is taken as it is needed. `lora`: the table `[train.lora]`
    of a run whose weights arrive as an adapter. `floor_s`: given the prompt tokens and the decoding requests of a step,
    the least seconds that it takes (`emulated.py`).
    Raises ConfigError, and GenerationError for a model whose cached generation differs from a plain forward pass.
    """

    def __init__(
        self,
        model_folder: str,
        slots: int = 64,
        max_model_tokens: int = 1024,
        device: str = "cpu",
        seed: int = 0,
        prefill_tokens: int = 2048,
        kept_tokens: int | None = None,
        dtype: str = "float32",
        lora: Mapping[str, Any] | None = None,
        floor_s: Callable[[int, int], float] | None = None,
    ) -> None:
        if slots < 1 or prefill_tokens < 1 or max_model_tokens < SHORTEST:
            raise ConfigError(f"embedded engine: needs slots and prefill_tokens >= 1, max_model_tokens >= {SHORTEST}")
        place, kind = torch.device(device), getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ConfigError(f"embedded engine: unknown dtype {dtype!r}; take float32, bfloat16 or float16")
        adapter = msgspec.convert(lora, LoraConfig) if lora else None
        self._model = CausalLM(model_folder, max_model_tokens, place, kind, adapter)
        self._tokenizer = load_tokenizer(Path(model_folder) / "tokenizer.json")
        self._max_slots, self._max_model_tokens, self._prefill_tokens = slots, max_model_tokens, prefill_tokens
        shape = self._model.num_layers, self._model.num_heads, self._model.head_dim
        with torch.inference_mode():
            self._slots = Slots(*shape, slots, max_model_tokens, kind, place)
        self._prefixes = Prefixes(slots * max_model_tokens // 2 if kept_tokens is None else kept_tokens)
        self._sampler = Sampler(place, seed)
        self._waiting: deque[Running] = deque()
        self._rows: list[Running] = []
        self._num_decoding = 0
        self._arranged = 0
        self._suspended = False
        self._version = 0
        self._times, self._floor_s = StageTimes(), None
        self._forget_counts()
        self._check_itself()
        self._times, self._floor_s = StageTimes(), floor_s

    # ------------------------------------------------------------------------------------------------- commands
    def add(self, request: GenRequest) -> None:
        """Enqueue. Raises GenerationError when the request can never run."""
        check_request(request, self._max_model_tokens, self._model.vocabulary, self._tokenizer)
        if any(running.request.request_id == request.request_id for running in self._all()):
            raise GenerationError(f"request {request.request_id}: this id is already running")
        self._waiting.append(Running(request, self._max_model_tokens, self._tokenizer))

    def abort(self, request_id: str) -> GenResult | None:
        """Cancel a request and free its keys and values; the partial result, or None when it is not here."""
        for running in self._waiting:
            if running.request.request_id == request_id:
                self._waiting.remove(running)
                self._prefixes.forget(running.request.trajectory_id)
                return running.result("abort")
        for slot, running in enumerate(self._rows):
            if running.request.request_id == request_id:
                self._leave(slot, keep=False)
                return running.result("abort")
        return None

    @property
    def grain(self) -> int:
        """Keys and values are kept token by token."""
        return 1

    def add_prefill(self, request: GenRequest, so_far: GenResult) -> None:
        """Enqueue a request that ends with the token after `so_far`."""
        self._add_after(request, so_far).hands_over = True

    def add_decode(self, request: GenRequest, so_far: GenResult, start: int, payload: Payload | None) -> None:
        """Enqueue a request that goes on after `so_far`, with the keys and values in `payload`."""
        tokens = request.prompt + so_far.tokens
        base, num_kept = self._prefixes.match(request.trajectory_id, tokens)
        arrived = None
        if payload is not None and start <= num_kept:
            arrived = Arrived(base, start, self._slots.from_bytes(payload, len(tokens) - 1 - start))
        self._add_after(request, so_far).arrived = arrived

    def _add_after(self, request: GenRequest, so_far: GenResult) -> Running:
        self.add(request)
        return go_on_after(self._waiting, so_far)

    def payload(self, request: GenRequest, so_far: GenResult, start: int) -> Payload | None:
        """Keys and values of the request's tokens from `start` to the last but one, if all are kept."""
        tokens = request.prompt + so_far.tokens
        kept, num_kept = self._prefixes.match(request.trajectory_id, tokens)
        if kept is None or num_kept < len(tokens) - 1:
            return None
        return self._slots.to_bytes(kept.saved_L2HTD[:, :, :, start:num_kept])

    def kept(self, request: GenRequest, so_far: GenResult) -> int:
        """Of how many of the request's first tokens keys and values are kept."""
        return self._prefixes.match(request.trajectory_id, request.prompt + so_far.tokens)[1]

    def release(self, trajectory_id: str) -> None:
        """Forget the keys and values kept for a trajectory between its turns."""
        self._prefixes.forget(trajectory_id)

    def suspend(self) -> None:
        """No step advances until `resume`."""
        self._suspended = True

    def resume(self) -> None:
        """Let steps advance again."""
        self._suspended = False

    @torch.inference_mode()
    def update(self, version: int, tensors: Tensors) -> None:
        """Load weights in place; everything kept is dropped; running requests queue first and are computed again.

        Raises WeightsError, with nothing changed, unless names, shapes and dtypes are those of `parameters`.
        """
        self._model.load(tensors)
        self._version = version
        self._prefixes.clear()
        for running in self._rows:
            self._recomputed_tokens += running.computed
            running.computed = 0
        for running in self._waiting:
            running.arrived = None
        self._waiting.extendleft(reversed(self._rows))
        self._rows, self._num_decoding, self._arranged = [], 0, 0

    # ----------------------------------------------------------------------------------------------------- steps
    def has_work(self) -> bool:
        """Whether `step` would advance anything now."""
        return not self._suspended and bool(self._rows or self._waiting)

    @torch.inference_mode()
    def step(self) -> list[GenResult]:
        """One pass: every decoding request gains a token and waiting ones are prefilled; the requests that ended."""
        if not self.has_work():
            return []
        began = time.perf_counter()
        self._admit()
        decode = [Work(slot, row.computed, row.tokens[-1:]) for slot, row in enumerate(self._decoding())]
        prefill, num_complete = self._next_prefill()
        num_last = len(decode) + num_complete
        logits_RV = self._model.logits(plan(self._slots, decode, prefill, num_last, self._model.group))
        for work in (*decode, *prefill):
            self._rows[work.slot].computed += len(work.tokens)
        self._prefilled_tokens += sum(len(work.tokens) for work in prefill)
        self._num_decoding = num_last
        drawn = self._draw(logits_RV) if num_last else ([], [])
        self._charge(began, decode, prefill)
        results = self._accept(*drawn)
        self._steps += 1
        if num_last:
            self._busy_s += time.perf_counter() - began
        return results

    def _charge(self, began: float, decode: list[Work], prefill: list[Work]) -> None:
        """Share the time of a step among its requests, after waiting until its floor."""
        if self._floor_s is not None:
            least_s = self._floor_s(sum(len(work.tokens) for work in prefill), len(decode))
            time.sleep(max(0.0, began + least_s - time.perf_counter()))
        decoding = [self._rows[work.slot] for work in decode]
        prefilling = [(self._rows[work.slot], len(work.tokens)) for work in prefill]
        self._times.charge(time.perf_counter() - began, decoding, prefilling)

    def _decoding(self) -> list[Running]:
        return self._rows[: self._num_decoding]

    def _admit(self) -> None:
        """Give slots to waiting requests; one that can soon copy most of what it lacks from another waits for that."""
        held: list[Running] = []
        for _ in range(min(len(self._waiting), self._max_slots - len(self._rows))):
            running = self._waiting.popleft()
            if running.arrived is not None:
                self._seat_arrived(running, running.arrived)
                continue
            donor, num_now = self._donor(running)
            prefilling = reversed(self._rows[self._num_decoding :])  # who begins alike has often come just before
            _, num_soon = most_alike(running.tokens, ((row, len(row.tokens)) for row in prefilling), num_now)
            if 2 * (num_soon - num_now) >= len(running.tokens) - num_now:
                held.append(running)
            else:
                self._seat(running, donor, num_now)
        self._waiting.extendleft(reversed(held))

    def _donor(self, running: Running) -> tuple[Running | Kept | None, int]:
        """Whose keys and values a request can begin with, and how many: mostly those of its trajectory's last turn."""
        tokens = running.tokens
        own, num_own = self._prefixes.match(running.request.trajectory_id, tokens)
        if 2 * num_own >= len(tokens):
            return own, num_own
        rows: Iterator[tuple[Running | Kept, int]] = ((row, row.computed) for row in reversed(self._rows))
        kept = ((kept, len(kept.tokens)) for kept in self._prefixes.latest(self._max_slots))
        other, num_other = most_alike(tokens, chain(rows, kept), num_own)
        return (own, num_own) if other is None else (other, num_other)

    def _seat(self, running: Running, donor: Running | Kept | None, num_reused: int) -> None:
        """Open a slot that begins with a donor's keys and values."""
        slot = len(self._rows)
        if isinstance(donor, Running):
            self._slots.copy(self._rows.index(donor), slot, num_reused)
        elif donor is not None:
            self._slots.load(slot, donor.saved_L2HTD, num_reused)
        self._cached_tokens += num_reused
        if not running.versions:
            running.cached = num_reused
        self._sit_down(running, num_reused)

    def _seat_arrived(self, running: Running, arrived: Arrived) -> None:
        """Open a slot with the keys and values that came for a request: it decodes at once."""
        slot, num_received = len(self._rows), arrived.received_L2HTD.shape[3]
        if arrived.base is not None:
            self._slots.load(slot, arrived.base.saved_L2HTD, arrived.start)
        self._slots.load(slot, arrived.received_L2HTD, num_received, arrived.start)
        running.arrived = None
        running.received += num_received
        self._received_tokens += num_received
        self._sit_down(running, arrived.start + num_received)
        if self._num_decoding == slot:  # else it joins those that decode with the others that are still being read
            self._num_decoding += 1

    def _sit_down(self, running: Running, num_computed: int) -> None:
        self._prefixes.forget(running.request.trajectory_id)
        running.computed = num_computed
        running.queue_s = running.queue_s or time.perf_counter() - running.added_s
        self._rows.append(running)

    def _next_prefill(self) -> tuple[list[Work], int]:
        """The next rows to prefill, cut where count x longest would exceed the budget; how many are then complete."""
        works: list[Work] = []
        longest = 0
        for slot in range(self._num_decoding, len(self._rows)):
            row = self._rows[slot]
            num_new = min(row.num_pending, self._prefill_tokens)
            longest = max(longest, num_new)
            if works and longest * (len(works) + 1) > self._prefill_tokens:
                break
            works.append(Work(slot, row.computed, row.tokens[row.computed : row.computed + num_new]))
            if num_new < row.num_pending:
                return works, len(works) - 1
        return works, len(works)

    def _draw(self, logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
        if self._arranged != self._num_decoding:
            rows = self._decoding()
            owners, lengths = [row.request.trajectory_id for row in rows], [len(row.tokens) for row in rows]
            self._sampler.arrange([row.request.sampling for row in rows], owners, lengths)
            self._arranged = self._num_decoding
        return self._sampler(logits_RV)

    def _accept(self, tokens: list[int], logprobs: list[float]) -> list[GenResult]:
        ended: list[tuple[int, FinishReason]] = []
        for slot, (row, token, logprob) in enumerate(zip(self._rows, tokens, logprobs, strict=False)):
            if not math.isfinite(logprob):
                ended.append((slot, "error"))
            elif reason := row.accept(token, logprob, self._version):
                ended.append((slot, reason))
        self._generated_tokens += len(tokens) - sum(reason == "error" for _, reason in ended)
        return [self._end(slot, reason) for slot, reason in reversed(ended)]

    def _end(self, slot: int, reason: FinishReason) -> GenResult:
        running = self._rows[slot]
        self._leave(slot, keep=reason != "error")
        error = f"logits of version {self._version} are not finite" if reason == "error" else ""
        return running.result(reason, error)

    @torch.inference_mode()
    def _leave(self, slot: int, keep: bool) -> None:
        """Take a row out and close the gap: the last decoding row moves into it, the last prefilling row after that."""
        running = self._rows[slot]
        trajectory_id = running.request.trajectory_id
        if keep:
            saved = self._slots.save(slot, running.computed)
            self._prefixes.put(trajectory_id, running.tokens[: running.computed], saved)
        elif slot < self._slots.num_slots:
            self._slots.wipe(slot)
        if slot < self._num_decoding:
            self._num_decoding -= 1
            self._move(self._num_decoding, slot)
            slot = self._num_decoding
        self._move(len(self._rows) - 1, slot)
        self._rows.pop()
        self._arranged = 0

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self._rows[target] = self._rows[source]
            if row.computed:
                self._slots.copy(source, target, row.computed)

    # --------------------------------------------------------------------------------------------------- looking
    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token given those before it, by a plain forward pass; length len(tokens) - 1."""
        if not tokens:
            raise GenerationError("logprobs of no tokens")
        check_vocabulary(tokens, self._model.vocabulary)
        return self._model.logprobs(tokens)

    def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes that `update` expects."""
        return self._model.parameters()

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            version=self._version,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            received_tokens=self._received_tokens,
            running=len(self._rows),
            waiting=len(self._waiting),
            kv_tokens=sum(row.computed for row in self._rows) + self._prefixes.num_tokens,
            suspended=self._suspended,
        )

    @property
    def allocated_tokens(self) -> int:
        """Tokens that the buffer of running requests has room for now."""
        return self._slots.num_slots * self._slots.width

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._num_decoding <= len(self._rows) <= self._max_slots
        assert all(row.num_pending == 1 for row in self._decoding())
        assert all(0 <= row.computed < len(row.tokens) <= row.limit for row in self._all())
        assert all(row.computed <= self._slots.width for row in self._rows)
        ids = [row.request.request_id for row in self._all()]
        assert len(ids) == len(set(ids))
        assert bool(torch.isfinite(self._slots.buffer_L2SHWD).all())
        self._prefixes.check()

    def _all(self) -> list[Running]:
        return [*self._rows, *self._waiting]

    # ------------------------------------------------------------------------------------------------ self-check
    def _check_itself(self) -> None:
        """Generate a little through the slots, over two turns, and compare with a plain forward pass."""
        with boundary(GenerationError, "this engine cannot run the model"):
            draw = random.Random(0)
            prompts = [[draw.randrange(self._model.vocabulary) for _ in range(size)] for size in (7, 4)]
            for _turn in range(2):
                prompts = self._generate_both(prompts)
        self._prefixes.clear()
        self._forget_counts()

    def _generate_both(self, prompts: list[list[int]]) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            self.add(GenRequest(str(index), str(index), prompt, Sampling(temperature=0, max_tokens=2)))
        results: list[GenResult] = []
        while self.has_work():
            results += self.step()
        results.sort(key=lambda result: result.request_id)
        for prompt, result in zip(prompts, results, strict=True):
            self._compare(prompt, result)
        return [prompt + result.tokens + prompt[:2] for prompt, result in zip(prompts, results, strict=True)]

    def _compare(self, prompt: list[int], result: GenResult) -> None:
        if result.finish_reason == "error":
            raise GenerationError(result.error)
        plain = self.logprobs(prompt + result.tokens)[len(prompt) - 1 :]
        worst = max(abs(ours - theirs) for ours, theirs in zip(result.logprobs, plain, strict=True))
        if worst > (1e-3 if self._slots.buffer_L2SHWD.dtype == torch.float32 else 0.1):
            raise GenerationError(
                f"log-probabilities through the cache differ from a plain forward pass by {worst:.3g}"
            )

    def _forget_counts(self) -> None:
        self._steps = self._generated_tokens = self._prefilled_tokens = 0
        self._cached_tokens = self._recomputed_tokens = self._received_tokens = 0
        self._busy_s = 0.0
