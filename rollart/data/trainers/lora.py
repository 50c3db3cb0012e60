"""A low-rank adapter on a model, through peft: it alone is trained, published and kept; the rest stays as it was read.

Invariant: at the start the adapter changes nothing (B is 0), and A follows from the seed. The only file that imports
peft. What this file leaves out: the rule (`learn/adapter.py`) and the engine's side (`data/engines/adapter.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rollart.errors import ConfigError, to_install
from rollart.learn.adapter import adapted_layers, merged, names_of
from rollart.sections import LoraConfig

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"
"""What peft calls the parts of a layer."""


def add_adapter(model: Any, settings: LoraConfig, seed: int) -> None:
    """Give the targets of a model an adapter, and train nothing else. Raises ConfigError."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"train.lora: needs an extra ({error}); {to_install('peft')}") from error
    config = peft.LoraConfig(
        r=settings.r, lora_alpha=settings.alpha, target_modules=list(adapted_layers(model, settings)), lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith((A, B)))


def adapter(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parts of the adapter under their names on the wire."""
    for name, weight in model.named_parameters():
        for own, wire in zip((A, B), names_of(name.removesuffix(A).removesuffix(B)), strict=True):
            if name.endswith(own):
                yield wire, weight


def complete(model: Any, settings: LoraConfig, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All weights as the model would have them without an adapter, merged, under transformers' names.

    `gather` makes a tensor whole.
    """
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith((A, B)):
            continue
        layer, base, rest = name.partition(BASE)
        if base and layer + A in weights and rest == ".weight":
            a_RI, b_OR = (gather(weights[layer + part].detach()) for part in (A, B))
            yield layer + rest, merged(gather(weight.detach()), a_RI, b_OR, settings)
        else:
            yield layer + rest, gather(weight.detach())
