"""vLLM's `LLMEngine` in this process: token ids in, token ids with log-probabilities out, weights in place.

Invariants: log-probabilities are those of the distribution that was sampled from; vLLM's own tokenizer, stop strings
and generation config play no part; a step that has returned has left nothing under way; where one of vLLM's own worker
processes dies this one ends, so that the run sees it and starts another; what these share on a CPU has no name.
Left out: who may run when (`vllm.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import wraps
from multiprocessing import connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from rollart.data.engines.vllm_connector import ARRIVED, LEAVES, LEFT, connector_config
from rollart.data.engines.vllm_seam import News, Parcel
from rollart.data.engines.vllm_weights import EXTENSION, NAME
from rollart.data.stores.bucket import in_buckets
from rollart.engine_options import check_vllm, unknown_argument
from rollart.errors import ConfigError, GenerationError, boundary
from rollart.protocols import Payload
from rollart.types import Sampling

P = ParamSpec("P")
T = TypeVar("T")
LAST_WORDS_S = 1.0
"""How long after a fault vLLM's worker processes are looked at: that one of them has died is seen a little later."""
BUCKET_BYTES = 64 << 20
"""Weights that vLLM is handed at once."""
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False}
"""Unless options say otherwise: no compilation, not nearly all of the machine's memory, and prompts read whole, since
vLLM 0.32 cannot draw by a seed there for a prompt that was read in parts."""


def _mortal(method: Callable[Concatenate[InProcess, P], T]) -> Callable[Concatenate[InProcess, P], T]:
    """A method of `InProcess` whose fault, where a worker process is gone, is nobody's to hear: this process ends."""

    @wraps(method)
    def called(self: InProcess, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            if self.has_lost_workers():
                end_this_process()
            raise

    return called


def end_this_process() -> None:
    """As the system would; where all of a run is one process, that stops after its step, with a checkpoint."""
    sys.stderr.write("rollart: a worker process of vLLM has died, and what it held; this process ends, too\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)


class InProcess:
    """Implements `vllm_seam.Core`.

    `max_requests` run at once, of `max_tokens` each, with `step_tokens` in a step; `hands_over`: keys and values may
    leave and come in; `options`: of `EngineArgs`.
    Raises ConfigError for options and devices that there are not, GenerationError when vLLM does not start.
    """

    def __init__(
        self,
        model_folder: str,
        max_requests: int,
        max_tokens: int,
        step_tokens: int,
        device: str,
        hands_over: bool = False,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        if device != current_platform.device_type:
            raise ConfigError(
                f"engine: the pool says {device!r}, but the vLLM that is installed computes on "
                f"{current_platform.device_type!r}; install the other build, or set the pool's device"
            )
        mine: dict[str, Any] = {
            "model": model_folder,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_num_seqs": max_requests,
            "max_model_len": max_tokens,
            "max_num_batched_tokens": step_tokens,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",
            "logprobs_mode": "processed_logprobs",
            "async_scheduling": False,
            "disable_log_stats": True,
            "weight_transfer_config": WeightTransferConfig(backend=NAME),
            "worker_extension_cls": EXTENSION,
            "kv_transfer_config": connector_config() if hands_over else None,
        }
        _check(options)
        given = {**(ON_CPU if device == "cpu" else {}), **options}
        if given.get("enable_chunked_prefill") is False:
            mine["max_num_batched_tokens"] = max(step_tokens, max_tokens)
        with _refusing(model_folder):
            config = EngineArgs(**given, **mine).create_engine_config()
        with boundary(GenerationError, f"starting vLLM with the model in {model_folder}"):
            self._llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
            self._llm.collective_rpc("rollart_unname_shared_memory")
        self._llm.model_executor.register_failure_callback(end_this_process)
        self.vocabulary: int = config.model_config.get_vocab_size()
        self.block_tokens: int = config.cache_config.block_size
        self.block_bytes = memoryview(self.read([0])).nbytes if hands_over else 0

    @property
    def num_requests(self) -> int:
        """Requests that it runs or has queued."""
        return self._llm.get_num_unfinished_requests()

    def has_lost_workers(self) -> bool:
        """Whether one of the processes in which vLLM computes, where they are not this one, has died."""
        executor = self._llm.model_executor
        sentinels = [each.proc.sentinel for each in getattr(executor, "workers", None) or ()]
        return getattr(executor, "is_failed", False) or bool(sentinels and connection.wait(sentinels, LAST_WORDS_S))

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
        """Queue a request."""
        wishes: dict[str, Any] = {LEAVES: True} if leaves else {}
        if parcel is not None:
            wishes[ARRIVED] = parcel
        self._add(
            request_id,
            tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed if sampling.temperature else None,
            max_tokens=max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,  # of the sampled token alone
            extra_args={"kv_transfer_params": wishes} if wishes else None,
        )

    def score(self, request_id: str, tokens: list[int]) -> None:
        """Queue a request for log-probabilities, which vLLM computes without reading the prefix cache."""
        self._add(request_id, tokens, temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def _add(self, request_id: str, tokens: list[int], **sampling: Any) -> None:
        params = SamplingParams(
            **sampling,
            ignore_eos=True,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
        self._llm.add_request(request_id, tokens_input(tokens), params)

    def abort(self, request_ids: list[str]) -> None:
        """End requests without news."""
        if request_ids:
            self._llm.abort_request(request_ids)

    @_mortal
    def step(self) -> list[News]:
        """Advance by one step."""
        return [_news(output) for output in self._llm.step()]

    def cached(self, tokens: list[int]) -> list[int]:
        """The blocks that the prefix cache has of the tokens, the last one left out."""
        core = self._llm.engine_core.engine_core
        request = Request("", tokens, SamplingParams(max_tokens=1), None, block_hasher=core.request_block_hasher)
        blocks: list[int] = core.scheduler.kv_cache_manager.get_computed_blocks(request)[0].get_block_ids()[0]
        return blocks

    @_mortal
    def read(self, block_ids: Sequence[int]) -> Payload:
        """Keys and values of blocks, of all ranks in turn."""
        num_blocks = self._llm.engine_core.engine_core.scheduler.get_kv_connector().num_blocks
        parts: list[Tensor] = self._llm.collective_rpc("rollart_read_blocks", args=(num_blocks, list(block_ids)))
        flat = parts[0].flatten() if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        return flat.numpy().data

    @_mortal
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights in place, bucket by bucket. A tensor's memory may hold the next one already by then."""
        self._llm.collective_rpc("start_weight_update")
        try:
            for bucket in in_buckets(((name, tensor.clone()) for name, tensor in tensors), BUCKET_BYTES):
                self._llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": bucket}})
        except Exception:
            with contextlib.suppress(Exception):  # where the fault is vLLM's, it has ended the update itself
                self._llm.collective_rpc("finish_weight_update")
            raise
        self._llm.collective_rpc("finish_weight_update")

    @_mortal
    def forget(self, clean: bool = False) -> None:
        """Empty the prefix cache; `clean`: and its memory. Raises GenerationError while requests run."""
        if not self._llm.reset_prefix_cache():
            raise GenerationError("vLLM's prefix cache cannot be emptied while requests run")
        if clean:
            self._llm.collective_rpc("rollart_clean_cache")

    @_mortal
    def sleep(self) -> None:
        """Give the device's memory back; the weights go to the host."""
        self._llm.sleep(level=1)

    @_mortal
    def wake(self, weights_only: bool = False) -> None:
        """Take it again."""
        self._llm.wake_up(["weights"] if weights_only else None)


@contextlib.contextmanager
def _refusing(model_folder: str) -> Iterator[None]:
    """What vLLM finds wrong with its arguments before it starts is the config's fault."""
    what = f"vLLM refuses the model in {model_folder} with these engine_options"
    try:
        yield
    except ValidationError as error:
        reasons = {".".join(map(str, each["loc"][:1])): str(each["msg"]) for each in reversed(error.errors())}
        found = "; ".join(f"{key}: {text}" if key else text for key, text in reasons.items())
        raise ConfigError(f"{what}: {found.replace('Value error, ', '')}") from error
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _check(options: dict[str, Any]) -> None:
    check_vllm(options)
    known = [each.name for each in fields(EngineArgs)]
    for name in options:
        if name not in known:
            raise unknown_argument(name, known)


def _news(output: Any) -> News:
    completion, scores = output.outputs[0], output.prompt_logprobs
    return News(
        request_id=output.request_id,
        tokens=list(completion.token_ids) if completion.logprobs else [],
        logprobs=completion.logprobs.logprobs if completion.logprobs else [],
        cached=output.num_cached_tokens or 0,
        ended=completion.finish_reason or "",
        scores=scores.logprobs if scores else [],
        left=(output.kv_transfer_params or {}).get(LEFT, []),
    )
