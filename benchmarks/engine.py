"""Tokens per second of the embedded engine against `model.generate` of transformers, on one thread.

What is compared. Both sides serve the same requests with the same model: prompts of 32 random tokens, each wanting its
own number of tokens, drawn evenly from 16 to 256 (16 to 96 with --quick) with a fixed seed; end-of-sequence is off, so
every request runs to the length it wants. Both sample at temperature 1 from the whole vocabulary, in inference mode, on
one thread. The engine also returns a log-probability per token; `generate` is not asked for them.

* `generate` serves in static batches, as it must: it waits until a batch of C requests is there (or no more will come)
  and runs it to the longest of its members. Prompts have one length, so it pays no padding; it uses sdpa and its
  default (dynamic) cache.
* The engine has C slots and batches continuously: a request joins as soon as it is there and a slot is free.

Requests arrive by a Poisson process (fixed seed, the same times for both sides) at twice the rate that `generate` can
serve, measured once beforehand, so that neither side waits long for work. The figure is wanted tokens over the time
from the first arrival to the last result; tokens that `generate` makes beyond what a request wants do not count.
For C = 1 requests come one after the other, without arrival times. Sides alternate; each speed is the median of the
repetitions; `speedup_C` is the ratio of the medians, engine over `generate`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import random
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
from report import parser, publish
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from rollart.data.engines.embedded import EmbeddedEngine
from rollart.types import GenRequest, Sampling

PROMPT_TOKENS = 32
SHORTEST = 16


@dataclass(frozen=True)
class Wish:
    """A request of the workload: when it comes, what it says, how many tokens it wants."""

    arrival_s: float
    prompt: list[int]
    num_tokens: int


def workload(count: int, longest: int, vocabulary: int, rate: float, seed: int = 0) -> list[Wish]:
    """`count` requests arriving at `rate` per second (0: all at once)."""
    draw, now, wishes = random.Random(seed), 0.0, []
    for _ in range(count):
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        wishes.append(Wish(now, prompt, draw.randint(SHORTEST, longest)))
        now += draw.expovariate(rate) if rate else 0.0
    return wishes


def wait_until(began: float, arrival_s: float) -> None:
    """Sleep until a request has come."""
    time.sleep(max(0.0, began + arrival_s - time.perf_counter()))


def serve_static(model: Qwen3ForCausalLM, wishes: list[Wish], batch: int) -> float:
    """Seconds that `generate` takes in static batches."""
    began = time.perf_counter()
    for first in range(0, len(wishes), batch):
        group = wishes[first : first + batch]
        wait_until(began, group[-1].arrival_s)
        longest = max(wish.num_tokens for wish in group)
        prompts = torch.tensor([wish.prompt for wish in group])
        with torch.inference_mode():
            output = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert output.shape == (len(group), PROMPT_TOKENS + longest)
    return time.perf_counter() - began


def serve_continuous(engine: EmbeddedEngine, wishes: list[Wish], at_once: int) -> float:
    """Seconds that the engine takes; `at_once` = 1 adds a request only when the one before it has ended."""
    began = time.perf_counter()
    coming, num_done = 0, 0
    while num_done < len(wishes):
        while coming < len(wishes) and (at_once > 1 or coming == num_done):
            if began + wishes[coming].arrival_s > time.perf_counter():
                break
            wish = wishes[coming]
            sampling = Sampling(temperature=1.0, max_tokens=wish.num_tokens)
            engine.add(GenRequest(str(coming), str(coming), wish.prompt, sampling))
            coming += 1
        if not engine.has_work():
            wait_until(began, wishes[coming].arrival_s)
            continue
        for result in engine.step():
            assert len(result.tokens) == wishes[int(result.request_id)].num_tokens
            engine.release(result.request_id)
            num_done += 1
    return time.perf_counter() - began


def compare(folder: str, at_once: int, count: int, longest: int, repetitions: int) -> dict[str, float | int]:
    """Both sides on `count` requests, `at_once` at a time; a row of the report."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    engine = EmbeddedEngine(folder, slots=at_once, max_model_tokens=PROMPT_TOKENS + longest)
    vocabulary = model.config.vocab_size
    warm = workload(at_once, longest, vocabulary, rate=0.0, seed=1)
    serve_continuous(engine, warm, at_once)
    serve_static(model, warm, at_once)
    rate = 2 * at_once / serve_static(model, warm, at_once) if at_once > 1 else 0.0
    wishes = workload(count, longest, vocabulary, rate)
    wanted = sum(wish.num_tokens for wish in wishes)
    static, continuous = [], []
    for _ in range(repetitions):
        static.append(wanted / serve_static(model, wishes, at_once))
        continuous.append(wanted / serve_continuous(engine, wishes, at_once))
    ours, theirs = statistics.median(continuous), statistics.median(static)
    return {
        "at_once": at_once,
        "requests": count,
        "tokens": wanted,
        "generate_tokens_per_s": theirs,
        "engine_tokens_per_s": ours,
        "speedup": ours / theirs,
        "lowest": min(a / b for a, b in zip(continuous, static, strict=True)),
        "highest": max(a / b for a, b in zip(continuous, static, strict=True)),
    }


def make_model(folder: str, layers: int, hidden: int) -> None:
    """A random Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--model", metavar="FOLDER", help="a Hugging Face model; default: a random Qwen3")
    options.add_argument("--hidden", type=int, default=128, help="width of the random model")
    options.add_argument("--layers", type=int, default=4, help="layers of the random model")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    longest, batches, repetitions = (96, 2, 1) if arguments.quick else (256, 4, 3)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            make_model(folder, arguments.layers, arguments.hidden)
        source = arguments.model or folder
        rows = [compare(source, size, max(4, size * batches), longest, repetitions) for size in (1, 16, 64)]
    summary = {f"speedup_{row['at_once']}": row["speedup"] for row in rows}
    publish("engine", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
