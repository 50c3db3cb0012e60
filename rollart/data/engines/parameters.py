"""The weights that an engine expects, by name, shape and dtype, and whether those that came are they.

Invariant: a tensor that does not fit is never handed on. What this file leaves out: loading them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from rollart.errors import ConfigError, WeightsError, boundary
from rollart.protocols import Tensors
from rollart.types import ParameterInfo

NAMED = 3
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
UNLIMITED = 1 << 62
COMPUTED = "rotary_emb.inv_freq"
"""What old checkpoints hold besides parameters."""


def info_of(name: str, tensor: Any) -> ParameterInfo:
    """Of one tensor."""
    return ParameterInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def config_of(folder: str) -> dict[str, Any]:
    """A model's `config.json`, with what it says of the language model. Raises ConfigError."""
    with boundary(ConfigError, f"reading the model in {folder}"):
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return {**config, **config.get("text_config", {})}


def check_positions(folder: str, max_model_tokens: int) -> int:
    """How many positions a model has. Raises ConfigError when they are too few."""
    positions: int = config_of(folder).get("max_position_embeddings", UNLIMITED)
    if max_model_tokens > positions:
        raise ConfigError(
            f"rollout.max_model_tokens: {max_model_tokens} is more than the model's {positions} positions; "
            f"take {positions} or less"
        )
    return positions


def of_checkpoint(folder: str, dtype: str) -> list[ParameterInfo]:
    """Those in a folder's safetensors files, all as `dtype`; a tied head is left out, as trainers hold it once.

    Raises ConfigError when the folder has none.
    """
    place = Path(folder)
    left_out = {HEAD} if config_of(folder).get("tie_word_embeddings") else set()
    with boundary(ConfigError, f"reading the parameters in {folder}"):
        shapes = {name: shape for file in _files(place) for name, shape in _shapes(file)}
    return [
        ParameterInfo(name, shape, dtype)
        for name, shape in shapes.items()
        if name not in left_out and not name.endswith(COMPUTED)
    ]


def read_checkpoint(folder: str, own: Mapping[str, ParameterInfo]) -> Iterator[tuple[str, Any]]:
    """Those of `own` that a folder's safetensors files hold, in the dtypes of `own`."""
    for file in _files(Path(folder)):
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in own.keys() & set(opened.keys()):
                yield name, opened.get_tensor(name).to(getattr(torch, own[name].dtype))


def _files(place: Path) -> list[Path]:
    if (place / INDEX).is_file():
        index = json.loads((place / INDEX).read_text(encoding="utf-8"))
        return [place / name for name in dict.fromkeys(index["weight_map"].values())]
    files = [place / "model.safetensors"]
    if not files[0].is_file() and not (files := sorted(place.glob("*.safetensors"))):
        raise ConfigError(f"{place}: no *.safetensors files; save the model with save_pretrained")
    return files


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with safetensors.safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            yield name, tuple(opened.get_slice(name).get_shape())


def vetted(own: Mapping[str, ParameterInfo], tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """The tensors: all checked before the first is handed on where they lie ready, else each as it comes.

    Raises WeightsError.
    """
    if isinstance(tensors, Collection):
        _check(own, [info_of(*pair) for pair in tensors])
    left = dict(own)
    for name, tensor in tensors:
        _check({name: left.pop(name)} if name in left else {}, [info_of(name, tensor)])
        yield name, tensor
    _check(left, [])


def _check(own: Mapping[str, ParameterInfo], given: Sequence[ParameterInfo]) -> None:
    there = {each.name: each for each in given}
    faults = [f"{name} is there twice" for name, count in Counter(each.name for each in given).items() if count > 1]
    faults += [f"{name} is missing" for name in own if name not in there]
    faults += [f"{name} is unknown to the model, or there twice" for name in there if name not in own]
    for name, wanted in own.items():
        found = there.get(name, wanted)
        if found != wanted:
            faults.append(f"{name} is {found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}")
    if faults:
        more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise WeightsError(f"weights do not fit the engine's model: {'; '.join(faults[:NAMED])}{more}")
