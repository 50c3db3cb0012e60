"""SimulatedStore: which versions of the weights exist, and how long their bytes travel (paper section 6).

    trainer --push--> store --pull--> host memory of an engine --load--> its devices

Weights are pushed once over the slow link between clusters; engines pull them when they want to, each over a link of
its own, and each device of an engine pulls and loads its shard at the same time as the others.
Invariant: a version exists once it has been pushed whole, and never changes.
What this file leaves out: the bytes, the store's memory, links shared by many engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollart.data.simulated.model_shape import ModelShape
from rollart.data.simulated.profile import Link
from rollart.errors import ConfigError, WeightsError
from rollart.types import WeightManifest

LINKS = ("push", "pull", "load")


class SimulatedStore:
    """`links` needs those of `LINKS`. Raises ConfigError where one is missing."""

    def __init__(self, model: ModelShape, links: Mapping[str, Link]) -> None:
        if missing := [name for name in LINKS if name not in links]:
            raise ConfigError(f"profile: links.{missing[0]} is missing; weights need {', '.join(LINKS)}")
        self._model, self._links = model, dict(links)
        self._versions: set[int] = set()

    async def publish(self, version: int) -> WeightManifest:
        """Push all weights; the version exists when this returns. Raises WeightsError for one that exists."""
        if version in self._versions:
            raise WeightsError(f"version {version} is already published and cannot change")
        await asyncio.sleep(self._links["push"].seconds(self._model.weight_bytes))
        self._versions.add(version)
        return WeightManifest(version, (), ())

    async def fetch(self, version: int, num_devices: int = 1) -> None:
        """Pull a version to an engine of so many devices. Raises WeightsError when it does not exist."""
        if version not in self._versions:
            raise WeightsError(f"version {version} of the weights is not published")
        await asyncio.sleep(self._links["pull"].seconds(self._model.weight_bytes / num_devices))

    async def load(self, num_devices: int = 1) -> None:
        """Copy what was pulled from host memory to the devices."""
        await asyncio.sleep(self._links["load"].seconds(self._model.weight_bytes / num_devices))
