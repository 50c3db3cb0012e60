"""Prefill and decode apart: 1P3D, 2P2D and 3P1D of four nodes, prefill on H800 and decode on H20, dense and MoE.

Throughput of one class per stage over the same devices where every engine does both (paper, section 6).
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, main, run

NODE = 8


def experiment(settings: Settings) -> list[Row]:
    """One row per model and split."""
    rows: list[Row] = []
    for model in ("Qwen3-8B", "Qwen3-30B-A3B"):
        for prefill, decode in ((1, 3), (2, 2), (3, 1)):
            pools = {"H800": 16 + NODE * prefill, "H20": NODE * decode}
            here = replace(settings, model=model, pools=pools, train={"H800": 16}, groups=16)
            both = run(config(here, "rollart", affinity={}))
            apart = run(config(here, "rollart", affinity={"default": "H20"}, simulate__prefill="H800"))
            row = {"model": model, "split": f"{prefill}P{decode}D", "measured": apart.throughput / both.throughput}
            rows.append({**row, "published": None})
    return rows


if __name__ == "__main__":
    main("disaggregation", __doc__, experiment)
