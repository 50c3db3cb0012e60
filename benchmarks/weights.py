"""How fast weights travel from trainer to engine, beside plain copies of the same bytes in the same run.

The model is a random Qwen3 of 135 million parameters in float32 (about 540 MB; with --quick 10 million), one thread.

* `memcpy`: what a hand-over through shared memory without any care would cost: all tensors are copied into a buffer in
  shared memory, and out of it into other tensors; every page is in place beforehand.
* `file`: `publish` into shared memory, then `fetch` by another store object, as an engine has one, which keeps what it
  got until the next version is there. Both sum every byte. The engine keeps these tensors, so that loading copies
  nothing.
* `file, disk`: the same in the temporary folder, where readers copy.
* `delta`: as `file`, each version a difference to the one before; `f32` changes every weight by about a ten-thousandth
  of its size, `bf16` is what bfloat16 shows of such changes. `stored` is what lies in the store, as a share of the
  model.
* `mooncake`: a Mooncake store over TCP on loopback, one store node, where the extra is installed.

GB/s are those of the model's bytes, once per publication and once per pull; rounds of all kinds take turns, figures are
medians. `files_over_memcpy` is the time of the two plain copies over that of publication and pull.

The exposed time is measured on an inference worker in a process of its own, with requests in flight: from the moment at
which it is suspended to the moment at which it goes on, its next version having been read ahead. `pull_s` is what that
takes when nothing was read ahead. `exposed_over_pull` is their ratio, over all rounds.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import asyncio
import contextlib
import importlib.util
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from report import parser, publish
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rollart.data.inference import RemoteInference
from rollart.data.model import make_tiny
from rollart.data.runtime import LocalRuntime
from rollart.data.stores.checksum import fastest
from rollart.data.stores.files import in_memory
from rollart.data.stores.mooncake_service import mooncake_store
from rollart.data.weights import BucketStore, FileWeightStore, open_store
from rollart.sections import WeightsConfig
from rollart.types import GenRequest, Sampling

WHOLE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
QUICK = {**WHOLE, "vocab_size": 8192, "num_hidden_layers": 2}
BUCKET_BYTES = 64 << 20
KEEP = 2
STEP = 1e-4
ALWAYS = 1 << 30
"""Every version but the first is a difference."""
MOST_DELTAS = 3
SHARED_MEMORY = Path("/dev/shm")
Pairs = list[tuple[str, Tensor]]
Way = Callable[[int, Pairs], tuple[float, float]]
"""Given version and tensors, the seconds in and the seconds out."""


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextlib.contextmanager
def plain_copies(tensors: Pairs, folder: Path) -> Iterator[Way]:
    """Copy in and out of a buffer in shared memory."""
    size = sum(tensor.nbytes for _, tensor in tensors)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        buffer = mmap.mmap(file.fileno(), size)
        between: list[Tensor] = []
        for _, tensor in tensors:
            offset = sum(each.nbytes for each in between)
            between.append(torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=offset))
        out = [torch.zeros_like(each) for each in between]

        def copies(_version: int, given: Pairs) -> tuple[float, float]:
            seconds_in = timed(lambda: [to.copy_(each.view(-1)) for to, (_, each) in zip(between, given, strict=True)])
            return seconds_in, timed(lambda: [to.copy_(each) for to, each in zip(out, between, strict=True)])

        yield copies


def through(writer: Any, reader: Any) -> Way:
    """Publish with the one store and fetch with the other, which keeps what it got as an engine does."""
    held: list[Any] = []

    def hand_over(version: int, given: Pairs) -> tuple[float, float]:
        seconds_in = timed(lambda: writer.publish(version, given))
        got: list[Pairs] = []
        seconds_out = timed(lambda: got.append(list(reader.fetch(version))))
        held[:] = got
        return seconds_in, seconds_out

    return hand_over


def step(tensors: Pairs) -> None:
    """Change every weight a little, as an optimizer does."""
    for _, tensor in tensors:
        tensor.addcmul_(tensor, torch.randn_like(tensor), value=STEP)


def stored_share(store: BucketStore, version: int) -> float:
    """What lies in the store of a version, as a share of the model."""
    buckets = store.manifest(version).buckets
    stored = sum(bucket.stored_bytes if bucket.delta else bucket.num_bytes for bucket in buckets)
    return stored / sum(bucket.num_bytes for bucket in buckets)


def measure_stores(tensors: Pairs, rounds: int, mooncake: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row per way from trainer to engine."""
    memory = SHARED_MEMORY if in_memory(SHARED_MEMORY) else None
    with contextlib.ExitStack() as stack:

        def folder(parent: Path | None = memory) -> str:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-bench-", dir=parent))

        def files(place: str, delta: int = 0) -> tuple[BucketStore, BucketStore]:
            return FileWeightStore(place, BUCKET_BYTES, KEEP, delta), FileWeightStore(place, BUCKET_BYTES, KEEP, delta)

        ways: dict[str, Way] = {"memcpy": stack.enter_context(plain_copies(tensors, Path(folder())))}
        ways["file"] = through(*files(folder()))
        ways["file, disk"] = through(*files(folder(None)))
        if mooncake is not None:
            ways["mooncake"] = through(*(open_store(folder(), BUCKET_BYTES, KEEP, 0, mooncake) for _ in range(2)))
        rows = in_turns(ways, tensors, rounds, KEEP + 1)  # the first ones find no file to write over
        for name, kind in (("delta, f32", torch.float32), ("delta, bf16", torch.bfloat16)):
            writer, reader = files(folder(), ALWAYS)
            (found,) = in_turns({name: through(writer, reader)}, tensors, min(rounds, MOST_DELTAS), 1, kind)
            rows.append({**found, "stored": stored_share(writer, max(writer.versions()))})
        return rows


def in_turns(
    ways: dict[str, Way], tensors: Pairs, rounds: int, warmup: int, kind: torch.dtype = torch.float32
) -> list[dict[str, Any]]:
    """A row per way, from `rounds` versions after `warmup` others, of which nothing is counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    given: Pairs = []
    for version in range(warmup + rounds):
        given = [(name, tensor.to(kind)) for name, tensor in tensors]
        for name, way in ways.items():
            seconds = way(version, given)
            if version >= warmup:
                found[name].append(seconds)
        step(tensors)
    return [row(name, seconds, given) for name, seconds in found.items()]


def row(name: str, seconds: list[tuple[float, float]], tensors: Pairs) -> dict[str, Any]:
    """The medians of one way."""
    gigabytes = sum(tensor.nbytes for _, tensor in tensors) / 1e9
    seconds_in, seconds_out = (statistics.median(each) for each in zip(*seconds, strict=True))
    both = statistics.median(sum(each) for each in seconds)
    return {
        "way": name,
        "GB": gigabytes,
        "publish_s": seconds_in,
        "pull_s": seconds_out,
        "publish_gb_s": gigabytes / seconds_in,
        "pull_gb_s": gigabytes / seconds_out,
        "both_s": both,
    }


async def measure_exposed(folder: Path, model: str, tensors: Pairs, rounds: int) -> dict[str, float]:
    """Seconds of an update that was read ahead, and of one that was not, on a worker with requests in flight."""
    weights = {"folder": str(folder / "weights"), "bucket_bytes": BUCKET_BYTES, "keep": KEEP}
    store = open_store(**weights)
    options = {"slots": 4, "max_model_tokens": 1024, "device": "cpu", "seed": 0}
    runtime = LocalRuntime(folder / "logs")
    kwargs = {"model_folder": model, "engine": "embedded", "engine_options": options, "weights": weights}
    worker = RemoteInference(await runtime.spawn("inference-0", "rollart.data.roles:inference", kwargs))
    sampling = Sampling(max_tokens=1000)
    flying = [asyncio.ensure_future(worker.generate(GenRequest(str(n), str(n), [1, 2, 3], sampling))) for n in range(2)]
    exposed: list[float] = []
    pulls: list[float] = []
    try:
        for version in range(2 * rounds):
            store.publish(version, tensors)
            ahead = version % 2 == 0
            if ahead:
                await worker.prefetch(version)
            await worker.suspend()
            began = time.perf_counter()
            assert await worker.update(version) == version
            await worker.resume()
            (exposed if ahead else pulls).append(time.perf_counter() - began)
            step(tensors)
        await worker.abort([str(n) for n in range(2)])
        results = await asyncio.gather(*flying)
        assert {result.finish_reason for result in results} <= {"abort", "length"}
    finally:
        await runtime.shutdown()
    return {"exposed_s": statistics.median(exposed), "update_pull_s": statistics.median(pulls)}


async def measure(shape: dict[str, int], rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All rows, and the seconds of updates."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if in_memory(SHARED_MEMORY) else None) as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_tiny(folder / "model", **shape)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        async with contextlib.AsyncExitStack() as stack:
            mooncake = None
            if importlib.util.find_spec("mooncake") is not None:
                settings = WeightsConfig(store="mooncake")
                room = (KEEP + 2) * num_bytes
                mooncake = await stack.enter_async_context(mooncake_store(settings, folder, room, local=True))
            rows = await asyncio.to_thread(measure_stores, tensors, rounds, mooncake)
        return rows, await measure_exposed(folder, str(folder / "model"), tensors, rounds)


def main() -> None:
    """Run it."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    rows, update = asyncio.run(measure(QUICK if arguments.quick else WHOLE, 3 if arguments.quick else 7))
    by_way = {each["way"]: each for each in rows}
    plain, files = by_way["memcpy"], by_way["file"]
    summary = {
        "memcpy_gb_s": 2 * plain["GB"] / plain["both_s"],
        "files_publish_gb_s": files["publish_gb_s"],
        "files_pull_gb_s": files["pull_gb_s"],
        "files_gb_s": 2 * files["GB"] / files["both_s"],
        "files_over_memcpy": plain["both_s"] / files["both_s"],
        **update,
        "exposed_over_pull": update["exposed_s"] / update["update_pull_s"],
        "delta_stored_f32": by_way["delta, f32"]["stored"],
        "delta_stored_bf16": by_way["delta, bf16"]["stored"],
        "checksum_bits": 64.0 if fastest() == "xxh3_64" else 32.0,
    }
    if "mooncake" in by_way:
        row = by_way["mooncake"]
        summary |= {
            "mooncake_publish_gb_s": row["publish_gb_s"],
            "mooncake_pull_gb_s": row["pull_gb_s"],
            "mooncake_gb_s": 2 * row["GB"] / row["both_s"],
        }
    publish("weights", rows, summary, arguments.json, packages=("torch", "xxhash", "zstandard"))


if __name__ == "__main__":
    main()
