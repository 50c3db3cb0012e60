"""The ranks of a trainer: how they find each other, and what they say to each other besides the model's own traffic.

The first rank listens on the loopback interface where all ranks are on one node, else on its node's address, on a port
that the system chooses; the others are told where. CPU tensors travel by gloo, those of GPUs by NCCL.

Invariants: whoever waits for a rank that is gone gets RankError, at once where its connections end, else after
`timeout_s`; what ranks agree on is the same on all of them. What this file leaves out: who starts ranks
(`data/training.py`) and what they compute.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rollart.errors import RankError, RollartError, boundary

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
BROKEN = ("gloo/", "NCCL", "Connection closed", "Connection reset", "timed out", "Timed out", "Broken pipe")
"""What torch says when a collective fails for the fault of another rank; it has no exception of its own for that."""


class Rendezvous(NamedTuple):
    """Where the ranks of a group meet."""

    host: str
    port: int


class Listening:
    """The meeting place, held by the first rank. `host`: an address of this node that the others reach."""

    def __init__(self, host: str, num_ranks: int, timeout_s: float) -> None:
        with boundary(RankError, f"listening for the other ranks on {host}"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family) as bound:
                bound.bind((host, 0))
                bound.listen(socket.SOMAXCONN)
                self.place = Rendezvous(host, bound.getsockname()[1])
                self.store = TCPStore(
                    *self.place,
                    num_ranks,
                    True,
                    datetime.timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                    master_listen_fd=bound.detach(),
                )


class Ranks:
    """This process' place among `size` ranks; there is one such group in a process at a time.

    `device`: what torch calls the device of this rank. `host`: an address of this node. `listening`: of the first rank.
    Raises RankError when the others do not come within `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        place: Rendezvous,
        host: str,
        timeout_s: float,
        listening: Listening | None = None,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._limit = limit = datetime.timedelta(seconds=timeout_s)
        self._set_interface(host)
        with collective(f"rank {rank} joins {size - 1} others"):
            store = listening.store if listening else TCPStore(*place, size, False, limit)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=limit,
                device_id=self.device if self.device.type == "cuda" else None,
            )
            dist.barrier()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._chose_interface:
            os.environ.pop(GLOO_INTERFACE, None)

    def _set_interface(self, host: str) -> None:
        """gloo asks the environment for its interface, else the name of this machine, which may lead anywhere."""
        found = [name for name, each in psutil.net_if_addrs().items() if any(one.address == host for one in each)]
        self._chose_interface = bool(found) and GLOO_INTERFACE not in os.environ
        if self._chose_interface:
            os.environ[GLOO_INTERFACE] = found[0]

    def part(self, parts: Sequence[list[int]]) -> dist.ProcessGroup:
        """Of disjoint parts of the ranks, the group of this rank's, which waits no longer than all of them do."""
        if len(parts) == 1:
            return dist.distributed_c10d._get_default_group()
        groups = [dist.new_group(part, timeout=self._limit) for part in parts]  # every rank makes every group
        return next(group for part, group in zip(parts, groups, strict=True) if self.rank in part)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank; of one shape and dtype everywhere."""
        dist.broadcast(tensor, 0)

    def share(self, data: bytes, source: int = 0) -> bytes:
        """The bytes that rank `source` gives; those of others are not looked at."""
        size = torch.tensor([len(data)], dtype=torch.long)
        dist.broadcast(size, source)
        if self.rank != source:
            data = bytes(int(size))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if int(size) else torch.empty(0)
        if int(size):
            dist.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def total(self, values: Mapping[str, float], counts: bool = True) -> dict[str, float]:
        """Each value, by the same names on all ranks, summed over those ranks that count."""
        held = list(values.values()) if counts else [0.0] * len(values)
        sums = torch.tensor(held, dtype=torch.float64)
        dist.all_reduce(sums)
        return dict(zip(values, sums.tolist(), strict=True))

    @contextlib.contextmanager
    def together(self, kind: type[RollartError], what: str) -> Iterator[None]:
        """All ranks do what follows, or all raise: each its own error, else that of the first rank that failed."""
        failed: RollartError | None = None
        try:
            with boundary(kind, what):
                yield
        except RollartError as error:
            failed = error
        ranks = torch.zeros(self.size, dtype=torch.long)
        ranks[self.rank] = failed is not None
        dist.all_reduce(ranks)
        if not ranks.any():
            return
        first = int(ranks.nonzero()[0])
        said = self.share(str(failed).encode(), first).decode(errors="replace")
        raise failed or kind(f"rank {first}: {said}")


@contextlib.contextmanager
def collective(what: str) -> Iterator[None]:
    """RankError, for whatever torch raises when another rank is gone or too late."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, RollartError) or not (isinstance(error, dist.DistError) or _is_broken(str(error))):
            raise
        raise RankError(
            f"{what}: another rank is gone, or was silent for longer than train.collective_timeout_s ({text})"
        ) from error


def _is_broken(text: str) -> bool:
    return any(words in text for words in BROKEN)
