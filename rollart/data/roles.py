"""What is built in each worker process: one function per role, from plain values.

The pipeline names these functions (`rollart.data.roles:inference`) and the process that hosts the worker calls them, so
that heavy libraries are imported only where they work. What this file leaves out: the workers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.data.environment import EnvironmentWorker
    from rollart.data.http_inference import HTTPInference
    from rollart.data.inference import InferenceWorker
    from rollart.data.reward import RewardWorker
    from rollart.data.train_rank import TrainRank
    from rollart.data.trainers.ranks import Ranks
    from rollart.data.training import TrainWorker
    from rollart.protocols import Trainer


def inference(
    model_folder: str,
    engine: str,
    engine_options: dict[str, Any],
    weights: dict[str, Any],
    part: str = "",
    parcels: str = "",
) -> InferenceWorker | HTTPInference:
    """An inference worker. `weights` are the arguments of `weights.open_store`, none where a server is to hold those of
    the model; `part`: "prefill" or "decode", if not both; `parcels`: the folder through which KV goes from the one to
    the other.
    """
    _one_compute_thread()
    from rollart.data.inference import InferenceWorker
    from rollart.data.weights import open_store

    if engine == "http":
        from rollart.data.engines import check_options
        from rollart.data.http_inference import HTTPInference

        check_options(HTTPInference, engine_options)
        return HTTPInference(model_folder, open_store(**weights) if weights else None, **engine_options)
    store = open_store(**weights)
    if part:
        from rollart.data.handoff import PARTS

        return PARTS[part](model_folder, engine, engine_options, store, parcels)
    return InferenceWorker(model_folder, engine, engine_options, store)


def training(
    model_folder: str,
    trainer: str,
    options: Mapping[str, Any],
    device: str,
    temperature: float,
    seed: int,
    weights: dict[str, Any],
) -> TrainWorker | TrainRank:
    """A training worker, or one rank of a trainer of several. `options` is the `[train]` table."""
    _one_compute_thread()
    import msgspec

    from rollart.config import GROUPS
    from rollart.data.train_rank import TrainRank
    from rollart.data.trainers import trainer_factory
    from rollart.data.training import TrainWorker
    from rollart.data.weights import open_store
    from rollart.sections import TrainConfig

    factory, settings = trainer_factory(trainer), msgspec.convert(options, TrainConfig)
    what = {"model_folder": model_folder, "options": settings, "temperature": temperature, "seed": seed}
    if trainer not in GROUPS:
        return TrainWorker(factory(**what, device=device), open_store(**weights))

    def build(ranks: Ranks) -> Trainer:
        return factory(**what, ranks=ranks)

    return TrainRank(build, lambda: open_store(**weights), device, settings.collective_timeout_s)


def environment(tasks: dict[str, Any], num_threads: int) -> EnvironmentWorker:
    """An environment worker that can host every task of the config."""
    from rollart.data.environment import EnvironmentWorker

    return EnvironmentWorker(tasks, num_threads)


def reward(tasks: dict[str, Any], serverless: dict[str, Any], scheme: str) -> RewardWorker:
    """A reward worker for every task of the config that has a reward function.

    `serverless`: ServerlessConfig by task; `scheme`: of functions that are named without one.
    """
    from rollart.data.reward import RewardWorker

    return RewardWorker(tasks, serverless, scheme)


def _one_compute_thread() -> None:
    """Engine and trainer each keep to one core: two spinning thread pools on few cores thrash."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
