"""How weights enter vLLM: a weight-transfer engine of vLLM's own kind, called `rollart`, in each of its workers.

A worker that is told `worker_extension_cls = "rollart.data.engines.vllm_weights.Extension"` imports this file, and so
knows the engine; `vllm serve` can be told so too. Tensors come by value, as a part of the call, or as the path of a
safetensors file that the worker can read.

Invariant: what vLLM loads is its own copy. It keeps what it was given until a layer is complete, and a layer that it
fuses of several parameters may span several calls, by when the giver may have written other weights in their place.
Left out: which weights are expected (`parameters.py`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollart.data.engines.vllm_connector import read_blocks

SHARED_MEMORY = Path("/dev/shm")
NAME = "rollart"
EXTENSION = f"{__name__}.Extension"


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is no connection to open."""


@dataclass
class Part(WeightTransferUpdateInfo):
    """Some of the weights: `tensors` by name, or those of a `file`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    file: str = ""


class Transfer(WeightTransferEngine[Nothing, Part]):
    """Loads weights of checkpoint format, part by part, into the tensors that vLLM's kernels use."""

    init_info_cls = Nothing
    update_info_cls = Part
    supports_draft_weight_update = False
    _begun = False

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Get every layer ready to be loaded, also after an update that broke off."""
        if self._begun:
            self.finish_weight_update()
        initialize_layerwise_reload(self.model)
        self._begun = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part. The base class would wait for an accelerator, also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Part) -> None:
        """Hand copies to the model."""
        tensors = safetensors.torch.load_file(update_info.file) if update_info.file else update_info.tensors
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors.items())

    def finish_weight_update(self) -> None:
        """Finish the layers that waited for more.

        On a CPU a head that is tied to the embedding has a packed copy of it, which vLLM 0.32 does not renew.
        """
        self._begun = False
        finalize_layerwise_reload(self.model, self.model_config)
        for head in _tied_heads(self.model) if self.device.type == "cpu" else ():
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Nothing to close."""


def _tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """Heads that hold the parameter of an embedding."""
    modules = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [module for module in modules if isinstance(module, ParallelLMHead)]
    embeddings = [module.weight for module in modules if module not in heads]
    return [head for head in heads if any(head.weight is weight for weight in embeddings)]


class Extension:
    """What each worker can do besides."""

    model_runner: Any
    vllm_config: Any

    def rollart_read_blocks(self, num_blocks: int, block_ids: Sequence[int]) -> Tensor:
        """Keys and values by block, as bytes."""
        return read_blocks(self.vllm_config.compilation_config.static_forward_context, num_blocks, block_ids)

    def rollart_unname_shared_memory(self) -> None:
        """Take the names from what vLLM's processes on a CPU share: by now all have it, and vLLM leaves it behind."""
        if group := os.environ.get("VLLM_DIST_IDENT"):
            for path in SHARED_MEMORY.glob(f"{glob.escape(group)}-*-cpushm_*"):
                path.unlink(missing_ok=True)

    def rollart_clean_cache(self) -> None:
        """Set the memory of all keys and values to zero."""
        for tensor in self.model_runner.kv_caches:
            tensor.zero_()


WeightTransferEngineFactory.register_engine(NAME, Transfer)
