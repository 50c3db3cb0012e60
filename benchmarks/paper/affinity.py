"""R1, hardware affinity: rollout pools of equal cost, of H800 alone, H20 alone, or both (paper, section 7).

First the paper's own measurement that calibrates the simulator (2 H800 against 6 H20, one task each), then whole runs
with the same trainer (32 H800) and rollout pools that cost what 64 H800 and 32 H20 do: 75 H800, 214 H20, or the mix
with tasks declared, at random (least outstanding tokens of all workers), or by measurement (`affinity = "auto"`).
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, affinity, config, main, rollout_s, run


def experiment(settings: Settings) -> list[Row]:
    """Ratios of rollout time on single tasks, then of throughput on the mixture."""
    return [*_single(settings), *_mixture(settings)]


def _single(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    for task, published in (("frozenlake", [0.53, 0.53]), ("gem_math", [0.49, 0.79])):
        seconds = {}
        for name, count in (("H800", 2), ("H20", 6)):
            here = replace(settings, pools={name: count}, tasks=(task,), groups=16)
            seconds[name] = rollout_s(run(config(here, "sync_plus")))
        one, other = ("H800", "H20") if task == "frozenlake" else ("H20", "H800")
        row = {"what": f"{task}: rollout on {one} over {other}", "measured": seconds[one] / seconds[other]}
        rows.append({**row, "published": published})
    return rows


def _mixture(settings: Settings) -> list[Row]:
    pools = {
        "H800 only": ({"H800": 32 + 75}, {}),
        "H20 only": ({"H800": 32, "H20": 214}, {}),
        "mixed, any worker": (settings.pools, {}),
        "mixed, declared": (settings.pools, affinity(settings.mixture)),
        "mixed, auto": (settings.pools, "auto"),
    }
    found = {}
    for name, (devices, chosen) in pools.items():
        found[name] = run(config(replace(settings, pools=devices), "rollart", affinity=chosen)).throughput
    return [
        {"what": f"{name}: throughput over H800 only", "measured": each / found["H800 only"], "published": None}
        for name, each in found.items()
    ]


if __name__ == "__main__":
    main("affinity", __doc__, experiment)
