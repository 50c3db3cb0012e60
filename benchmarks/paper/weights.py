"""Asynchronous weights: published and read ahead while rollout goes on, or while it is suspended (section 6)."""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, main, run


def experiment(settings: Settings) -> list[Row]:
    """Step time with blocking weights over that with asynchronous ones, per model."""
    models = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B") if settings.model == Settings().model else (settings.model,)
    rows: list[Row] = []
    for model in models:
        here = replace(settings, model=model)
        blocking, ahead = (run(config(here, "rollart", weights__asynchronous=each)) for each in (False, True))
        held = blocking.breakdown["weights"] + blocking.breakdown["suspended"]
        row = {"model": model, "suspended_s": held, "measured": blocking.step_s / ahead.step_s, "published": None}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main("weights", __doc__, experiment)
