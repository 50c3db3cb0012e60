"""Log-probabilities of trained tokens under a Hugging Face causal LM, at the least cost that gives the plain answer.

Three savings. Rows are padded on the right and attention is causal, so no mask is passed and attention takes its fast
causal kernel. What several rows begin with is computed once (`learn/packing.py`). The output head runs only where the
next token is trained, in chunks of bounded size. A model for which one of the last two is not exact is found out at
construction and scored by plain rows, or by its full forward.
Dropout is off, as the engine generates without it. What this file leaves out: losses and the optimizer.

Shape suffixes: B rows, T positions, N trained positions, H hidden size, V vocabulary, X hidden size or vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.data.trainers.attention import ATTENTION, pick
from rollart.errors import ConfigError, boundary
from rollart.learn.batching import MicroBatch, Sample, collate
from rollart.learn.packing import pack

log = logging.getLogger(__name__)

MAX_LOGITS = 1 << 25
"""Entries of logits held at once (128 MiB in float32); beyond it they are recomputed chunk by chunk in backward."""


def load_model(folder: str | Path, device: str) -> Any:
    """A causal LM in float32 without dropout. Raises ConfigError when folder or device cannot be used."""
    _check_folder(folder)
    with boundary(ConfigError, f"loading the model in {folder} on device {device!r}"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(torch.device(device)).eval()


def empty_model(folder: str | Path) -> Any:
    """A causal LM in float32 without memory. Raises ConfigError when the folder does not say what it is."""
    _check_folder(folder)
    with boundary(ConfigError, f"reading the config of the model in {folder}"), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _check_folder(folder: str | Path) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"model.name: {folder} holds no config.json; give a folder in Hugging Face format")


class Traits(NamedTuple):
    """How a model can be scored. `sparse`: its head runs on trained positions only; `packs`: packed rows are taken."""

    sparse: bool
    packs: bool


class Scorer:
    """Scores micro-batches with one model.

    `traits`: default: found out here, by comparing with the plain forward; for packed rows the model's attention is
    then exchanged. `max_logits`: see MAX_LOGITS.
    """

    def __init__(self, model: Any, max_logits: int = MAX_LOGITS, traits: Traits | None = None) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self._max_logits = max_logits
        self.traits = traits or Traits(has_plain_head(model), take_packed_rows(model))
        self.sparse, self.packs = self.traits
        if traits is None:
            self._tell()

    def _tell(self) -> None:
        model = self.model
        if not self.sparse:
            log.warning(
                "%s post-processes its logits; scoring it by full forward passes, which takes more time and memory",
                type(model).__name__,
            )
        if not self.packs:
            log.info("%s cannot share what rows begin with; every row is computed by itself", type(model).__name__)

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch as this model takes it best."""
        return collate(samples, self.device, self.packs)

    def score(self, batch: MicroBatch, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_BT, entropy_BT) of the targets under softmax(logits / temperature); 0 outside the mask."""
        states_NX, targets_N = self._states(batch), batch.targets_BT[batch.mask_BT]
        scored = self._from_hidden if self.sparse else from_logits
        logprobs_N, entropy_N = scored(states_NX, targets_N, temperature, entropy_gradient)
        zeros_BT = torch.zeros(batch.mask_BT.shape, dtype=logprobs_N.dtype, device=self.device)
        return zeros_BT.masked_scatter(batch.mask_BT, logprobs_N), zeros_BT.masked_scatter(batch.mask_BT, entropy_N)

    def _states(self, batch: MicroBatch) -> Tensor:
        """Hidden states at the trained positions, or logits where the head is not plain."""
        model = self.model.base_model if self.sparse else self.model
        packed = batch.packed
        if packed is None:
            output = model(input_ids=batch.tokens_BT, use_cache=False)
        else:
            tokens_1T, positions_1T = packed.tokens_N[None], packed.positions_N[None]
            output = model(input_ids=tokens_1T, position_ids=positions_1T, use_cache=False, packed=packed)
        states_BTX = output.last_hidden_state if self.sparse else output.logits
        if packed is None:
            return states_BTX[batch.mask_BT]
        return pick(states_BTX[0], packed.place_BT[batch.mask_BT])

    def _from_hidden(
        self, hidden_NH: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()

        def scored(chunk_NH: Tensor, chunk_N: Tensor) -> tuple[Tensor, Tensor]:
            return from_logits(head(chunk_NH), chunk_N, temperature, entropy_gradient)

        rows = max(1, self._max_logits // head.weight.shape[0])
        if len(hidden_NH) <= rows:
            return scored(hidden_NH, targets_N)
        chunks = zip(hidden_NH.split(rows), targets_N.split(rows), strict=True)
        parts = [checkpoint(scored, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) under softmax(logits / temperature)."""
    scaled_NV = logits_NV.float() if temperature == 1 else logits_NV.float() / temperature
    all_NV = functional.log_softmax(scaled_NV, dim=-1)
    entropy_NV = all_NV if entropy_gradient else all_NV.detach()
    entropy_N = -(entropy_NV.exp() * entropy_NV).sum(-1)
    return all_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Whether the model's logits are exactly its output head applied to the hidden states of its base model.

    The head's output is swapped for a wide range of numbers during one forward pass, so that even a soft cap that
    leaves small logits nearly alone shows.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def swap(_module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(args[0])
        outputs.append(torch.linspace(-1e3, 1e3, output.numel(), device=output.device).view_as(output))
        return outputs[-1]

    tokens_BT = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    handle = head.register_forward_hook(swap)
    try:
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    finally:
        handle.remove()
    hidden_BTH = getattr(model.base_model(input_ids=tokens_BT, use_cache=False), "last_hidden_state", None)
    return (
        len(inputs) == 1
        and hidden_BTH is not None
        and inputs[0].shape == hidden_BTH.shape
        and torch.equal(logits_BTV, outputs[0])
        and torch.allclose(inputs[0], hidden_BTH, atol=1e-5)
    )


ALIKE = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4, 5, 6, 9, 9], [1, 2, 8, 4, 9, 6], [7, 3])
"""Rows that show every part of the layout: whole ones, short tails, padding in both."""
FULL = "full_attention"
"""What transformers calls a layer in which every token sees all tokens before it."""


@torch.no_grad()
def take_packed_rows(model: Any) -> bool:
    """Exchange the model's attention for one that packed rows can use; False, and all as it was, if logits then differ.

    The difference is judged against the logits' own size, as weights that were never trained say little.
    """
    if set(getattr(model.config.get_text_config(), "layer_types", None) or [FULL]) != {FULL}:
        return False  # what rows of a few tokens could not show, such as a wide window
    size = model.get_input_embeddings().weight.shape[0]
    rows = [[token % size for token in row] for row in ALIKE]
    device = next(model.parameters()).device
    packed, before = pack(rows, device), model.config._attn_implementation
    plain = [model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in rows]
    scale = max(float(logits_TV.abs().max()) for logits_TV in plain)
    try:
        model.set_attn_implementation(ATTENTION)
        logits_NV = model(
            input_ids=packed.tokens_N[None], position_ids=packed.positions_N[None], use_cache=False, packed=packed
        ).logits[0]
        close = all(
            torch.allclose(logits_NV[places_T[: len(logits_TV)]], logits_TV, rtol=0, atol=1e-4 * scale)
            for places_T, logits_TV in zip(packed.place_BT, plain, strict=True)
        )
    except Exception as error:  # whatever a model does with arguments that it does not know
        log.info("%s takes no packed rows: %s", type(model).__name__, error)
        close = False
    if not close:
        model.set_attn_implementation(before)
    return close
