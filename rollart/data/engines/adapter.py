"""The engine's side of a low-rank adapter: what arrives is A and B, what generates is W0 + (alpha / r) B A.

Invariant: every version is merged from the same W0, kept beside the weights from the first version on, so that no error
adds up over versions. What this file leaves out: the rule itself (`learn/adapter.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollart.learn.adapter import adapted_layers, merged, names_of
from rollart.sections import LoraConfig
from rollart.types import ParameterInfo


class Adapter:
    """The adapted layers of a model. Raises ConfigError when it has none of the targets."""

    def __init__(self, model: Any, settings: LoraConfig) -> None:
        self._settings = settings
        self._layers = adapted_layers(model, settings)
        self._bases: dict[str, Tensor] = {}

    def parameters(self) -> list[ParameterInfo]:
        """What a version consists of, in the order of the model; always float32, as it is trained."""
        rank = self._settings.r
        return [
            ParameterInfo(name, shape, "float32")
            for layer, module in self._layers.items()
            for name, shape in zip(
                names_of(layer), ((rank, module.in_features), (module.out_features, rank)), strict=True
            )
        ]

    def merge(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite the adapted weights in place."""
        for layer, module in self._layers.items():
            if layer not in self._bases:
                self._bases[layer] = module.weight.detach().clone()
            base = self._bases[layer]
            a_RI, b_OR = (given[name].to(base.device) for name in names_of(layer))
            module.weight.copy_(merged(base, a_RI, b_OR, self._settings))
