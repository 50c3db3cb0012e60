"""The pools of a config as they are now, whoever holds them: what `rollart pools` shows and repairs.

What this file leaves out: the table (`report.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollart.config import Config
from rollart.data.runtime import open_runtime
from rollart.resource.manager import ResourceManager
from rollart.resource.placement import pool_specs
from rollart.resource.pool import PoolRow
from rollart.resource.store import open_store


def view(config: Config, repair: str = "") -> list[PoolRow]:
    """The pools of a config as they are now in its store; first, say that node `repair` works again.

    Raises ConfigError, ResourceError.
    """
    return asyncio.run(_view(config, repair))


async def _view(config: Config, repair: str) -> list[PoolRow]:
    runtime = open_runtime(config.runtime, Path())
    try:
        settings = config.resources
        specs = pool_specs(config.pools, await runtime.nodes())
        manager = ResourceManager(open_store(settings.store), specs, "view", name=settings.name)
        if repair:
            await manager.repair(repair)
        return await manager.rows()
    finally:
        await runtime.shutdown()
