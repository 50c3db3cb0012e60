"""What `rollart plan` found, prints and writes: the best plans, what they change, why they gain, one as a config.

Invariant: every figure and every reason is taken from two simulations, that of the given config and that of the plan.
What this file leaves out: how plans are found (`planner.py`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from rollart.config import Config, to_dict, to_toml
from rollart.plan_choice import Choice, changes
from rollart.plan_command import Objective
from rollart.simulation import SPENT, Simulation, percent, table

WORTH_SAYING = 0.02
"""Share of a step by which a part must change to be named."""
NAMED = 3
"""Parts that are named."""
WIDTH = 110


class Plan(Struct, frozen=True):
    """A plan that was simulated. `gain`: against the given config in the same number of steps, by the objective.

    differs: it has a greater alpha than the config, which changes what is learned, not only how fast.
    """

    choice: Choice
    config: Config
    simulation: Simulation
    gain: float
    differs: bool = False


class Plans(Struct, frozen=True):
    """What a search found, best first. `given`: the config itself. `budget`: cost per hour that was allowed.

    impossible: number of plans by the reason why they could not be simulated.
    """

    given: Plan
    plans: list[Plan]
    objective: Objective
    trials: int
    budget: float
    impossible: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def best(self) -> Plan | None:
        """The best that is better than the given config."""
        return next((each for each in self.plans if each.gain > 1), None)


def report(plans: Plans) -> str:
    """All of it as text."""
    head = [f"{plans.trials} simulations" + (", interrupted: this is the best so far" if plans.interrupted else "")]
    if number := sum(plans.impossible.values()):
        head.append(f"{number} more plans cannot be simulated:")
        head += [f"    {count} x {reason}" for reason, count in list(plans.impossible.items())[:NAMED]]
    blocks = ["\n".join(head), _table(plans)]
    blocks += [_explained(f"plan {number}", plans.given, each) for number, each in enumerate(plans.plans, 1)]
    if plans.best is None:
        blocks.append("No plan that was tried is better than the config as it is.")
    return "\n\n".join(blocks)


def to_config(plan: Plan, given: Plan, source: str) -> str:
    """The plan as TOML for `rollart simulate` and `rollart train`, with what is expected of it on top."""
    simulation = plan.simulation
    said = [
        f"Found by `rollart plan` from {source}: {_gained(plan, given)}.",
        f"Expected: {simulation.step_s:,.1f} s per step, {simulation.throughput:,.0f} tokens/s, "
        f"{simulation.cost_per_million_tokens:.4g} per million trained tokens "
        f"(was: {given.simulation.step_s:,.1f} s, {given.simulation.throughput:,.0f} tokens/s, "
        f"{given.simulation.cost_per_million_tokens:.4g}).",
        f"Changes: {'; '.join(changes(given.choice, plan.choice))}.",
        f"Why: {why(given, plan)}",
    ]
    if plan.differs:
        said.append("Its alpha is greater than the config's was: this changes what is learned, not only how fast.")
    lines = [line for each in said for line in textwrap.wrap(each, WIDTH)]
    return "".join(f"# {line}\n" for line in lines) + "\n" + to_toml(plan.config)


def to_json(plans: Plans) -> str:
    """One object: `given`, `plans` (best first) with all figures of their simulations, and what else is known."""
    plain = {
        "objective": plans.objective,
        "trials": plans.trials,
        "interrupted": plans.interrupted,
        "impossible": plans.impossible,
        "budget": plans.budget,
        "given": _plain(plans.given, plans.given),
        "plans": [_plain(each, plans.given) for each in plans.plans],
    }
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"


def _plain(plan: Plan, given: Plan) -> dict[str, Any]:
    return {
        "gain": plan.gain,
        "more_stale": plan.differs,
        "changes": changes(given.choice, plan.choice),
        "why": why(given, plan) if plan.choice != given.choice else "",
        "choice": plan.choice,
        "config": to_dict(plan.config),
        "simulation": plan.simulation,
    }


# ------------------------------------------------------------------------------------------------------------ one plan
def _table(plans: Plans) -> str:
    rows = [("PLAN", "GAIN", "STEP S", "TOKENS/S", "COST/HOUR", "PER MILLION", "OF POSSIBLE")]
    named = [("as given", plans.given), *((f"plan {number}", each) for number, each in enumerate(plans.plans, 1))]
    for name, each in named:
        simulation = each.simulation
        rows.append(
            (
                name + (" *" if each.differs else ""),
                f"{each.gain:.2f}x",
                f"{simulation.step_s:,.1f}",
                f"{simulation.throughput:,.0f}",
                f"{simulation.cost_per_hour:.4g}",
                f"{simulation.cost_per_million_tokens:.4g}",
                percent(simulation.share_of_possible) if simulation.bound else "-",
            )
        )
    marked = any(each.differs for _, each in named)
    return table(rows) + ("\n* a greater alpha than the config's: it changes what is learned" if marked else "")


def _explained(name: str, given: Plan, plan: Plan) -> str:
    lines = [
        f"{name}: {_gained(plan, given)}",
        *_wrapped("changes", "; ".join(changes(given.choice, plan.choice))),
        *_wrapped("why", why(given, plan)),
        *_wrapped("busy", _busy(plan.simulation.utilisation)),
    ]
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<8} ", subsequent_indent=" " * 11) if text else []


def _gained(plan: Plan, given: Plan) -> str:
    faster = plan.simulation.throughput / given.simulation.throughput if given.simulation.throughput else 0.0
    costs = plan.simulation.cost_per_hour, given.simulation.cost_per_hour
    money = "at the same cost" if costs[0] == costs[1] else f"at {costs[0]:.4g} instead of {costs[1]:.4g} an hour"
    return f"{faster:.2f}x the trained tokens per second {money}"


def _busy(utilisation: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in utilisation.items())


# --------------------------------------------------------------------------------------------------------- why it gains
def why(given: Plan, plan: Plan) -> str:
    """What the time was spent on before, and what became of it: sentences from the two simulations."""
    before, after = given.simulation, plan.simulation
    sentences = [_spent(before), _moved_time(before, after), _moved_work(before, after), _waste(before, after)]
    return " ".join([*filter(None, sentences), *_batch(given, plan)])


def _spent(before: Simulation) -> str:
    """The largest parts of a step, and who was busy or idle meanwhile."""
    largest = sorted(before.breakdown.items(), key=lambda item: -item[1])[:2]
    parts = [f"{percent(each / before.step_s)} {SPENT.get(name, name)}" for name, each in largest if each]
    text = f"Before, a step of {before.step_s:,.1f} s was {' and '.join(parts)}" if parts else ""
    busy = sorted(before.utilisation.items(), key=lambda item: -item[1])
    if text and len(busy) > 1 and busy[0][1] > busy[-1][1]:
        text += f"; {busy[0][0]} worked {percent(busy[0][1])} of the time, {busy[-1][0]} {percent(busy[-1][1])}"
    return f"{text}." if text else ""


def _moved_time(before: Simulation, after: Simulation) -> str:
    """The parts of a step that change most."""
    deltas = _deltas(before.breakdown, after.breakdown)
    named = [name for name in deltas if abs(deltas[name]) >= WORTH_SAYING * before.step_s][:NAMED]
    parts = [
        f"{SPENT.get(name, name)} takes {after.breakdown.get(name, 0.0):,.1f} s instead of "
        f"{before.breakdown.get(name, 0.0):,.1f} s"
        for name in named
    ]
    return f"Now {_and(parts)}." if parts else ""


def _moved_work(before: Simulation, after: Simulation) -> str:
    """The devices whose share of working time changes most, among those that both have."""
    both = {name: share for name, share in before.utilisation.items() if name in after.utilisation}
    deltas = _deltas(both, {name: after.utilisation[name] for name in both})
    named = [name for name in deltas if abs(deltas[name]) >= WORTH_SAYING][:2]
    parts = [f"{name} works {percent(after.utilisation[name])} instead of {percent(both[name])}" for name in named]
    gone = [f"{name} is no longer there" for name in before.utilisation if name not in after.utilisation]
    new = [
        f"{name}, which is new, works {percent(share)}"
        for name, share in after.utilisation.items()
        if name not in before.utilisation
    ]
    said = _and([*parts, *new, *gone])
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _waste(before: Simulation, after: Simulation) -> str:
    """Tokens that were generated for nobody, when their share changes."""
    shares = before.wasted_share, after.wasted_share
    if abs(shares[1] - shares[0]) < WORTH_SAYING / 2:
        return ""
    return f"Of all generated tokens, {percent(shares[1])} are for nobody, where it was {percent(shares[0])}."


def _batch(given: Plan, plan: Plan) -> list[str]:
    """A batch whose trajectories are shorter or longer than they were is another training."""
    before, after = given.simulation.tokens_per_step, plan.simulation.tokens_per_step
    if not before or abs(after / before - 1) < WORTH_SAYING:
        return []
    extra = [(each.choice.extra_groups, each.choice.extra_members) for each in (given, plan)]
    cause = ": who starts more takes the first to finish, which are the short ones" if extra[0] != extra[1] else ""
    return [f"A batch has {percent(abs(after / before - 1))} {'fewer' if after < before else 'more'} tokens{cause}."]


def _deltas(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """After less before, the largest change first."""
    names = dict.fromkeys([*before, *after])
    deltas = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    return dict(sorted(deltas.items(), key=lambda item: -abs(item[1])))


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else ""
