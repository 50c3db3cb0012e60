"""Where the keys and values of running requests live: one buffer.

Invariant: running requests occupy slots 0..n-1 without gaps, so that attention reads views of the buffer. Everything in
the buffer is finite: a slot is wiped when its request is dropped, since a masked NaN would still poison the attention
of the slot's next owner.
Left out: which tokens the values belong to (`embedded.py`), how they are read (`attention.py`), and what is kept of
requests that have ended (`prefixes.py`).

Shapes: L layers, 2 (keys, values), S slots, H key-value heads, W width in tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollart.errors import GenerationError
from rollart.protocols import Payload

FIRST_WIDTH = 64


class Slots:
    """The buffer of the running requests, grown by doubling up to `max_slots` x `max_width`."""

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_slots: int,
        max_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads, self.max_slots, self.max_width = num_heads, max_slots, max_width
        self.zero = torch.tensor(0.0, dtype=dtype, device=device)
        self.minus_infinity = torch.tensor(-math.inf, dtype=dtype, device=device)
        self.places_W = torch.arange(max_width, device=device)
        self._use(torch.zeros(num_layers, 2, 0, num_heads, 0, head_dim, dtype=dtype, device=device))

    def _use(self, buffer_L2SHWD: Tensor) -> None:
        self.buffer_L2SHWD = buffer_L2SHWD
        self.heads_H = torch.arange(self.num_heads, device=buffer_L2SHWD.device) * self.width
        self.keys_SHWD = [layer[0] for layer in buffer_L2SHWD]
        self.values_SHWD = [layer[1] for layer in buffer_L2SHWD]

    @property
    def num_slots(self) -> int:
        """Slots allocated."""
        return self.buffer_L2SHWD.shape[2]

    @property
    def width(self) -> int:
        """Tokens allocated per slot."""
        return self.buffer_L2SHWD.shape[4]

    def reserve(self, num_slots: int, width: int) -> None:
        """Make room for `num_slots` slots of `width` tokens."""
        if num_slots <= self.num_slots and width <= self.width:
            return
        old = self.buffer_L2SHWD
        slots = _grown(self.num_slots, num_slots, 1, self.max_slots)
        width = _grown(self.width, width, FIRST_WIDTH, self.max_width)
        new = old.new_zeros(*old.shape[:2], slots, old.shape[3], width, old.shape[5])
        new[:, :, : self.num_slots, :, : self.width] = old
        self._use(new)

    def save(self, slot: int, num_tokens: int) -> Tensor:
        """A copy of the slot's first `num_tokens` tokens, [L, 2, H, num_tokens, D]."""
        return self.buffer_L2SHWD[:, :, slot, :, :num_tokens].clone(memory_format=torch.contiguous_format)

    def load(self, slot: int, saved_L2HTD: Tensor, num_tokens: int, start: int = 0) -> None:
        """Write the first `num_tokens` tokens of what `save` returned into a slot from token `start` on; makes room."""
        self.reserve(slot + 1, start + num_tokens)
        self.buffer_L2SHWD[:, :, slot, :, start : start + num_tokens] = saved_L2HTD[:, :, :, :num_tokens]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Write the first `num_tokens` tokens of a slot into another, for which it makes room."""
        self.reserve(target + 1, num_tokens)
        self.buffer_L2SHWD[:, :, target, :, :num_tokens] = self.buffer_L2SHWD[:, :, source, :, :num_tokens]

    def to_bytes(self, saved_L2HTD: Tensor) -> memoryview:
        """The keys and values of some tokens as they travel to another engine with the same model and dtype."""
        flat = saved_L2HTD.cpu().contiguous().view(torch.uint8).flatten()
        return flat.numpy().data

    def from_bytes(self, payload: Payload, num_tokens: int) -> Tensor:
        """What `to_bytes` was given, [L, 2, H, num_tokens, D]. Raises GenerationError when its size is another."""
        layers, _, _, heads, _, head_dim = self.buffer_L2SHWD.shape
        num_bytes = layers * 2 * heads * num_tokens * head_dim * self.buffer_L2SHWD.element_size()
        if memoryview(payload).nbytes != num_bytes:
            raise GenerationError(
                f"keys and values of {num_tokens} tokens came as {memoryview(payload).nbytes} bytes, not {num_bytes}: "
                "the engine that computed them has another model or dtype"
            )
        if not num_bytes:
            return self.buffer_L2SHWD.new_zeros(layers, 2, heads, 0, head_dim)
        writable = bytearray(payload) if isinstance(payload, bytes) else payload
        flat = torch.frombuffer(writable, dtype=self.buffer_L2SHWD.dtype)
        return flat.view(layers, 2, heads, num_tokens, head_dim)

    def wipe(self, slot: int) -> None:
        """Zero a slot."""
        self.buffer_L2SHWD[:, :, slot].zero_()


def _grown(have: int, need: int, first: int, most: int) -> int:
    if need <= have:
        return have
    size = max(have, first)
    while size < need:
        size *= 2
    return min(size, most)
