"""Where the weights of a run lie: the arguments of `weights.open_store` for its workers.

Invariant: what is made or started here is gone on every way out. What this file leaves out: torch, so that a driver can
use it, and the store itself (`weights.py`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rollart.config import Config
from rollart.data.stores.mooncake_service import mooncake_store
from rollart.data.weights_folder import SHARED_MEMORY, default_folder
from rollart.sections import WeightsConfig


def num_versions(weights: WeightsConfig) -> int:
    """Versions that lie in the store at once, at most: those kept, the one being written, the bases of differences."""
    return weights.keep + max(1, weights.delta)


@contextlib.asynccontextmanager
async def weights_place(config: Config, run: Path, model_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """A folder and, where the config asks for one, a Mooncake store with room for the versions of a model.

    Where the folder lies in shared memory, which others may fill, one in the run folder can stand in for it.
    Raises ConfigError for a missing package, WeightsError when there is no room or the store does not start.
    """
    weights = config.weights
    in_run = run / "weights"
    nearest = in_run if config.runtime == "ray" else SHARED_MEMORY  # no memory is shared between machines
    needed = num_versions(weights)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(default_folder(run.name, in_run, model_bytes, needed, nearest))
        options = in_folder(weights, folder.path)
        if weights.store == "mooncake":
            options["mooncake"] = await stack.enter_async_context(
                mooncake_store(weights, run, needed * model_bytes, local=config.runtime != "ray")
            )
        elif folder.path.parent != in_run:
            options["spare"] = str(stack.enter_context(_spare(in_run / "spare")))
        yield options


@contextlib.contextmanager
def _spare(folder: Path) -> Iterator[Path]:
    """A folder that is made when it is needed; also removes what a killed process of this run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_folder(weights: WeightsConfig, folder: Path) -> dict[str, Any]:
    """A store of files."""
    return {
        "folder": str(folder),
        "bucket_bytes": weights.bucket_bytes,
        "keep": weights.keep,
        "delta": weights.delta,
    }
