"""The model and the pace of the emulated engine, apart from it, so that a simulation of it needs no tensors."""

from __future__ import annotations

PARAMS = 8.2e9
"""Of Qwen3-8B, the model of the paper's affinity figures."""
SLOWDOWN = 5.0
"""Stretches an H20's decoding step to 20 ms."""
