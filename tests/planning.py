"""A cluster whose step time is a formula, in the place of a simulation: for tests of the planner.

Everything here is of the module, so that other processes find it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from rollart.config import Config, parse
from rollart.errors import ConfigError
from rollart.plan_processes import as_interrupt
from rollart.plan_report import report
from rollart.planner import plan
from rollart.simulation import Simulation

TOKENS = 1_000_000.0
CONFIG = """
steps = 6
schedule = "rollart"

[simulate]

[tasks.pages]
[tasks.proofs]

[pools.H800]
count = 32
cost = 3.0
compatible = ["H20"]

[pools.H20]
count = 32
cost = 1.0

[roles.actor_train]
device_class = "H800"
workers = 2
devices = 8

[roles.actor_gen]
workers = { H800 = 16, H20 = 32 }
"""
GENERATES = {"H800": 1.0, "H20": 0.8}
TRAINS = {"H800": 1.0, "H20": 0.2}


def made(*overrides: str) -> Config:
    """The config above, changed."""
    return parse(CONFIG, overrides)


def formula(config: Config) -> Simulation:
    """Seconds per step: the longer of training and rollout, each as fast as its devices; alpha and `auto` help rollout.

    Raises ConfigError for engines of eight devices, on which the model is said not to fit.
    """
    train, generate = config.roles["actor_train"], config.roles["actor_gen"]
    assert isinstance(train.workers, int)
    assert isinstance(generate.workers, dict)
    if generate.devices == 8:
        raise ConfigError("the model does not fit: eight devices\nthere is more to say")
    power = sum(GENERATES[name] * count for name, count in generate.workers.items()) * generate.devices
    policy = 0.9 if config.affinity == "auto" else 1.0
    policy *= 1.1 if config.simulate and config.simulate.prefill else 1.0
    rollout_s = policy * 3000 / power / (1 + 0.1 * config.effective_alpha)
    train_s = 400 / (TRAINS[train.device_class] * train.workers * train.devices)
    step_s = max(rollout_s, train_s)
    cost = sum(pool.count * pool.cost for pool in config.pools.values())
    return simulation(
        schedule=config.schedule,
        alpha=config.effective_alpha,
        steps=config.steps - 1,
        step_s=step_s,
        throughput=TOKENS / step_s,
        breakdown={"training": train_s, "generate": max(0.0, rollout_s - train_s)},
        utilisation={
            **{f"actor_gen {name}": rollout_s / step_s for name in generate.workers},
            f"actor_train {train.device_class}": train_s / step_s,
        },
        cost_per_hour=cost,
        cost_per_million_tokens=cost * step_s / 3600,
    )


def picky(config: Config) -> Simulation:
    """As `formula`. Raises ConfigError for `auto`."""
    if config.affinity == "auto":
        raise ConfigError("it does not fit")
    return formula(config)


def deadly(config: Config) -> Simulation:
    """As `formula`, but the process dies of `auto`."""
    if config.affinity == "auto":
        os.kill(os.getpid(), signal.SIGKILL)
    return formula(config)


def simulation(**changes: Any) -> Simulation:
    """A small result."""
    values: dict[str, Any] = {
        "schedule": "rollart",
        "alpha": 1.0,
        "steps": 2,
        "step_s": 10.0,
        "step_times": [],
        "tokens_per_step": TOKENS,
        "generated_per_step": TOKENS / 4,
        "throughput": TOKENS / 10,
        "breakdown": {},
        "waits_s": {},
        "utilisation": {},
        "age_histogram": {},
        "aborted": {},
        "discarded": {},
        "wasted_tokens": {},
        "generated_tokens": 1000,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "cost_per_hour": 128.0,
        "cost_per_million_tokens": 0.5,
        "bound": None,
        "share_of_possible": 0.0,
        "trajectories": {
            "pages": {"trajectories": 4.0, "prompt_tokens": 900.0, "response_tokens": 100.0},
            "proofs": {"trajectories": 4.0, "prompt_tokens": 100.0, "response_tokens": 900.0},
        },
        "resources": {},
        "events": [],
    }
    return Simulation(**(values | changes))


class Counting:
    """`formula`, counting its calls; it is interrupted at one of them."""

    def __init__(self, interrupted_at: int = 0) -> None:
        self.configs: list[Config] = []
        self._interrupted_at = interrupted_at

    def __call__(self, config: Config) -> Simulation:
        self.configs.append(config)
        if len(self.configs) == self._interrupted_at:
            raise KeyboardInterrupt
        return formula(config)


def slowly(config: Config) -> Simulation:
    """`formula`, after a while."""
    time.sleep(0.2)
    return formula(config)


def tell(line: str) -> None:
    """At once, whoever reads."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """A search with two processes, told line by line."""
    with as_interrupt():
        tell(report(plan(made(), slowly, trials=1000, jobs=2, say=tell)))


if __name__ == "__main__":
    main()
