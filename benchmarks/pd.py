"""Prompts read on a device of their own, against the same devices each reading and decoding for itself.

What runs. Engine processes, an environment process, EnvManagers, LLMProxy and Router as in a training run; a fixed
number of trajectories of one task is in flight.

* `explore` is prefill-heavy: 5 turns (2 with --quick), each an observation of about 200 tokens, answered by 4 tokens.
* `solve` is decode-heavy: 1 turn, a prompt of about 40 tokens, answered by 200 tokens (80 with --quick).

What is emulated. Engines are `rollart.data.engines.emulated`: real model, batching and prefix cache, slowed down to the
roofline of a model of the size of Qwen3-8B on an H800 or an H20. KV really travels, through shared memory, but that of
a very small model; on top of it each worker that decodes has a link of its own, over which the KV of the modelled model
would take

    latency + tokens x KV bytes per token / bytes per second

one request after the other, stretched like all other seconds of the emulation: 5 ms and 25 GB/s (200 Gbps, what joins
the two clusters in RollArt, OSDI 2026, section 7). Only tokens whose KV the worker does not keep are counted. KV bytes
per token are those of Qwen3-8B (`dense`, 147 kB) and of Qwen3-30B-A3B (`moe`, 98 kB), whose experts are not modelled.

What is compared, always over the same devices:

* `1:1` and `1:3`: one H800 and one or three H20
* `together`: every device reads and decodes; each trajectory goes to the least loaded, and stays there
* `apart`: the H800 reads for all, the H20 decode

The roofline leaves out attention, memory and what a step that reads prompts costs those that decode beside it, apart
from its time. The figure is trajectories per second that ended in a window after a warm-up; modes take turns, and a row
shows the median of the repetitions. `received` is the number of tokens whose KV travelled per trajectory, `read_alone`
the share of requests that the worker which decodes had to read itself: it should be 0.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from affinity import COST, SLOTS, EndlessRenderer, make_model
from report import parser, publish

from rollart.config import Config, from_dict
from rollart.control.background import Background
from rollart.control.env_manager import EnvManager, Services
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.data.engines.emulation import SLOWDOWN
from rollart.data.inference import RemoteInference, RemotePrefill
from rollart.data.simulated.model_shape import load_shape
from rollart.pipeline import model_folder
from rollart.protocols import WorkerHandle
from rollart.resource.routing import Router
from rollart.tasks import registry
from rollart.types import GenRequest, GenResult, GroupSpec, Handoff, Sampling, TaskSpec
from rollart.workers import Workers, started

LATENCY_S = 0.005
BYTES_PER_S = 25e9
KV = {"dense": "Qwen3-8B", "moe": "Qwen3-30B-A3B"}
SPLITS = {"1:1": 1, "1:3": 3}
TASKS = ("explore", "solve")


def config(turns: int, answer: int) -> Config:
    """The devices of the largest split, and an H800 twice: as one that only reads, and as one that does both."""
    pools = {name: {"count": count, "device": "cpu", "cost": COST[name]} for name, count in (("H800", 2), ("H20", 3))}
    explore = {"turns_min": turns, "turns_max": turns, "words": 46}
    solve = {"turns_min": 1, "turns_max": 1, "words": 6}
    return from_dict(
        {
            "engine": "emulated",
            "pools": pools,
            "roles": {
                "prefill": {"workers": {"H800": 1}},
                "actor_gen": {"workers": {"H800": 1, "H20": 3}},
                "environment": {"workers": 1},
            },
            "tasks": {
                "explore": {"env": "synthetic", "options": explore, "max_turn_tokens": 4, "max_tokens": 4096},
                "solve": {"env": "synthetic", "options": solve, "max_turn_tokens": answer, "max_tokens": 4096},
            },
            "rollout": {"engine_slots": SLOTS, "max_model_tokens": 4096, "env_threads": 256},
        }
    )


class BehindLink(RemoteInference):
    """A worker whose KV arrives over a link of its own, one request after the other."""

    def __init__(self, worker: WorkerHandle, kv_bytes_per_token: int) -> None:
        super().__init__(worker)
        self._kv_bytes = kv_bytes_per_token
        self._free_s = 0.0

    async def decode(self, request: GenRequest, handoff: Handoff) -> GenResult:
        """After the KV of the modelled model has come."""
        if handoff.has_kv:
            num_tokens = len(request.prompt) + len(handoff.result.tokens) - 1 - handoff.start
            now_s = asyncio.get_running_loop().time()
            self._free_s = max(now_s, self._free_s) + SLOWDOWN * num_tokens * self._kv_bytes / BYTES_PER_S
            await asyncio.sleep(self._free_s + SLOWDOWN * LATENCY_S - now_s)
        return await super().decode(request, handoff)


@dataclass
class Mode:
    """One task on one way to use the devices. It lives through all repetitions."""

    split: str
    task: TaskSpec
    kv: str
    proxy: LLMProxy
    services: Services
    ended: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        """Unique among modes."""
        return f"{self.split} {self.task.name} {self.kv or 'together'}"

    async def trajectories(self) -> None:
        """One after the other, until cancelled."""
        while True:
            number = next(self.numbers)
            spec = GroupSpec(number, self.task.name, number)
            trajectory = await EnvManager(self.services, self.task, spec, f"{self.name} {number}").run()
            assert trajectory.stop_reason == "done", trajectory.cause
            self.ended += 1

    async def rate(self, in_flight: int, warm_s: float, measure_s: float) -> dict[str, float]:
        """Trajectories per second in a window, and what travelled for each."""
        running = [asyncio.ensure_future(self.trajectories()) for _ in range(in_flight)]
        await _sleep_beside(running, warm_s)
        ended, counts = self.ended, self._counts()
        await _sleep_beside(running, measure_s)
        ended, counts = self.ended - ended, [now - then for now, then in zip(self._counts(), counts, strict=True)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.services.background.drain(30.0)
        if not ended:
            raise SystemExit(f"{self.name}: nothing ended within {measure_s:g} s; this machine is too busy")
        read, received, alone = counts
        rate, received_each, alone_share = ended / measure_s, received / ended, alone / max(1, read)
        return {"trajectories_per_s": rate, "received": received_each, "read_alone": alone_share}

    def _counts(self) -> list[int]:
        """Requests that were read apart, tokens whose KV travelled, requests that were read by who decodes."""
        report = self.proxy.prefill.report()
        return [report.read, report.received_tokens, sum(report.by_decode_workers.values())] if report else [0, 0, 0]


async def _sleep_beside(running: list[asyncio.Future[None]], seconds: float) -> None:
    """Sleep; raise what one of the others raises meanwhile."""
    done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def modes(workers: Workers, folder: Path, specs: dict[str, TaskSpec]) -> list[Mode]:
    """Every split and task, together and apart with each size of KV."""
    return [
        mode(workers, folder, split, specs[task], kv) for split, task, kv in itertools.product(SPLITS, TASKS, ("", *KV))
    ]


def mode(workers: Workers, folder: Path, split: str, task: TaskSpec, kv: str) -> Mode:
    """One way to use the devices of a split; `kv`: whose KV travels, "" where none does."""
    generating = workers.of_role("actor_gen")
    wide = [each.handle for each in generating if each.binding.device_class == "H20"][: SPLITS[split]]
    if kv:
        kv_bytes = load_shape(KV[kv]).kv_bytes_per_token
        reading = [RemotePrefill(each.handle) for each in workers.of_role("prefill")]
        mine: list[RemoteInference] = [*(BehindLink(handle, kv_bytes) for handle in wide), *reading]
    else:
        fast = [each.handle for each in generating if each.binding.device_class == "H800"]
        mine = [RemoteInference(handle) for handle in [*fast, *wide]]
    background = Background()
    proxy = LLMProxy(mine, router=Router(slots=SLOTS), classes=workers.classes, background=background)
    services = Services(
        workers.environment, proxy, EndlessRenderer(folder), Sampling(), background, Ledger().clock, workers.reward
    )
    return Mode(split, task, kv, proxy, services)


async def measure(
    settings: Config, in_flight: int, repetitions: int, warm_s: float, measure_s: float
) -> tuple[list[Mode], dict[str, list[dict[str, float]]]]:
    """Per mode, the rates of each repetition."""
    specs = registry.specs(settings)
    tiny = await model_folder("tiny")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(tiny, folder)
        weights = {"folder": str(Path(place) / "weights"), "bucket_bytes": 1 << 20, "keep": 2}
        logs = Path(place) / "logs"
        logs.mkdir()
        async with started(settings, "pd", logs, specs, folder, weights, False, print) as workers:
            there = modes(workers, folder, specs)
            found: dict[str, list[dict[str, float]]] = {each.name: [] for each in there}
            for repetition in range(repetitions):
                for each in there[repetition:] + there[:repetition]:
                    found[each.name].append(await each.rate(in_flight, warm_s, measure_s))
    return there, found


def main() -> None:
    """Print and write the figures."""
    options = parser(__doc__)
    options.add_argument("--answer", type=int, help="tokens of an answer of `solve` (default 200; quick 80)")
    options.add_argument("--in-flight", type=int, help="trajectories at once (default 64; quick 48)")
    arguments = options.parse_args()
    quick = arguments.quick
    settings = config(turns=2 if quick else 5, answer=arguments.answer or (80 if quick else 200))
    repetitions, warm_s, measure_s = (1, 2.0, 3.0) if quick else (3, 8.0, 12.0)
    in_flight = arguments.in_flight or (48 if quick else 64)
    there, found = asyncio.run(measure(settings, in_flight, repetitions, warm_s, measure_s))
    rows = [
        {
            "split": each.split,
            "task": each.task.name,
            "mode": f"apart, {each.kv}" if each.kv else "together",
            **{key: statistics.median(run[key] for run in found[each.name]) for key in found[each.name][0]},
            "runs": ", ".join(f"{run['trajectories_per_s']:.2f}" for run in found[each.name]),
        }
        for each in there
    ]
    speed = {each.name: row["trajectories_per_s"] for each, row in zip(there, rows, strict=True)}
    summary = {
        f"apart_over_together_{each.split.replace(':', '_')}_{each.task.name}_{each.kv}": speed[each.name]
        / speed[f"{each.split} {each.task.name} together"]
        for each in there
        if each.kv
    }
    summary["read_by_decode_workers"] = max(row["read_alone"] for row in rows)
    publish("pd", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
