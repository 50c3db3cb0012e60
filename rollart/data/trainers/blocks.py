"""The layers of a model: what is sharded, gathered and computed again as one.

What this file leaves out: what lies before the first layer and after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rollart.errors import ConfigError


def layers_of(model: Any) -> list[nn.Module]:
    """The layers, first to last. Raises ConfigError for a model that does not say which they are."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.name: {type(model).__name__} does not say what its layers are; take trainer = 'embedded' without "
            "train.activation_checkpointing"
        )
    return layers


def recompute(layers: Iterable[nn.Module]) -> None:
    """From now on layers keep their inputs alone, and compute the rest again when the gradient needs it."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
