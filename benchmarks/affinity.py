"""Tasks on the device class that suits them, against random assignment and against pools of one class at equal cost.

What runs. Engine processes, an environment process, EnvManagers, LLMProxy and Router as in a training run, with
trajectories of two tasks begun in turn, so that as many of each must end; a fixed number is in flight.

* `explore` is prefill-heavy: 5 turns (2 with --quick), each an observation of about 200 tokens, answered by 4 tokens.
* `solve` is decode-heavy: 1 turn, a prompt of about 40 tokens, answered by 200 tokens (80 with --quick).

What is emulated. Engines are `rollart.data.engines.emulated`: the embedded engine (real model, real batching, real
prefix cache), slowed down by sleeping to the roofline of a model of the size of Qwen3-8B on an H800 or an H20, with the
figures of RollArt (OSDI 2026, section 7): 989.5 and 148 dense bf16 TFLOPS, 3.35 and 4.0 TB/s, relative cost 2.85 and 1.
No constant beyond these and the model's size goes in; what the roofline leaves out is said there. Its seconds are
stretched alike on both classes, so that sleeping outweighs the real computation of a very small model. `lag` says
whether it did: seconds of a decoding step as measured over those emulated, at its worst; 1.0 is perfect, and figures
with a lag above 1.1 come from a machine that was too busy.

What is compared, at about equal cost:

* `compute_only`   2 H800 (5.70)           all requests, least outstanding tokens
* `bandwidth_only` 6 H20  (6.00)           the same
* `random`         1 H800 + 3 H20 (5.85)   each trajectory on a class drawn at random, as likely as it has workers
* `declared`       1 H800 + 3 H20          explore -> H800, solve -> H20
* `auto`           1 H800 + 3 H20          nothing said

The lengths are such that by the roofline both parts of the mixed pool have about equal work under `declared`: the
mixture for which one would buy this pool. The further a mixture is from that, the less a pool of two classes gains
(`--answer` sets the tokens of `solve`). The paper gives no tokens per turn.

The figure is trajectories per second that ended in a window after a warm-up, both as long for every mode; modes take
turns, and a row shows the median of the repetitions. `explore_per_s` and `solve_per_s` grow equal in the long run; in a
window this short a slow mode has ended more of the shorter `explore`, which flatters it.

`auto` keeps what it has learned from one repetition to the next,
as a run does; `auto_first_over_declared` is its first repetition, with all its exploring, over the declared median.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace
from report import parser, publish

from rollart.config import Config, from_dict
from rollart.control.background import Background
from rollart.control.env_manager import EnvManager, Services
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.data.engines.emulation import PARAMS, SLOWDOWN
from rollart.pipeline import model_folder
from rollart.resource.affinity import Affinity
from rollart.resource.classes import CLASSES
from rollart.resource.routing import Router
from rollart.tasks import registry
from rollart.tasks.chat import ChatRenderer
from rollart.types import GroupSpec, Sampling, TaskSpec
from rollart.workers import Workers, started

COST = {"H800": 2.85, "H20": 1.0}
SLOTS = 16
DECLARED = {"explore": "H800", "solve": "H20"}
POOLS = {
    "compute_only": {"H800": 2},
    "bandwidth_only": {"H20": 6},
    "random": {"H800": 1, "H20": 3},
    "declared": {"H800": 1, "H20": 3},
    "auto": {"H800": 1, "H20": 3},
}


def config(turns: int, answer: int) -> Config:
    """Both pools, both tasks."""
    pools = {name: {"count": count, "device": "cpu", "cost": COST[name]} for name, count in (("H800", 2), ("H20", 6))}
    explore = {"turns_min": turns, "turns_max": turns, "words": 46}
    solve = {"turns_min": 1, "turns_max": 1, "words": 6}
    return from_dict(
        {
            "engine": "emulated",
            "pools": pools,
            "roles": {"actor_gen": {"workers": {"H800": 2, "H20": 6}}},
            "tasks": {
                "explore": {"env": "synthetic", "options": explore, "max_turn_tokens": 4, "max_tokens": 4096},
                "solve": {"env": "synthetic", "options": solve, "max_turn_tokens": answer, "max_tokens": 4096},
            },
            "rollout": {"engine_slots": SLOTS, "max_model_tokens": 4096, "env_threads": 256},
        }
    )


def make_model(tiny: Path, folder: Path) -> None:
    """A random model that takes as little time as can be, with the tokenizer of `tiny`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.copytree(tiny, folder)
    shape = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    size = Qwen3Config(vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=True, **shape, **heads)
    Qwen3ForCausalLM(size).save_pretrained(folder)


class EndlessRenderer(ChatRenderer):
    """Without a stop token: every answer has the length that its task allows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stop_token_ids = ()


@dataclass
class Mode:
    """One way to assign tasks, with its workers. It lives through all repetitions."""

    name: str
    pool: dict[str, int]
    proxy: LLMProxy
    services: Services
    specs: dict[str, TaskSpec]
    said: list[str]
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    ended: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def trajectories(self) -> None:
        """One after the other, tasks in turn, until cancelled."""
        while True:
            number = next(self.numbers)
            task = ("explore", "solve")[number % 2]
            spec = self.specs[task]
            if self.name == "random":
                spec = replace(spec, tag=f"{task} on {self.draw.choices(list(self.pool), list(self.pool.values()))[0]}")
            name = f"{self.name}-{number}"
            trajectory = await EnvManager(self.services, spec, GroupSpec(number, task, number), name).run()
            assert trajectory.stop_reason == "done", trajectory.cause
            self.ended[task] += 1

    async def rate(self, in_flight: int, warm_s: float, measure_s: float) -> dict[str, float]:
        """Trajectories per second in a window."""
        running = [asyncio.ensure_future(self.trajectories()) for _ in range(in_flight)]
        await _sleep_beside(running, warm_s)
        self.ended.clear()
        await _sleep_beside(running, measure_s)
        ended = dict(self.ended)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.services.background.drain(30.0)
        if len(ended) < len(self.specs):
            raise SystemExit(f"{self.name}: only {ended} ended within {measure_s:g} s; this machine is too busy")
        return {
            "trajectories_per_s": sum(ended.values()) / measure_s,
            **{f"{task}_per_s": ended.get(task, 0) / measure_s for task in self.specs},
            "lag": self.lag(),
        }

    def lag(self) -> float:
        """Seconds of a decoding step over those emulated, on the class where this is worst."""
        profile = self.proxy.affinity().profile
        tokens = self.specs["solve"].max_turn_tokens - 1
        measured = {
            name: there["decode_s"] / tokens
            for tag, row in profile.items()
            if tag.startswith("solve")
            for name, there in row["on"].items()
        }
        return max(s / (SLOWDOWN * CLASSES[name].step_seconds(1, PARAMS)) for name, s in measured.items())


async def _sleep_beside(running: list[asyncio.Future[None]], seconds: float) -> None:
    """Sleep; raise what one of the others raises meanwhile."""
    done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def mode(name: str, workers: Workers, folder: Path, specs: dict[str, TaskSpec]) -> Mode:
    """A mode over its part of the workers."""
    pool, said = POOLS[name], []
    handles = {each.name: each for each in workers.inference()}
    classes = {worker: workers.classes[worker] for worker in handles}
    mine = [worker for cls, count in pool.items() for worker in [w for w in classes if classes[w] == cls][:count]]
    at_random = {f"{task} on {cls}": cls for task in specs for cls in pool}
    declared = {"declared": DECLARED, "random": at_random}.get(name, {})
    fallback = {cls: [other for other in pool if other != cls] for cls in pool} if name == "auto" else {}
    background = Background()
    proxy = LLMProxy(
        [handles[worker] for worker in mine],
        router=Router(declared, fallback, slots=SLOTS),
        classes=classes,
        background=background,
        affinity=Affinity(declared, "auto" if name == "auto" else "declared", SLOTS),
        say=said.append,
    )
    services = Services(
        workers.environment, proxy, EndlessRenderer(folder), Sampling(), background, Ledger().clock, workers.reward
    )
    return Mode(name, pool, proxy, services, specs, said)


async def measure(
    settings: Config, in_flight: int, repetitions: int, warm_s: float, measure_s: float
) -> dict[str, list[dict[str, float]]]:
    """Per mode, the rates of each repetition."""
    specs = registry.specs(settings)
    tiny = await model_folder("tiny")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(tiny, folder)
        weights = {"folder": str(Path(place) / "weights"), "bucket_bytes": 1 << 20, "keep": 2}
        logs = Path(place) / "logs"
        logs.mkdir()
        async with started(settings, "affinity", logs, specs, folder, weights, False, print) as workers:
            modes = [mode(name, workers, folder, specs) for name in POOLS]
            found: dict[str, list[dict[str, float]]] = {name: [] for name in POOLS}
            for repetition in range(repetitions):
                for each in modes[repetition:] + modes[:repetition]:
                    found[each.name].append(await each.rate(in_flight, warm_s, measure_s))
            for line in modes[-1].said:
                print(line)
            print("auto mapped", modes[-1].proxy.affinity().mapping)
    return found


def main() -> None:
    """Print and write the figures."""
    options = parser(__doc__)
    options.add_argument("--answer", type=int, help="tokens of an answer of `solve` (default 200; quick 80)")
    options.add_argument("--in-flight", type=int, help="trajectories at once (default 96; quick 48)")
    arguments = options.parse_args()
    quick = arguments.quick
    settings = config(turns=2 if quick else 5, answer=arguments.answer or (80 if quick else 200))
    repetitions, warm_s, measure_s = (1, 2.5, 3.0) if quick else (3, 8.0, 12.0)
    in_flight = arguments.in_flight or (48 if quick else 96)
    found = asyncio.run(measure(settings, in_flight, repetitions, warm_s, measure_s))
    rows = [
        {
            "mode": name,
            "pool": " + ".join(f"{count} {cls}" for cls, count in POOLS[name].items()),
            "cost": sum(COST[cls] * count for cls, count in POOLS[name].items()),
            **{key: statistics.median(each[key] for each in runs) for key in runs[0]},
            "runs": ", ".join(f"{each['trajectories_per_s']:.2f}" for each in runs),
        }
        for name, runs in found.items()
    ]
    speed = {row["mode"]: row["trajectories_per_s"] for row in rows}
    summary = {f"declared_over_{name}": speed["declared"] / speed[name] for name in list(POOLS)[:3]}
    summary["auto_over_declared"] = speed["auto"] / speed["declared"]
    summary["auto_first_over_declared"] = found["auto"][0]["trajectories_per_s"] / speed["declared"]
    summary["lag"] = max(each["lag"] for runs in found.values() for each in runs)
    publish("affinity", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
