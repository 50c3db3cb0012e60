"""An engine whose updates may kill its process or never end; what it loads, it remembers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from rollart.data.inference import InferenceWorker
from rollart.data.weights import open_store
from rollart.protocols import Tensors
from rollart.types import EngineStats, GenRequest, GenResult, ParameterInfo

MODEL = [ParameterInfo("a", (1000,), "float32"), ParameterInfo("b", (1000,), "float32")]


class MortalEngine:
    """`faults`: version -> "die" or "hang", after half of the tensors."""

    def __init__(self, model_folder: str, faults: dict[int, str]) -> None:
        self.faults, self.version = faults, 0
        self.sums: dict[str, float] = {}

    def update(self, version: int, tensors: Tensors) -> None:
        for name, tensor in tensors:
            self.sums[name] = float(tensor.sum())
            match self.faults.get(version):
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    threading.Event().wait()
        self.version = version

    def add(self, request: GenRequest) -> None: ...

    def abort(self, request_id: str) -> GenResult | None:
        return None

    def release(self, trajectory_id: str) -> None: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...

    def step(self) -> list[GenResult]:
        return []

    def has_work(self) -> bool:
        return False

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [self.sums[name] for name in sorted(self.sums)]

    def parameters(self) -> list[ParameterInfo]:
        return MODEL

    def stats(self) -> EngineStats:
        return EngineStats(version=self.version)


def worker(weights: dict[str, Any], faults: dict[int, str]) -> InferenceWorker:
    """What lives in the process."""
    return InferenceWorker("", MortalEngine, {"faults": faults}, open_store(**weights))
