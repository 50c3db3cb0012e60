"""Trained tokens per second: two ranks of trainer fsdp2 with one thread each, against one process with two threads.

What is compared. The same train steps on the same batches of random trajectories (prompts of 32 tokens, responses of 16
to 256, or to 64 with --quick; eight groups of four) with the same random Qwen3 of --layers layers and width --hidden:

* `embedded`: the trainer of one process, in this process, on two threads.
* `fsdp2, data`: two processes that take half of every batch each and hold half of every weight.
* `fsdp2, tensor`: two processes that compute every token together, each with half of every matrix.

Ranks talk by gloo over the loopback interface, so that what is measured is the cost of sharding on a CPU, with nothing
gained in memory bandwidth or arithmetic. A figure is trained tokens over the seconds of a step, as the trainer reports
them, the median of the steps after the first. `publish_s` is how long the weights take into a folder in shared memory.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from report import parser, publish
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from rollart.data.runtime import LocalRuntime
from rollart.data.trainers.embedded import EmbeddedTrainer
from rollart.data.training import RemoteTrainer, form_group
from rollart.data.weights import FileWeightStore
from rollart.data.weights_folder import SHARED_MEMORY
from rollart.sections import TrainConfig
from rollart.types import Group, GroupSpec, TrainBatch, Trajectory, Turn

VOCABULARY = 2048
PROMPT_TOKENS, GROUPS, MEMBERS = 32, 8, 4
STORE = {"bucket_bytes": 64 << 20, "keep": 2}
RANKS = 2
LOOPBACK = "127.0.0.1"


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """A random Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def batch(step: int, longest: int) -> TrainBatch:
    """Random tokens, at the log-probability that a random model gives them."""
    draw = random.Random(step)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(number)]

    groups = []
    for index in range(GROUPS):
        prompt = tokens(PROMPT_TOKENS)
        members = []
        for number in range(MEMBERS):
            action = tokens(draw.randint(16, longest))
            turn = Turn(prompt, action, [-7.6] * len(action), [0] * len(action))
            members.append(Trajectory(f"{index}.{number}", f"g{index}", "task", 0, [turn], reward=float(number % 2)))
        groups.append(Group(GroupSpec(index, "task", 0), members))
    return TrainBatch(step, 0, groups)


def one_process(folder: Path, options: TrainConfig, batches: list[TrainBatch]) -> dict[str, float]:
    """Tokens per second of each step but the first, and the seconds of a publication."""
    torch.set_num_threads(RANKS)
    trainer = EmbeddedTrainer(str(folder), options, temperature=1.0, seed=0)
    reports = [trainer.train_step(each) for each in batches]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
        seconds = timed(lambda: FileWeightStore(place, **STORE).publish(1, trainer.tensors()))
    torch.set_num_threads(1)
    return measured(reports, seconds)


async def two_ranks(folder: Path, options: TrainConfig, batches: list[TrainBatch]) -> dict[str, float]:
    """As `one_process`."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
        what = {
            "model_folder": str(folder),
            "trainer": "fsdp2",
            "options": to_builtins(options),
            "device": "cpu",
            "temperature": 1.0,
            "seed": 0,
            "weights": {"folder": place, **STORE},
        }
        runtime = LocalRuntime(Path(place) / "logs")
        try:
            spawned = (runtime.spawn(f"rank-{rank}", "rollart.data.roles:training", what) for rank in range(RANKS))
            workers = await asyncio.gather(*spawned)
            await form_group(workers, [LOOPBACK] * RANKS)
            trainer = RemoteTrainer(*workers)
            reports = [await trainer.train_step(each) for each in batches]
            began = time.perf_counter()
            await trainer.publish(1)
            return measured(reports, time.perf_counter() - began)
        finally:
            await runtime.shutdown()


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(reports: list[Any], publish_s: float) -> dict[str, float]:
    """The first step also makes the optimizer's state and is left out."""
    speed = statistics.median(each.trained_tokens / each.seconds for each in reports[1:])
    return {"trained_tokens_per_s": speed, "publish_s": publish_s, "last_loss": reports[-1].loss}


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--hidden", type=int, default=256, help="width of the model")
    options.add_argument("--layers", type=int, default=8, help="layers of the model")
    arguments = options.parse_args()
    logging.disable_progress_bar()
    longest, steps = (64, 3) if arguments.quick else (256, 6)
    plain = TrainConfig(micro_batch_tokens=2048)
    split = TrainConfig(micro_batch_tokens=2048, tensor_parallel=RANKS)
    batches = [batch(step, longest) for step in range(steps)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder, 2 if arguments.quick else arguments.layers, arguments.hidden)
        found = {
            "embedded": one_process(folder, plain, batches),
            "fsdp2, data": asyncio.run(two_ranks(folder, plain, batches)),
            "fsdp2, tensor": asyncio.run(two_ranks(folder, split, batches)),
        }
    alone = found["embedded"]["trained_tokens_per_s"]
    rows = [{"trainer": name, **each, "ratio": each["trained_tokens_per_s"] / alone} for name, each in found.items()]
    summary = {
        "embedded_tokens_per_s": alone,
        "data_ratio": rows[1]["ratio"],
        "tensor_ratio": rows[2]["ratio"],
        "publish_s": found["fsdp2, data"]["publish_s"],
    }
    publish("fsdp", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
