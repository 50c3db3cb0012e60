"""The one-process PyTorch trainer: any Hugging Face causal LM in float32, AdamW, gradient accumulation.

Invariant: save, load and go on gives the same bits as going on.
What this file leaves out: steps (`policy.py`), publishing weights (`data/training.py`), sharding, mixed precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollart.data.trainers import checkpoint
from rollart.data.trainers.blocks import layers_of, recompute
from rollart.data.trainers.learner import AdamW, WholeLearner
from rollart.data.trainers.lora import adapter, add_adapter, complete
from rollart.data.trainers.policy import PolicyTrainer
from rollart.data.trainers.scoring import Scorer, load_model
from rollart.errors import RunFolderError, boundary
from rollart.sections import TrainConfig
from rollart.types import ParameterInfo


class EmbeddedTrainer(PolicyTrainer[WholeLearner]):
    """Implements `protocols.Trainer`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling; log-probabilities in the loss are taken at it.
    `seed`: order of the warm-up; `device`: what torch calls it. Raises ConfigError when the model cannot be loaded.
    """

    _optimizer: AdamW
    _reference: WholeLearner | None

    def __init__(
        self, model_folder: str, options: TrainConfig, temperature: float, seed: int, device: str = "cpu"
    ) -> None:
        self._model_folder = Path(model_folder)
        model = load_model(model_folder, device)
        scorer = Scorer(model)
        if options.lora.r:
            add_adapter(model, options.lora, seed)
        if options.activation_checkpointing:
            recompute(layers_of(model))
        super().__init__(WholeLearner(scorer), options, temperature, seed)

    # -------------------------------------------------------------------------------------------------------- weights
    def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes (`float32`) of what `tensors` yields, in its order."""
        return [
            ParameterInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._trained(self._learner)
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights on CPU, one at a time; a tied weight appears once, under its first name.

        They may be views of the live weights: use each before the next train step. With an adapter, it alone.
        """
        for name, tensor in self._trained(self._learner):
            yield name, tensor.detach().cpu().contiguous()

    def _trained(self, learner: WholeLearner) -> Iterator[tuple[str, Tensor]]:
        model = learner.scorer.model
        return adapter(model) if self._options.lora.r else unique_tensors(model)

    # --------------------------------------------------------------------------------------------------- save and load
    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder. Raises RunFolderError."""
        model, lora = self._learner.scorer.model, self._options.lora
        tensors = {f"optimizer/{name}": tensor for name, tensor in self._optimizer.tensors()}
        tensors["random/torch"] = torch.get_rng_state()
        if self._reference is not None:
            tensors |= {f"reference/{name}": tensor for name, tensor in self._trained(self._reference)}
        if lora.r:
            tensors |= {f"adapter/{name}": tensor for name, tensor in adapter(model)}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        weights = dict(complete(model, lora, lambda tensor: tensor)) if lora.r else None
        checkpoint.write(folder, model, self._model_folder, tensors, self._state(), weights)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint, exactly. Raises RunFolderError when it is half-written or of another model."""
        tensors, state = checkpoint.read(folder)
        reference = _under("reference/", tensors)
        checkpoint.check_reference(folder, state, bool(self._options.kl_coef), bool(reference))
        with boundary(RunFolderError, f"checkpoint {folder} is of another model than {self._model_folder}"):
            self._load_weights(folder, _under("adapter/", tensors))
        self._optimizer.set_tensors(_under("optimizer/", tensors))
        torch.set_rng_state(tensors["random/torch"])
        self._set_state(state)
        self._reference = None
        if self._options.kl_coef and reference:
            self._reference = self._learner.frozen()
            _overwrite(self._trained(self._reference), reference)

    def _load_weights(self, folder: str, parts: dict[str, Tensor]) -> None:
        """The adapter beside the weights that are there already, or all weights."""
        if self._options.lora.r:
            _overwrite(adapter(self._learner.scorer.model), parts)
        elif parts:
            raise RunFolderError(f"checkpoint {folder} is of an adapter; go on with the train.lora of its run")
        else:
            self._learner.scorer.model.load_state_dict(load_model(folder, "cpu").state_dict())


@torch.no_grad()
def _overwrite(tensors: Iterator[tuple[str, Tensor]], saved: dict[str, Tensor]) -> None:
    for name, tensor in tensors:
        tensor.copy_(saved[name])


def unique_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The entries of the state dict, each storage once, under its first name, as Hugging Face saves them."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
