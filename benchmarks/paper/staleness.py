"""R4, bounded staleness: throughput of RollArt with alpha 1, 2, 4 and 6 (paper, sections 5 and 7)."""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, main, run

ALPHAS = (1, 2, 4, 6)


def experiment(settings: Settings) -> list[Row]:
    """Throughput relative to alpha 1."""
    found = {alpha: run(config(replace(settings, alpha=float(alpha)), "rollart")) for alpha in ALPHAS}
    rows: list[Row] = []
    for alpha, result in found.items():
        ages = {int(age): count for age, count in result.age_histogram.items()}
        mean_age = sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
        ratio = result.throughput / found[ALPHAS[0]].throughput
        rows.append({"alpha": alpha, "mean_age": mean_age, "measured": ratio, "published": None})
    return rows


if __name__ == "__main__":
    main("staleness", __doc__, experiment)
