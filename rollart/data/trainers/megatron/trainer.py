"""The trainer on Megatron-Core: Llama, Qwen2 and Qwen3 over tensor, pipeline, context and expert parallel ranks.

Invariants: weights are published and kept under transformers' names, so that engines and checkpoints never meet
Megatron's; steps are those of the embedded trainer, beyond rounding. What this file leaves out: the model
(`learner.py`), and what checkpoints are made of (`shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from rollart.config import Layout
from rollart.data.trainers import shards
from rollart.data.trainers.checkpoint import check_reference
from rollart.data.trainers.megatron.adam import MASTER, MOMENTS, MegatronAdam
from rollart.data.trainers.megatron.holding import overwrite
from rollart.data.trainers.megatron.learner import MegatronLearner
from rollart.data.trainers.megatron.place import meet
from rollart.data.trainers.policy import PolicyTrainer
from rollart.data.trainers.ranks import Ranks
from rollart.errors import RunFolderError
from rollart.sections import TrainConfig
from rollart.types import ParameterInfo


class MegatronTrainer(PolicyTrainer[MegatronLearner]):
    """Implements `protocols.Trainer` on one of `ranks`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling. `seed`: order of the warm-up.
    Raises ConfigError for a model that Megatron cannot hold, or ranks that it cannot be laid out over.
    """

    _optimizer: MegatronAdam
    _reference: MegatronLearner | None

    def __init__(self, model_folder: str, options: TrainConfig, temperature: float, seed: int, ranks: Ranks) -> None:
        sizes = options.megatron
        layout = Layout(
            ranks.size,
            options.tensor_parallel,
            sizes.pipeline_parallel,
            sizes.context_parallel,
            sizes.expert_parallel,
        )
        self._model_folder, self._ranks = model_folder, ranks
        place = meet(layout, ranks.timeout_s)
        super().__init__(MegatronLearner(model_folder, options, ranks, place), options, temperature, seed)

    def parameters(self) -> list[ParameterInfo]:
        """Names, whole shapes and dtypes (`float32`) of what `tensors` yields, in its order."""
        shapes = self._learner.holding.shapes
        return [ParameterInfo(name, tuple(shape), "float32") for name, shape in shapes.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights on the first rank's CPU, one at a time; the other ranks work along, and get nothing."""
        return self._learner.holding.tensors()

    # --------------------------------------------------------------------------------------------------- save and load
    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder that all ranks see. Raises RunFolderError on all of them."""
        config, held = self._learner.config, self._held()
        shards.write(folder, config, self._model_folder, self.tensors(), held, self._state(), self._ranks)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint of any ranks, of trainer fsdp2 as well. Raises RunFolderError on all of them."""
        what = f"checkpoint {folder} cannot be read, or is of another model than {self._model_folder}"
        wanted, holding = bool(self._options.kl_coef), self._learner.holding
        with self._ranks.together(RunFolderError, what):
            saved = shards.Saved(folder)
            reference = bool(saved.under("reference/"))
            check_reference(folder, saved.state, wanted, reference)
            saved.expect(f"model/{name}" for name in holding.shapes)
            holding.fill(partial(self._read, saved, "model/{}"), overwrite)
        self._optimizer = self._learner.optimizer(self._adam())
        self._reference = self._learner.frozen() if wanted and reference else None
        with self._ranks.together(RunFolderError, what):
            self._load_optimizer(saved)
            if self._reference is not None:
                self._reference.holding.fill(partial(self._read, saved, "reference/{}"), overwrite)
        self._set_state(saved.state)

    def _held(self) -> dict[str, Tensor]:
        """This rank's share of all that is not read from the model's files: tensors as a whole, dealt out."""
        held = dict(self._states("model/{}", MASTER))
        if steps := self._optimizer.steps:
            for moment in MOMENTS:
                held |= dict(self._states("optimizer/{}/" + moment, moment))
            names = [name.removeprefix("model/") for name in held if name.startswith("model/")]
            held |= {f"optimizer/{name}/step": torch.tensor(float(steps)) for name in names}
        if self._reference is not None:
            held |= {f"reference/{name}": each for name, each in self._reference.holding.dealt(Tensor.float)}
        return held

    def _states(self, label: str, key: str) -> Iterator[tuple[str, Tensor]]:
        whole = partial(self._optimizer.whole, key=key)
        return ((label.format(name), tensor) for name, tensor in self._learner.holding.dealt(whole))

    def _load_optimizer(self, saved: shards.Saved) -> None:
        labels = {MASTER: "model/{}"}
        if steps := self._steps_in(saved):
            self._optimizer.prepare(steps)
            labels |= {moment: "optimizer/{}/" + moment for moment in MOMENTS}
        for key, label in labels.items():
            put = partial(self._overwrite_state, key)
            self._learner.holding.fill(partial(self._read, saved, label), put)

    def _overwrite_state(self, key: str, weight: Parameter, tensor: Tensor) -> None:
        self._optimizer.overwrite(weight, key, tensor)

    def _steps_in(self, saved: shards.Saved) -> int:
        """How often the optimizer had moved the weights."""
        counts = [name for name in saved.names if name.startswith("optimizer/") and name.endswith("/step")]
        return int(saved.tensor(min(counts), ())) if counts else 0

    def _read(self, saved: shards.Saved, label: str, name: str) -> Tensor:
        return saved.tensor(label.format(name), self._learner.holding.shapes[name]).to(self._ranks.device)
