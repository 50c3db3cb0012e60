"""Low-rank adapters: W = W0 + (alpha / r) B A for the matrices that are adapted (LoRA, arXiv 2106.09685, section 4.1).

Trainer and engine both ask this file which layers are adapted and how their parts are called on the wire, so that the
two cannot disagree. What this file leaves out: who trains A and B, and who keeps W0.

Shape suffixes: O outputs of a layer, I inputs, R rank.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from rollart.checks import nearest
from rollart.errors import ConfigError
from rollart.sections import LoraConfig


def adapted_layers(model: Any, settings: LoraConfig) -> dict[str, nn.Linear]:
    """The linear layers whose name ends with a target, in the order of the model.

    Raises ConfigError for a target without any, and for a layer whose matrix another layer has too: one of them adapted
    is two matrices, and an engine that keeps one would be silently wrong.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    last = sorted({name.rpartition(".")[2] for name in linear})
    for target in settings.targets:
        if not any(_ends(name, target) for name in linear):
            raise ConfigError(
                f"train.lora.targets: no linear layer of the model ends with {target!r}{nearest(target, last)}"
            )
    adapted = {name: layer for name, layer in linear.items() if any(_ends(name, each) for each in settings.targets)}
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted.items():
        if holders[id(layer.weight)] > 1:
            raise ConfigError(
                f"train.lora.targets: {name!r} shares its matrix with another layer of the model "
                "(tie_word_embeddings), and cannot be adapted alone; leave it out"
            )
    return adapted


def names_of(layer: str) -> tuple[str, str]:
    """How A and B of a layer are called on the wire."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def merged(base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, settings: LoraConfig) -> Tensor:
    """W0 + (alpha / r) B A, computed in float32, of the type of W0."""
    change_OI = (settings.alpha / settings.r) * (b_OR.float() @ a_RI.float())
    return (base_OI.float() + change_OI).to(base_OI.dtype)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
