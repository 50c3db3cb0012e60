"""R3, serverless rewards: 16 H800, maths tasks, a 7B judge, on devices of its own or on elastic functions.

Local: 8 H800 train, 4 generate, 4 hold the judge. Serverless: 8 train, 8 generate, the judge runs elsewhere and is paid
by the second (paper, section 7: utilisation of the reward devices 6 % -> 88 %, rollout 158 -> 77 s a step). Schedule
Sync+. The paper has three maths jobs and does not say how long their answers or how large their batches are: here one
task, GEM-math, with 16 groups of 8.
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, changed, config, main, rollout_s, run

from rollart.data.simulated.profile import Spread
from rollart.simulation import Simulation

GROUPS = 16
JUDGE_S = 0.9
"""Device-seconds of one judgement: a 7B model reads about 3,000 tokens and writes about 100 (roofline of an H800)."""


def experiment(settings: Settings) -> list[Row]:
    """Rollout time and utilisation of the reward devices."""
    profile = changed(settings, reward_s=Spread(mean=JUDGE_S, tail="lognormal", sigma=0.5))
    here = replace(settings, tasks=("gem_math",), pools={"H800": 16}, train={"H800": 8}, groups=GROUPS)
    judge = {"device_class": "H800", "workers": 4}
    local = run(config(here, "sync_plus", **_apart(4), tasks__gem_math__reward="", roles__reward=judge), profile)
    elastic = run(config(here, "sync_plus", **_apart(8)), profile)
    return [
        {"what": "rollout, s per step, local", "measured": rollout_s(local), "published": 158.0},
        {"what": "rollout, s per step, serverless", "measured": rollout_s(elastic), "published": 77.0},
        {"what": "serverless over local", "measured": rollout_s(elastic) / rollout_s(local), "published": 77 / 158},
        {"what": "utilisation of rewards, local", "measured": _busy(local), "published": 0.06},
        {"what": "utilisation of rewards, serverless", "measured": _busy(elastic), "published": 0.88},
    ]


def _busy(result: Simulation) -> float:
    return next(share for name, share in result.utilisation.items() if name.startswith("reward"))


def _apart(rollout: int) -> dict[str, object]:
    return {
        "roles__actor_train": {"device_class": "H800", "workers": 1, "devices": 8},
        "roles__actor_gen": {"workers": {"H800": rollout}, "devices": 1},
        "pools__H800__share": 1,
    }


if __name__ == "__main__":
    main("rewards", __doc__, experiment)
