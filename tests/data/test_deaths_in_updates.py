"""Real processes that die or hang while they load weights: the others go on, and a successor loads the same version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from rollart.control.background import Background
from rollart.control.llm_proxy import LLMProxy
from rollart.data.inference import RemoteInference
from rollart.data.runtime import LocalRuntime
from rollart.data.weights import open_store
from rollart.protocols import Runtime

TARGET = "tests.data.mortal_engines:worker"
SHUTDOWN_S = 20.0


def pairs(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((1000,), float(version + place))) for place, name in enumerate("ab")]


async def start(runtime: Runtime, name: str, weights: dict[str, Any], **faults: str) -> RemoteInference:
    at = {int(key.removeprefix("at_")): what for key, what in faults.items()}
    return RemoteInference(await runtime.spawn(name, TARGET, {"weights": weights, "faults": at}))


def test_engines_that_die_or_hang_in_an_update_are_left_out_and_their_successor_loads_the_same(tmp_path: Path) -> None:
    weights = {"folder": str(tmp_path / "weights"), "bucket_bytes": 4096, "keep": 3}
    writer = open_store(**weights)
    said: list[str] = []

    async def scenario() -> None:
        runtime, background = LocalRuntime(tmp_path / "logs"), Background()
        try:
            dying, hanging, sound = await asyncio.gather(
                start(runtime, "dying", weights, at_1="die"),
                start(runtime, "hanging", weights, at_2="hang"),
                start(runtime, "sound", weights),
            )
            proxy = LLMProxy([dying, hanging, sound], background=background, say=said.append, answer_timeout_s=6.0)
            for version, living in ((0, {"dying", "hanging", "sound"}), (1, {"hanging", "sound"}), (2, {"sound"})):
                writer.publish(version, pairs(version))
                await proxy.prefetch(version)
                await proxy.suspend()
                await proxy.update(version)
                await proxy.resume()
                assert {name: each.version for name, each in (await proxy.stats()).items()} == dict.fromkeys(
                    living, version
                )
            successor = await start(runtime, "successor", weights)
            await proxy.join(successor)
            sums = [2000.0, 3000.0]
            assert await proxy.logprobs([1, 2]) == {"sound": sums, "successor": sums}
            await background.drain(SHUTDOWN_S)
        finally:
            await runtime.shutdown()

    asyncio.run(scenario())
    assert ["'hanging', update to version 2: no answer within 6 s" in line for line in said] == [True]
    assert [float(tensor.sum()) for _, tensor in open_store(**weights).fetch(1)] == [1000.0, 2000.0]
