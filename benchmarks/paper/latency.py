"""R2, asynchrony per trajectory: environments with Gaussian latency, mean 10 s, sigma 1 to 10 (paper, section 7).

Rollout time with environments stepped together as a batch (Sync) over that with trajectories on their own (Sync+), on
the same episodes; rewards cost nothing here, so that stepping is all that differs. The paper does not name the task:
here the mixture, on 128 H800. Latencies below 0 count as 0. Sigma 0 shows what is due to generation alone, since a
batch that steps together also waits for the longest answer of each turn.
"""

from __future__ import annotations

from common import Row, Settings, changed, config, homogeneous, main, rollout_s, run

from rollart.data.simulated.profile import Spread

SIGMAS = (1, 3, 5, 7, 10)
PUBLISHED = {1: 1.23, 10: 2.27}


def experiment(settings: Settings) -> list[Row]:
    """Ratios of rollout time, by sigma."""
    rows: list[Row] = []
    for sigma in (0, *SIGMAS):
        spread = Spread(mean=10.0, tail="gaussian" if sigma else "constant", sigma=float(sigma))
        profile = changed(settings, step_s=spread, reward_s=Spread(mean=0.0), reward_overhead_s=Spread(mean=0.0))
        here = homogeneous(settings)
        together, alone = (rollout_s(run(config(here, name), profile)) for name in ("sync", "sync_plus"))
        rows.append({"sigma": sigma, "measured": together / alone, "published": PUBLISHED.get(sigma)})
    return rows


if __name__ == "__main__":
    main("latency", __doc__, experiment)
