"""Throughput ladder: Sync, Sync+, One-off, AReaL and RollArt, on 8B, 14B and 32B (paper, section 7).

Baselines run on 128 H800, RollArt on 96 H800 and 32 H20, which cost 16 % less. Throughput is prompt and response tokens
of the trained batch per second. `ours` is RollArt with a policy of rollart's own, at the paper's cost; `plan` found it.
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, homogeneous, main, run

MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
STEPS = (
    ("sync_plus", "sync", [1.40, 2.40]),
    ("one_off", "sync_plus", [1.31, 1.47]),
    ("areal", "one_off", [1.03, 1.06]),
    ("rollart", "areal", [1.22, 1.36]),
    ("rollart", "sync", [2.65, 4.58]),
)


def experiment(settings: Settings) -> list[Row]:
    """Ratios of throughput, per model."""
    models = MODELS if settings.model == Settings().model else (settings.model,)
    rows: list[Row] = []
    for model in models:
        here = replace(settings, model=model)
        throughput, possible = {}, {}
        for schedule in ("sync", "sync_plus", "one_off", "areal", "rollart"):
            where = here if schedule == "rollart" else homogeneous(here, sum(here.pools.values()))
            result = run(config(where, schedule))
            throughput[schedule], possible[schedule] = result.throughput, result.share_of_possible
        rows += [
            {
                "model": model,
                "ratio": f"{one}/{other}",
                "measured": throughput[one] / throughput[other],
                "published": range_,
            }
            for one, other, range_ in STEPS
        ]
        rows += [
            {"model": model, "ratio": f"{name}: share of possible", "measured": share, "published": None}
            for name, share in possible.items()
        ]
    return rows


if __name__ == "__main__":
    main("ladder", __doc__, experiment)
