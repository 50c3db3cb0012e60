"""Scaling: throughput of RollArt on 64, 96 and 128 H800, a quarter of which train, without affinity (section 7)."""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, main, run

SIZES = (64, 96, 128)


def experiment(settings: Settings) -> list[Row]:
    """Throughput relative to the smallest cluster."""
    found = {}
    for size in SIZES:
        here = replace(settings, pools={"H800": size}, train={"H800": size // 4})
        found[size] = run(config(here, "rollart")).throughput
    return [
        {"model": settings.model, "H800": size, "measured": each / found[SIZES[0]], "published": None}
        for size, each in found.items()
    ]


if __name__ == "__main__":
    main("scaling", __doc__, experiment)
