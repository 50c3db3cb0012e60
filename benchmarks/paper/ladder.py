"""Throughput ladder: Sync, Sync+, One-off, AReaL and RollArt, on 8B, 14B and 32B (paper, section 7).

Baselines run on 128 H800, RollArt on 96 H800 and 32 H20, which cost 16 % less. Throughput is prompt and response tokens
of the trained batch per second.

`ours` is RollArt at the paper's cost, the best of a handful of variants around what `rollart plan` points to (training
on more devices): 64 instead of 32 H800 train (`split`, that alone), and 16 more groups than a batch needs are kept in
flight (`rollout.extra_groups`, `on_target = "keep"`: none is aborted for being late, and alpha is the same), so that a
batch waits less for a long trajectory.
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, details, homogeneous, main, run

MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
STEPS = (
    ("sync_plus", "sync", [1.40, 2.40]),
    ("one_off", "sync_plus", [1.31, 1.47]),
    ("areal", "one_off", [1.03, 1.06]),
    ("rollart", "areal", [1.22, 1.36]),
    ("rollart", "sync", [2.65, 4.58]),
    ("split", "rollart", None),
    ("ours", "rollart", None),
)
SPLIT = {"H800": 64}
OURS = {"rollout__extra_groups": 16, "rollout__on_target": "keep"}


def experiment(settings: Settings) -> list[Row]:
    """Ratios of throughput, per model."""
    models = MODELS if settings.model == Settings().model else (settings.model,)
    return [row for model in models for row in rungs(replace(settings, model=model))]


def rungs(settings: Settings) -> list[Row]:
    """Those of one model: ratios, then each schedule's share of what is possible and where its step goes."""
    found = {}
    for schedule in ("sync", "sync_plus", "one_off", "areal", "rollart"):
        where = settings if schedule == "rollart" else homogeneous(settings, sum(settings.pools.values()))
        found[schedule] = run(config(where, schedule))
    other = replace(settings, train=SPLIT)
    found |= {"split": run(config(other, "rollart")), "ours": run(config(other, "rollart", **OURS))}
    ratios: list[Row] = [
        {
            "model": settings.model,
            "what": f"{one}/{other}",
            "measured": found[one].throughput / found[other].throughput,
            "published": published,
        }
        for one, other, published in STEPS
    ]
    shares: list[Row] = [
        {
            "model": settings.model,
            "what": f"{name}: share of possible",
            "measured": result.share_of_possible,
            "published": None,
            "why": {"step_s": result.step_s, "bound": result.bound and result.bound.parts, **details(result)},
        }
        for name, result in found.items()
    ]
    return [*ratios, *shares]


if __name__ == "__main__":
    main("ladder", __doc__, experiment)
