"""Redundant environments: 32, 34 or 36 groups of 8, 10 or 12 members started, for a batch of 32 groups of 8.

Rollout time relative to no redundancy, with the schedule Sync+, in which the tail is waited for, and what it costs:
tokens generated per token trained.
"""

from __future__ import annotations

from dataclasses import replace

from common import Row, Settings, config, homogeneous, main, rollout_s, run


def experiment(settings: Settings) -> list[Row]:
    """One row per combination."""
    here = replace(homogeneous(settings, 32), groups=32)
    rows: list[Row] = []
    for groups in (32, 34, 36):
        for members in (8, 10, 12):
            extra = {"rollout__extra_groups": groups - 32, "rollout__extra_members": members - 8}
            result = run(config(here, "sync_plus", **extra))
            generated = result.generated_tokens / (result.generated_per_step * result.steps)
            seconds = rollout_s(result)
            first = rows[0]["rollout_s"] if rows else seconds
            row = {"groups": groups, "members": members, "rollout_s": seconds, "generated_per_trained": generated}
            rows.append({**row, "measured": first / seconds, "published": None})
    return rows


if __name__ == "__main__":
    main("redundancy", __doc__, experiment)
