"""Keys and values that enter and leave vLLM: a KV connector of vLLM's own kind, between its scheduler and its workers.

A request says in its `kv_transfer_params` what it wants: to `leave` what was computed for it, whose blocks then come
back with its last output; or to begin with the blocks that have `arrived`. Blocks travel whole, as they lie in memory:
how keys and values lie inside one is the affair of vLLM's kernels, which differ from device to device.

Invariants: blocks are written before the step that first reads them, and only into those that belong to the request
alone; what does not join on to the tokens that vLLM has of the request already is not used. Nothing of a request is
kept here: what has arrived goes with the request that it came for.
Left out: how blocks travel, and under which weights they may be used (`vllm.py`, `data/handoff.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from rollart.data.engines.vllm_seam import Parcel
from rollart.errors import ConfigError
from rollart.protocols import Payload

LEAVES, ARRIVED, LEFT = "rollart_leaves", "rollart_arrived", "rollart_left"
"""Of a request's parameters: whether its blocks are wanted, the `Parcel` that came for it. Of its output's: blocks."""


def connector_config() -> KVTransferConfig:
    """What tells vLLM to use the connector."""
    return KVTransferConfig(kv_connector=Connector.__name__, kv_connector_module_path=__name__, kv_role="kv_both")


@dataclass
class Load:
    """Blocks of one request and where they go; `skip`: the first so many are there already."""

    block_ids: list[int]
    skip: int
    blocks: Payload


@dataclass
class Loads(KVConnectorMetadata):
    """What a step's workers write before it."""

    num_blocks: int
    """That vLLM has in all."""
    loads: list[Load]


class Connector(KVConnectorBase_V1):
    """Both of its ends. Raises ConfigError for a model that keeps anything but keys and values of every token."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise ConfigError("roles.prefill: vLLM hands over full attention alone, which not all of the model's is")
        self.block_tokens: int = groups[0].kv_cache_spec.block_size
        self.num_blocks: int = kv_cache_config.num_blocks
        self._loads: list[Load] = []

    # --------------------------------------------------------------------------------------------------- scheduler
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens' keys and values are there beyond those that vLLM has."""
        parcel = _arrived(request)
        if parcel is None:
            return 0, False
        parcel.used = parcel.start <= num_computed_tokens
        return max(0, parcel.end - num_computed_tokens) if parcel.used else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks. Set back later, it is computed anew."""
        parcel = _arrived(request)
        if parcel is None:
            return
        del request.kv_transfer_params[ARRIVED]
        if num_external_tokens:
            first, last = parcel.start // self.block_tokens, -(-parcel.end // self.block_tokens)
            skip = (parcel.end - num_external_tokens) // self.block_tokens - first
            self._loads.append(Load(blocks.get_block_ids()[0][first:last], skip, parcel.blocks))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:  # noqa: ARG002
        """What this step's workers have to write."""
        loads, self._loads = self._loads, []
        return Loads(self.num_blocks, loads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tells the blocks of a request that was asked for them; they stay as they are until the next step."""
        leaves = bool(request.kv_transfer_params and request.kv_transfer_params.get(LEAVES))
        return False, {LEFT: block_ids} if leaves else None

    # ----------------------------------------------------------------------------------------------------- workers
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write what has arrived."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for load in loads.loads:
            write_blocks(forward_context.no_compile_layers, loads.num_blocks, load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All has been written before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept while it is computed."""

    def wait_for_save(self) -> None:
        """Nothing is under way."""


def _arrived(request: Any) -> Parcel | None:
    return (request.kv_transfer_params or {}).get(ARRIVED)


def read_blocks(layers: Mapping[str, Any], num_blocks: int, block_ids: Sequence[int]) -> Tensor:
    """Blocks by their ids as they lie in the memory of this worker, [block, bytes] on the host."""
    caches = _caches(layers, num_blocks)
    ids = torch.tensor(list(block_ids), dtype=torch.long)
    blocks = torch.empty(len(ids), sum(map(_block_bytes, caches)), dtype=torch.uint8)
    offset = 0
    for cache in caches:
        size = _block_bytes(cache)
        found = cache[ids.to(cache.device)].contiguous()
        blocks[:, offset : offset + size] = found.view(len(ids), -1).view(torch.uint8).cpu()
        offset += size
    return blocks


def write_blocks(layers: Mapping[str, Any], num_blocks: int, load: Load) -> None:
    """This worker's part of what `read_blocks` gave on all of them."""
    caches = _caches(layers, num_blocks)
    num_bytes = sum(map(_block_bytes, caches))
    of_ranks = torch.frombuffer(load.blocks, dtype=torch.uint8).view(-1, len(load.block_ids), num_bytes)
    blocks, offset = of_ranks[get_tensor_model_parallel_rank(), load.skip :], 0
    ids = torch.tensor(load.block_ids[load.skip :], dtype=torch.long)
    for cache in caches:
        size = _block_bytes(cache)
        part = blocks[:, offset : offset + size].contiguous().view(cache.dtype).view(-1, *cache.shape[1:])
        cache[ids.to(cache.device)] = part.to(cache.device)
        offset += size


def _caches(layers: Mapping[str, Any], num_blocks: int) -> list[Tensor]:
    """The memory for keys and values, by block; that which layers share, once. A kernel's block may be smaller."""
    found: dict[int, Tensor] = {}
    for layer in layers.values():
        cache = getattr(layer, "kv_cache", None)
        if isinstance(cache, Tensor) and cache.numel():
            found.setdefault(cache.data_ptr(), cache.unflatten(0, (num_blocks, -1)))
    return list(found.values())


def _block_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()
