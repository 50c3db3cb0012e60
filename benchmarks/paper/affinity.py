"""R1, hardware affinity: rollout pools of equal cost, of H800 alone, H20 alone, or both (paper, section 7).

Whole runs with the same trainer (32 H800) and rollout pools that cost what 64 H800 and 32 H20 do: 75 H800, 214 H20, or
the mix with tasks declared, on any worker (that with the fewest outstanding tokens), or by measurement (`affinity =
"auto"`). The paper's ratios on single tasks calibrate the simulator (`calibration.py`); here the paper gives no figure.
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, affinity, config, main, run


def experiment(settings: Settings) -> list[Row]:
    """Throughput on the mixture, relative to H800 alone."""
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
