"""What a manifest says of its model: a fingerprint of the names, shapes and dtypes of all parameters.

Invariant: two lists of parameters have one fingerprint exactly when they say the same, in whatever order.
What this file leaves out: reading and writing manifests (`data/weights.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from rollart.errors import WeightsError
from rollart.types import ParameterInfo, WeightManifest


def info_of(name: str, tensor: Tensor) -> ParameterInfo:
    """Name, shape and dtype of a tensor."""
    return ParameterInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def fingerprint(parameters: Iterable[ParameterInfo]) -> str:
    """Of a model; 16 hexadecimal digits."""
    lines = sorted(f"{each.name}\t{each.dtype}\t{list(each.shape)}" for each in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_model(manifest: WeightManifest, model: Sequence[ParameterInfo], where: str) -> None:
    """Raises WeightsError, with the first difference, unless the manifest is of this model."""
    wanted = fingerprint(model)
    if manifest.model == wanted == fingerprint(manifest.parameters):
        return
    ours, theirs = ({_shown(each) for each in parameters} for parameters in (model, manifest.parameters))
    lines = [f"{each} is there alone" for each in sorted(theirs - ours)]
    lines += [f"{each} is in the engine alone" for each in sorted(ours - theirs)]
    raise WeightsError(
        f"version {manifest.version} in {where} is of another model ({manifest.model or 'without a name'}) than this "
        f"engine's ({wanted}): {lines[0] if lines else 'its manifest is damaged'}"
    )


def _shown(info: ParameterInfo) -> str:
    return f"{info.name} {info.dtype}{list(info.shape)}"
