"""Megatron-Core on a CPU, for tests alone: its current device is the CPU, and what asks for a GPU lands there.

A process that called `pretend` stays so. It does not belong to the product: a worker of a test is told to call it, or
finds it by `megatron_on_cpu` in front of its path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.data.trainers.rank_group import RankHost

TARGET = f"{__name__}:MegatronHost"
IN_PATH = Path(__file__).parent / "megatron_on_cpu"
MAKERS = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
"""Functions that Megatron calls with the device `cuda`."""


class NoStream:
    """Stands for a stream where everything happens in order anyway."""

    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, _: Any) -> None:
        """It has happened."""

    def record_event(self, _: Any = None) -> NoStream:
        """An event, which has happened; one can wait for it too."""
        return NoStream()

    def synchronize(self) -> None:
        """All is done."""


def pretend() -> None:
    """From now on this process takes its CPU for a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: NoStream()  # type: ignore[assignment,return-value]
    torch.cuda.Stream = NoStream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment,method-assign]
    torch.Tensor.type = _type_of(torch.Tensor.type)  # type: ignore[assignment,method-assign]
    with torch.device("cpu"):
        torch.empty(0)  # torch looks once, at the first such context, which functions take a device
    for name in MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.distributed.all_to_all_single = _with_lists(torch.distributed.all_to_all_single)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers of rows come as lists from a GPU, but as tensors where Megatron finds them on the CPU already."""

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        rows = {name: each.tolist() for name, each in kwargs.items() if isinstance(each, torch.Tensor)}
        return exchange(*args, **{**kwargs, **rows})

    return exchanged


def _type_of(convert: Callable[..., Any]) -> Callable[..., Any]:
    """What a tensor says of its type is said as on a GPU; conversions are as ever."""

    def type_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = convert(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of


class MegatronHost(RankHost):
    """A rank's process that takes its CPU for a GPU."""

    def __init__(self) -> None:
        pretend()
        super().__init__()
