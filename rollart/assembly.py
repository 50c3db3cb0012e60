"""What a run's control plane is made of, over its workers: the same for a real run and for a simulated one.

What this file leaves out: starting the workers (`workers.py`), and who runs the loop (`pipeline.py`, `simulator.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from rollart.config import Config
from rollart.control.background import Background
from rollart.control.env_manager import Services, sampling_of
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.protocols import Renderer
from rollart.resource.affinity import Affinity
from rollart.resource.routing import Router
from rollart.workers import Workers


def llm_proxy(
    config: Config, workers: Workers, router: Router, background: Background, version: int, say: Callable[[str], None]
) -> LLMProxy:
    """The gateway to the inference workers, which `workers` keeps up to date from now on."""
    workers.proxy = LLMProxy(
        workers.inference(),
        router=router,
        classes=workers.classes,
        background=background,
        version=version,
        affinity=Affinity(workers.placement.affinity, config.affinity_mode, config.rollout.engine_slots),
        say=say,
        answer_timeout_s=config.weights.update_timeout_s,
    )
    return workers.proxy


def services(
    config: Config, workers: Workers, proxy: LLMProxy, renderer: Renderer, background: Background, ledger: Ledger
) -> Services:
    """What all trajectories share; `ledger` hears from now on how many engines there are."""
    proxy.on_workers = ledger.clock.engines
    proxy.on_workers(proxy.num_workers)
    return Services(
        env=workers.environment,
        proxy=proxy,
        renderer=renderer,
        sampling=sampling_of(config),
        background=background,
        clock=ledger.clock,
        reward=workers.reward,
        group_scores=GroupScores(workers.reward, config.rollout.group_size) if workers.reward else None,
    )
