"""Throughput ladder: Sync, Sync+, One-off, AReaL and RollArt, on 8B, 14B and 32B (paper, section 7).

Baselines run on 128 H800, RollArt on 96 H800 and 32 H20, which cost 16 % less. Throughput is prompt and response tokens
of the trained batch per second.

The rows after it are RollArt's at RollArt's cost, with the same alpha, by policies of our own:

    early_slots        the paper's split; a batch's slots are free as its training starts (`rollout.free_slots`)
    early_slots_paced  and as many groups more in flight as spare the trainer its wait (`rollout.extra_groups = "auto"`)
    split              64 instead of 32 H800 train, and no other policy than the paper's
    ours               the split, with up to 16 late groups kept instead of aborted
    ours_early         the split, with early slots and paced; what is best on one model can be the worst on another
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
    ("early_slots", "rollart", None),
    ("early_slots_paced", "rollart", None),
    ("split", "rollart", None),
    ("ours", "rollart", None),
    ("ours", "split", None),
    ("ours_early", "rollart", None),
    ("ours_early", "split", None),
)
SPLIT = {"H800": 64}
EARLY = {"rollout__free_slots": "train_start"}
KEPT = {"rollout__extra_groups": 16, "rollout__on_target": "keep"}
PACED = {"rollout__extra_groups": "auto"}


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
    split = replace(settings, train=SPLIT)
    found |= {
        "early_slots": run(config(settings, "rollart", **EARLY)),
        "early_slots_paced": run(config(settings, "rollart", **EARLY, **PACED)),
        "split": run(config(split, "rollart")),
        "ours": run(config(split, "rollart", **KEPT)),
        "ours_early": run(config(split, "rollart", **EARLY, **PACED)),
    }
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
