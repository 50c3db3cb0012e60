"""Megatron-Core on a CPU, for tests alone: the current device is the CPU, and what asks for a GPU lands there."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.data.trainers.rank_group import RankHost

TARGET = f"{__name__}:MegatronHost"


class NoStream:
    """Stands for a stream where everything happens in order anyway."""

    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, _: Any) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """All is done."""


class CudaIsCpu(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU, and say that they are on a GPU where that is asked by name of type."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **kwargs)


class MegatronHost(RankHost):
    """A rank's process that takes its CPU for a GPU."""

    def get_ready(self) -> None:
        """Such a mode belongs to the thread that enters it."""
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.current_stream = lambda *_: NoStream()  # type: ignore[assignment,return-value]
        torch.cuda.Stream = NoStream  # type: ignore[assignment,misc]
        torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
        CudaIsCpu().__enter__()
