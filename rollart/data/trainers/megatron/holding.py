"""transformers' weights as parts that ranks hold: cut and filled in, gathered and put together again.

Invariants: one weight is whole at a time; what is gathered is known to all ranks of its stage. What this file leaves
out: what a weight's parts are (`names.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rollart.data.trainers.megatron.names import Part, Shape, cut, parts, restored
from rollart.data.trainers.megatron.stage import Stage
from rollart.data.trainers.ranks import Ranks

EMBEDDINGS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

Whole = Callable[[str], Tensor]
"""From transformers' name to all of a tensor; asked for every part that a rank holds, in order."""
Value = Callable[[Parameter], Tensor]
"""What is wanted of a weight that this rank holds, in its shape."""
Put = Callable[[Parameter, Tensor], None]
"""Takes what is this rank's of a tensor, and the weight that it is for."""


class Holding:
    """What this rank holds. `shapes`: of all of transformers' weights."""

    def __init__(self, stage: Stage, shape: Shape, shapes: Mapping[str, Sequence[int]], ranks: Ranks) -> None:
        self.shapes = {name: shapes[name] for part in parts(shape) for name in part.sources}
        self._shape, self._ranks, self._place = shape, ranks, stage.place
        self._first_layer, self._weights = stage.first_layer, stage.weights()
        self._per_stage = shape.layers // self._place.layout.pipeline
        for part in parts(shape):
            for name in self._names(part):
                for weight in self._held(part, name):
                    if part.join == "experts" or part.split is not None:
                        stage.mark_split(weight, part.split or 0)

    # -------------------------------------------------------------------------------------------------------------- in
    def fill(self, whole: Whole, put: Put) -> None:
        """Give every weight its part."""
        for part in parts(self._shape):
            for name in self._names(part):
                self._fill(part, name, [whole(source) for source in part.sources], put)

    def read(self, source: Mapping[str, Tensor]) -> None:
        """Overwrite the weights with the first rank's, which it tells all others, one after the other."""
        for part in parts(self._shape):
            whole = [self._told(name, source) for name in part.sources]
            for name in self._names(part):
                self._fill(part, name, whole, overwrite)

    def _told(self, name: str, source: Mapping[str, Tensor]) -> Tensor:
        tensor = source[name].detach().to(self._ranks.device) if self._ranks.is_first else self._empty(name)
        self._ranks.broadcast(tensor)
        return tensor

    def _fill(self, part: Part, name: str, whole: list[Tensor], put: Put) -> None:
        group = self._place.experts if part.join == "experts" else self._place.tensor
        own = cut(part, whole, self._shape, dist.get_rank(group), dist.get_world_size(group))
        held = self._held(part, name)
        for weight, tensor in zip(held, own if part.join == "experts" else [own], strict=True):
            put(weight, tensor)

    # ------------------------------------------------------------------------------------------------------------- out
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in float32, on the first rank, one at a time; the other ranks work along."""
        for part in parts(self._shape):
            whole = self._gathered(part, Tensor.detach) if self._stage_of(part) == self._place.stage else {}
            for name in part.sources:
                tensor = self._to_first(name, whole.get(name), self._stage_of(part))
                if tensor is not None:
                    yield name, tensor.cpu()

    def dealt(self, value: Value) -> Iterator[tuple[str, Tensor]]:
        """Of what the ranks of a stage gather of their weights, every rank has some, whole and on the CPU."""
        turn = 0
        for part in parts(self._shape):
            if self._stage_of(part) != self._place.stage:
                continue
            for name, tensor in self._gathered(part, value).items():
                if turn % self._place.stage_size == self._place.seat:
                    yield name, tensor.cpu()
                turn += 1

    def _gathered(self, part: Part, value: Value) -> dict[str, Tensor]:
        """transformers' tensors of a part, by now on each rank of its stage."""
        (name,) = self._names(part)
        values = [value(weight) for weight in self._held(part, name)]
        group = self._place.experts if part.join == "experts" else self._place.tensor
        own = torch.stack(values) if part.join == "experts" else values[0].contiguous()
        held = [own]
        if part.join == "experts" or part.split is not None:
            held = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(held, own, group=group)
        return dict(zip(part.sources, restored(part, held, self._shape), strict=True))

    def _to_first(self, name: str, tensor: Tensor | None, stage: int) -> Tensor | None:
        """In float32, from the rank that speaks for a stage to the first of all, which has it then."""
        speaker = stage * self._place.stage_size
        if self._ranks.is_first:
            if tensor is None:
                tensor = self._empty(name)
                dist.recv(tensor, speaker)
            return tensor.float()
        if self._ranks.rank == speaker:
            assert tensor is not None
            dist.send(tensor.float().contiguous(), 0)
        return None

    # ---------------------------------------------------------------------------------------------------------- places
    def _stage_of(self, part: Part) -> int:
        if part.layer is not None:
            return part.layer // self._per_stage
        return 0 if part.name == EMBEDDINGS else self._place.layout.pipeline - 1

    def _names(self, part: Part) -> list[str]:
        """What a part is called on this rank; nothing where it belongs to another stage. Tied embeddings are on two."""
        if part.name == EMBEDDINGS and self._shape.tied and self._place.is_last and not self._place.is_first:
            return [HEAD]
        if self._stage_of(part) != self._place.stage:
            return []
        return [part.name if part.layer is None else f"decoder.layers.{part.layer - self._first_layer}.{part.name}"]

    def _held(self, part: Part, name: str) -> list[Parameter]:
        """This rank's weight of a part, or its experts."""
        if part.join != "experts":
            return [self._weights[name]]
        return [self._weights[name.format(each)] for each in range(self._shape.experts // self._place.layout.expert)]

    def _empty(self, name: str) -> Tensor:
        return torch.empty(tuple(self.shapes[name]), device=self._ranks.device)


@torch.no_grad()
def overwrite(weight: Parameter, tensor: Tensor) -> None:
    """Put a tensor in the place of a weight."""
    weight.copy_(tensor)
