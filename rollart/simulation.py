"""What a simulated run found: plain data for machines, tables for people.

Invariant: every figure is of the measured steps alone, in simulated seconds, and `to_json` loses none of them. What
this file leaves out: how they come about (`simulator.py`), the bound (`bound.py`) and other plans (`planner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from rollart.bound import Bound

SPENT = {
    "training": "training",
    "generate": "waiting for generation",
    "reset": "waiting for resets",
    "step": "waiting for environments",
    "score": "waiting for rewards",
    "weights": "waiting for weights",
    "suspended": "suspending the engines",
    "nothing_running": "waiting with nothing running",
}
"""The parts of `Simulation.breakdown` in words; a part that is not listed speaks for itself."""
WHOLE = "in whole trajectories that were aborted or discarded after their end, as the rows above say why"
CAUSES = {
    "stale": "older than alpha allows, before it was trained on",
    "redundant": "enough others had finished",
    "cancelled": "running when its group was dropped",
    "cut short": "in a turn that was broken off, by an abort or with its engine",
    "zero_variance": "all rewards of its group were equal (rollout.zero_variance)",
    "group_dropped": "another member of its group failed too often",
    "env_error": "reset or step failed, its retries too",
    "reward_error": "its reward function failed",
    "generation_error": "its engine died or failed",
}
"""Why work was lost, in words: causes of aborted and discarded trajectories, and of tokens for nobody."""
MEANINGS = {
    "tokens prefilled again": "prompts read once more, after an update of the weights or for lack of room",
    "requests set back": "they gave up their KV to others, for lack of room",
    "unfinished at the end, not lost": "running, or whole and waiting for a batch, when the last step ended",
}
"""Rows of the table of lost work that are no trajectories or tokens by cause."""
WORTH_SHOWING = 0.0005
"""Share of the whole below which a row is left out of a table."""


class Simulation(Struct, frozen=True, kw_only=True):
    """The measured steps of one simulated run (those after `simulate.warmup_steps`).

    step_s: mean of `step_times`. tokens_per_step: prompt and response tokens of the trained batch, mean;
    generated_per_step: those of them that the model generated. throughput: tokens_per_step / step_s (paper section 7).
    breakdown: seconds per step by what the trainer did or waited for.
    waits_s: all waits by cause, summed, of the trainer and (`training`) of the rollout.
    utilisation: "ROLE CLASS", such as "actor_gen H20" -> share of the time that these devices worked; "reward CLASS":
    of the time that they were reserved for rewards, or, where these are elastic, paid for.
    age_histogram: age -> trained trajectories. aborted, discarded: trajectories by cause. wasted_tokens: generated for
    nobody, by why the trajectory ended. unfinished_trajectories, unfinished_tokens: running, or whole and waiting in
    the buffer, when the last step ended; a longer run would have trained on most of them, so they are not wasted.
    generated_tokens: by engines, trained on, wasted and unfinished ones. recomputed_tokens: prefilled again after an
    update or a lack of room; preemptions: requests that lost their KV to others.
    cost_per_hour: of all pools, in units of `pools.NAME.cost`; cost_per_million_tokens: of trained tokens.
    share_of_possible: bound.step_s / step_s. trajectories: task -> means of turns, prompt_tokens, response_tokens and
    seconds by stage. longest: of each step, seconds by stage of the trained trajectory that took longest.
    resources: worker -> device class. events: what became of workers and pools, for people.
    """

    schedule: str
    alpha: float
    steps: int
    step_s: float
    step_times: list[float]
    tokens_per_step: float
    generated_per_step: float
    throughput: float
    breakdown: dict[str, float]
    waits_s: dict[str, float]
    utilisation: dict[str, float]
    age_histogram: dict[str, int]
    aborted: dict[str, int]
    discarded: dict[str, int]
    wasted_tokens: dict[str, int]
    unfinished_trajectories: int = 0
    unfinished_tokens: int = 0
    generated_tokens: int
    recomputed_tokens: int
    preemptions: int
    cost_per_hour: float
    cost_per_million_tokens: float
    bound: Bound | None
    share_of_possible: float
    trajectories: dict[str, dict[str, float]]
    longest: list[dict[str, float]] = []
    resources: dict[str, str]
    events: list[str]

    @property
    def wasted_share(self) -> float:
        """Tokens that were generated for nobody, of all whose fate is known."""
        known = self.generated_tokens - self.unfinished_tokens
        return sum(self.wasted_tokens.values()) / known if known else 0.0


def to_json(simulation: Simulation) -> bytes:
    """One object, indented; `msgspec.json.decode(text, type=Simulation)` reads it back."""
    return msgspec.json.format(msgspec.json.encode(simulation), indent=2) + b"\n"


# -------------------------------------------------------------------------------------------------------- for people
def report(simulation: Simulation) -> str:
    """All of it as text: a few lines, then tables, each left out when it would be empty."""
    blocks = [
        _head(simulation),
        _shares("WHERE A STEP GOES", _in_words(simulation.breakdown), simulation.step_s),
        _utilisation(simulation.utilisation),
        _waits(simulation),
        _ages(simulation.age_histogram),
        _lost(simulation),
        _trajectories(simulation.trajectories),
        "\n".join(simulation.events),
    ]
    return "\n\n".join(block for block in blocks if block)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first flush left, the others flush right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.4567), percent(0.004)
    ('46%', '0.4%')
    """
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def number(value: float) -> str:
    """Four digits, and no exponent for what is large.

    >>> number(1234567.8), number(0.0123456), number(12.0)
    ('1,234,568', '0.01235', '12')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _head(simulation: Simulation) -> str:
    times = simulation.step_times or [simulation.step_s]
    rows = {
        "schedule": f"{simulation.schedule}, alpha {simulation.alpha:g}; {simulation.steps} steps measured",
        "step time": f"{number(simulation.step_s)} s (from {number(min(times))} to {number(max(times))})",
        "throughput": f"{number(simulation.throughput)} tokens/s: {simulation.tokens_per_step:,.0f} per step, "
        f"{simulation.generated_per_step:,.0f} of them generated",
        "cost": f"{number(simulation.cost_per_hour)} an hour, "
        f"{number(simulation.cost_per_million_tokens)} per million trained tokens",
    }
    if bound := simulation.bound:
        parts = ", ".join(f"{name} {number(seconds)} s" for name, seconds in bound.parts.items())
        rows["lower bound"] = f"{number(bound.step_s)} s, by {bound.binding} ({parts})"
        rows["possible"] = f"{percent(simulation.share_of_possible)} of a speed that no schedule could exceed"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _in_words(seconds: Mapping[str, float]) -> dict[str, float]:
    return {SPENT.get(name, name): value for name, value in seconds.items()}


def _shares(title: str, values: Mapping[str, float], whole: float) -> str:
    """Seconds, the most first, each with its share of the whole."""
    shown = sorted(((s, name) for name, s in values.items() if s > WORTH_SHOWING * whole), key=lambda each: -each[0])
    rows = [(name, f"{seconds:,.2f}", percent(seconds / whole)) for seconds, name in shown]
    return table([(title, "SECONDS", "SHARE"), *rows]) if rows else ""


def _utilisation(utilisation: Mapping[str, float]) -> str:
    rows = [(name, percent(share)) for name, share in utilisation.items()]
    return table([("DEVICES", "BUSY"), *rows]) if rows else ""


def _waits(simulation: Simulation) -> str:
    causes = {("rollout: " if name == "training" else "trainer: ") + name: s for name, s in simulation.waits_s.items()}
    return _shares("WAITS BY CAUSE", causes, sum(simulation.step_times) or simulation.step_s)


def _ages(histogram: Mapping[str, int]) -> str:
    whole = sum(histogram.values())
    ordered = sorted(histogram.items(), key=lambda item: int(item[0]))
    rows = [(age, f"{count:,}", percent(count / whole)) for age, count in ordered if count]
    return table([("AGE", "TRAJECTORIES", "SHARE"), *rows]) if rows else ""


def _lost(simulation: Simulation) -> str:
    counts = {
        **{f"trajectories aborted: {cause}": count for cause, count in simulation.aborted.items()},
        **{f"trajectories discarded: {cause}": count for cause, count in simulation.discarded.items()},
        **{f"tokens generated for nobody: {cause}": count for cause, count in simulation.wasted_tokens.items()},
        "tokens prefilled again": simulation.recomputed_tokens,
        "requests set back": simulation.preemptions,
        "unfinished at the end, not lost: trajectories": simulation.unfinished_trajectories,
        "unfinished at the end, not lost: tokens": simulation.unfinished_tokens,
    }
    rows = [(name, f"{count:,}") for name, count in counts.items() if count]
    if not rows:
        return ""
    words = dict.fromkeys(_meaning(name) for name, _ in rows)
    return "\n".join([table([("LOST WORK", "NUMBER"), *rows]), *(f"  {each}" for each in words if each)])


def _meaning(row: str) -> str:
    """What a row of the table of lost work counts."""
    name, _, cause = row.partition(": ")
    if name in MEANINGS:
        return f"{name}: {MEANINGS[name]}"
    return f"{cause}: {CAUSES.get(cause, WHOLE)}" if cause else ""


def _trajectories(trajectories: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for means in trajectories.values() for name in means))
    rows = [(task, *(number(means.get(name, 0.0)) for name in names)) for task, means in trajectories.items()]
    headings = [name.upper().replace("_", " ") for name in names]
    return table([("TASK", *headings), *rows]) if rows else ""
