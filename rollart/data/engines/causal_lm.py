"""A Hugging Face causal LM as the engine sees it: packed logits, plain log-probabilities, weights in place.

Invariant: weights change only through `load`, which checks everything before it writes anything.
Left out: what the tokens mean and where their keys and values live.

Shapes: N packed tokens, R rows whose logits count, T tokens of one sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollart.data.engines.adapter import Adapter
from rollart.data.engines.attention import ATTENTION, Plan
from rollart.data.engines.parameters import info_of, vetted
from rollart.errors import ConfigError, GenerationError, boundary
from rollart.protocols import FrozenTensors, Tensors
from rollart.sections import LoraConfig
from rollart.types import ParameterInfo


class CausalLM:
    """The model of a local folder. Raises ConfigError for a wrong folder, GenerationError for a model out of reach."""

    def __init__(
        self,
        folder: str,
        max_model_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
    ) -> None:
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"{folder}: not a model folder (no config.json)")
        with boundary(GenerationError, f"loading the model in {folder}"), _no_progress_bar():
            config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
            _check_positions(config, max_model_tokens)
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=dtype, attn_implementation=ATTENTION
            )
        self._model.eval().requires_grad_(False).to(device)
        self._device = device
        self._adapter = Adapter(self._model, lora) if lora is not None else None
        embeddings: Any = self._model.get_input_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.group: int = config.num_attention_heads // self.num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def logits(self, plan: Plan) -> Tensor:
        """Run one pass; the logits that the plan asks for, [R, V]."""
        output = self._model(
            input_ids=plan.tokens_N[None],
            position_ids=plan.positions_N[None],
            use_cache=False,
            logits_to_keep=plan.last,
            plan=plan,
        )
        return output.logits[0]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, by transformers' own attention and without any cache."""
        tokens_1T = torch.tensor([list(tokens)], device=self._device)
        with self._plain_attention():
            logits_TV = self._model(input_ids=tokens_1T, use_cache=False).logits[0, :-1].float()
        return logits_TV.log_softmax(-1).gather(1, tokens_1T[0, 1:, None])[:, 0].tolist()

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        self._model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self._model.set_attn_implementation(ATTENTION)

    def parameters(self) -> list[ParameterInfo]:
        """Name, shape and dtype of every tensor; tied ones once, under the name of the first; or of the adapter."""
        if self._adapter is not None:
            return self._adapter.parameters()
        return [info_of(name, parameter) for name, parameter in self._model.named_parameters()]

    def load(self, tensors: Tensors) -> None:
        """Copy weights in place, or merge an adapter; on the CPU, keep weights that nobody changes any more.

        Raises WeightsError, with nothing changed, unless names, shapes and dtypes agree.
        """
        kept = isinstance(tensors, FrozenTensors) and self._device.type == "cpu"
        given = dict(vetted({info.name: info for info in self.parameters()}, tensors))
        if self._adapter is not None:
            self._adapter.merge(given)
            return
        for name, parameter in self._model.named_parameters():
            if kept:
                parameter.data = given[name]
            else:
                parameter.copy_(given[name])


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_positions(config: object, max_model_tokens: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_model_tokens > longest:
        raise ConfigError(
            f"rollout.max_model_tokens: {max_model_tokens} is more than the model's {longest} positions; "
            f"take {longest} or less"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise GenerationError(f"rotary positions of type {kind!r} depend on the batch; take another engine")
