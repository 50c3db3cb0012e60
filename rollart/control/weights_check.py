"""Do trainer and inference workers hold the same weights? Compared by name before step 1, by result later. PURE.

Invariant: what differs raises WeightsError before anything is trained on it. What it leaves out: how weights travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart.errors import WeightsError
from rollart.types import ParameterInfo

NUM_SHOWN = 3


def check_parameters(trainer: Sequence[ParameterInfo], workers: Mapping[str, Sequence[ParameterInfo]]) -> None:
    """Raises WeightsError listing the first differences in names, shapes and dtypes."""
    expected = {each.name: each for each in trainer}
    for worker, parameters in workers.items():
        if differences := _differences(expected, {each.name: each for each in parameters}):
            shown = "; ".join(differences[:NUM_SHOWN])
            more = f"; and {len(differences) - NUM_SHOWN} more" if len(differences) > NUM_SHOWN else ""
            raise WeightsError(
                f"inference worker {worker!r} does not hold the trainer's parameters: {shown}{more}; "
                "load the same model on both sides"
            )


def canary_difference(
    expected: Sequence[float], answers: Mapping[str, Sequence[float]], version: int, tolerance: float
) -> float:
    """The largest difference of a log-probability, in nats. Raises WeightsError when one is beyond `tolerance`."""
    worst = 0.0
    for worker, logprobs in answers.items():
        where = f"canary at version {version}, inference worker {worker!r}"
        if len(logprobs) != len(expected):
            raise WeightsError(f"{where}: {len(logprobs)} log-probabilities, the trainer has {len(expected)}")
        pairs = zip(expected, logprobs, strict=True)
        difference = max((abs(a - b) if a == a and b == b else float("inf") for a, b in pairs), default=0.0)
        if not difference <= tolerance:
            raise WeightsError(
                f"{where}: log-probabilities differ by {difference:g} from the trainer's, more than "
                f"train.canary_tolerance {tolerance:g}; the weights that arrived are not those that were published, "
                "or the engine computes in another precision: then raise train.canary_tolerance"
            )
        worst = max(worst, difference)
    return worst


def _differences(expected: Mapping[str, ParameterInfo], found: Mapping[str, ParameterInfo]) -> list[str]:
    names = [*expected, *(name for name in found if name not in expected)]
    return [line for name in names if (line := _difference(name, expected.get(name), found.get(name)))]


def _difference(name: str, ours: ParameterInfo | None, theirs: ParameterInfo | None) -> str:
    if ours is None or theirs is None:
        return f"{name} is missing in the {'trainer' if ours is None else 'worker'}"
    if (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
        return ""
    return f"{name} is {_shape(ours)} in the trainer, {_shape(theirs)} in the worker"


def _shape(info: ParameterInfo) -> str:
    return f"{info.dtype}{list(info.shape)}"
