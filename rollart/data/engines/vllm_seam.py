"""vLLM's engine as ours sees it: what it is asked, what it tells, and how it is started in this process.

Left out: vLLM itself (`vllm_core.py`), and who may run when (`vllm.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from rollart.errors import ConfigError, to_install
from rollart.protocols import Payload
from rollart.types import Sampling

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine is in this process
    "VLLM_NO_USAGE_STATS": "1",  # nobody is told
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # to compile its sampler takes longer than most tests
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # others work on the same cores
}
"""Besides, unless it is set."""


class News(NamedTuple):
    """What one step of vLLM brought for one request: new tokens, or the log-probabilities of its prompt.

    `cached`: tokens of its prompt that vLLM did not compute. `ended`: vLLM runs it no more. `left`: the blocks of a
    request that was to leave them.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    cached: int
    ended: str
    scores: list[float]
    left: list[int]


@dataclass(slots=True)
class Parcel:
    """Keys and values that came for a request, of its tokens from `start` to `end`: whole blocks, of all ranks in turn.

    `used`: they join on to what vLLM has of the request already.
    """

    start: int
    end: int
    blocks: Payload
    used: bool = False

    @property
    def num_tokens(self) -> int:
        """Those whose keys and values came and were of use."""
        return self.end - self.start if self.used else 0


class Core(Protocol):
    """vLLM's engine; see `vllm_core.py`. `block_bytes`: of a block's keys and values, 0 where none are handed over."""

    vocabulary: int
    block_tokens: int
    block_bytes: int

    @property
    def num_requests(self) -> int:
        """Requests that it runs or has queued."""
        ...

    def add(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        max_tokens: int,
        seed: int,
        leaves: bool = False,
        parcel: Parcel | None = None,
    ) -> None:
        """Queue a request behind the others. `sampling` without its stop strings and `max_tokens`.

        `leaves`: its blocks are told when it has ended, and stay until the next step. `parcel`: with what it begins.
        """
        ...

    def score(self, request_id: str, tokens: list[int]) -> None:
        """Queue a request for the log-probability of each of the tokens but the first, from no cache."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """End requests without news; unknown ids are nothing to do."""
        ...

    def step(self) -> list[News]:
        """Advance by one step."""
        ...

    def cached(self, tokens: list[int]) -> list[int]:
        """The blocks that the prefix cache has of the tokens, the last one left out."""
        ...

    def read(self, block_ids: Sequence[int]) -> Payload:
        """Keys and values of blocks."""
        ...

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace all weights in place. Nothing may run. Whatever it raises leaves the weights unusable."""
        ...

    def forget(self, clean: bool = False) -> None:
        """Empty the prefix cache; `clean`: and the memory of all keys and values. Nothing may run."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back; the weights go to the host. Nothing may run."""
        ...

    def wake(self, weights_only: bool = False) -> None:
        """Take it again."""
        ...


def start_here(model_folder: str, device: str, **arguments: Any) -> Core:
    """vLLM in this process, whose environment it is told by. Raises ConfigError when it is not installed."""
    os.environ.update(ENVIRON)
    for name, value in ON_CPU.items() if device == "cpu" else ():
        os.environ.setdefault(name, value)
    try:
        module = import_module("rollart.data.engines.vllm_core")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        raise ConfigError(f"engine: 'vllm' is not installed; {to_install('vllm')}") from error
    core: Core = module.InProcess(model_folder, device=device, **arguments)
    return core
