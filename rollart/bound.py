"""The step time that no schedule could beat, for the batches that a run trained on and the engines that it had. PURE.

Three parts, each a bound by itself; the largest is the answer. Whatever the order in which work is done, a long run
that trains on such batches takes per step at least

    training            what one train_step takes on the trainer's devices
    longest trajectory  what the longest trajectory of a batch takes when it is alone, from its first token to its last
                        step, divided by the number of versions that may pass meanwhile. A trajectory that begins under
                        version s and is taken at version v lives within v - s + 1 <= alpha + 1 of the periods between
                        updates, and there is one per step (paper section 5; a fractional alpha: `control/staleness.py`)
    rollout             the least time in which the engines can do the work of a batch when it may be spread over them
                        at will (below)

The parts are not added, also where a schedule alternates: another schedule need not. Nothing that a better schedule
could avoid is counted: no redundant, aborted or recomputed tokens, no weight transfers, no waiting in queues, no reset
(environments can be reset ahead, as many as one likes) and no reward (what else is in its queue can wait).

Rollout. Work of a batch: each prompt token is prefilled once (perfect reuse of prefixes), each generated token but the
first of its turn, which prefill gives, is decoded. An engine's step takes `linear(tokens) + attention`; attention is a
sum over its tokens. `linear` grows like a line far out, never shrinks, and per token it is least for the largest batch.
With D tokens decoded by an engine in N steps, P prefilled, and K the sum of the contexts of the decoded ones, we know
N >= D / slots and N >= K / capacity, so that three sums are each at most the time that all its `linear` takes:

    arithmetic        slope x (P + D) + overhead x D / slots      (slope and overhead of the line)
    reads, slots full linear(slots) / slots x D                   (weights are read for `slots` requests at best)
    reads, KV full    linear(1) / capacity x K                    (... and for as many as memory has room for)

So the time T of n_c engines on each class c is at least the linear program: min T so that for every class c and sum r,
sum_t x_tc w_tcr <= n_c T and sum_c x_tc = 1, x >= 0. By weak duality (any textbook, such as Bertsimas and Tsitsiklis
1997, chapter 4) all prices p_cr >= 0 with sum p_cr = 1 give T >= sum_t min_c sum_r p_cr w_tcr / n_c. Good prices are
found by multiplicative weights (Arora, Hazan and Kale 2012, section 3.3); the bound holds for any, also if the search
stops early.

The tasks t of this program are single tokens, so that a request may even change engines between two of them. They need
not be listed: the price of a token is the least of several lines in its context, thus concave, so that shifting tokens
apart, to points of a grid with their number and the sum of their contexts kept, only lowers the bound (Jensen).

Invariant: `Rollout.seconds` <= the program's optimum <= `Rollout.reached_s`. What this file leaves out: the edges of a
short run, whose first batches were partly made before its first measured step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from rollart.config import Config
from rollart.control.staleness import Staleness
from rollart.data.simulated.device import Pace
from rollart.data.simulated.model_shape import ModelShape
from rollart.data.simulated.profile import Profile
from rollart.data.simulated.runtime import figures, nodes_of, train_seconds
from rollart.resource.placement import Wanted, place

ROWS = ("arithmetic", "reads at full slots", "reads at full KV")
GRID = 64
"""Intervals of the grid of contexts."""
ITERATIONS = 1000
CLOSE = 0.005
"""Relative gap between the bound and what an assignment reaches from which the search ends."""
FAR = 2**24
"""Tokens from which on `linear` is a line."""
SAID = 0.05
"""Price below which a resource is not named."""

Kind = Literal["prefill", "decode"]
Turn = tuple[int, int, int]
"""New prompt tokens, tokens before them, generated tokens."""
Line = tuple[float, float]
"""Seconds of a token without context, and more per token of context."""
Prices = dict[tuple[str, int], float]
"""(class, row of ROWS) -> price, or load."""


class Bound(Struct, frozen=True):
    """`step_s`: the largest of `parts`, seconds per step. `binding`: which that is, in words, with what limits it."""

    step_s: float
    parts: dict[str, float]
    binding: str


class Speed(Protocol):
    """How fast one engine is; `data/simulated/device.py` has it."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that fit."""
        ...

    def prefill_step(self, new_tokens: int, attended: float) -> float:
        """Seconds of a step that reads so many tokens, which attend to `attended` tokens in all."""
        ...

    def decode(self, decoding: int, kv_tokens: float) -> tuple[float, float]:
        """Seconds of a step that decodes so many tokens, which attend to `kv_tokens` in all; its growth per step."""
        ...


class Engines(Struct, frozen=True):
    """All engines of one device class: how many, how fast each, and the requests that each runs at once."""

    number: int
    speed: Speed
    slots: int


class TrainedTrajectory(Struct, frozen=True):
    """What the bound needs of a trajectory that was trained on: tokens per turn, seconds by stage, and those in which
    its environment worked on its steps.

    The stage `step` is no part of the bound: where environments step together it holds the wait for the others.
    """

    task: str
    prompts: list[int]
    responses: list[int]
    seconds: dict[str, float]
    step_s: float = 0.0

    def turns(self) -> Iterator[Turn]:
        """With the tokens before each."""
        context = 0
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            yield prompt, context, response
            context += prompt + response


Batches = Sequence[Sequence[TrainedTrajectory]]


def lower_bound(config: Config, profile: Profile, model: ModelShape, batches: Batches) -> Bound:
    """The bound of a simulated run, for the batches of its measured steps. Raises ConfigError."""
    # Any number of training workers: here it is a matter of devices alone.
    placed = place(replace(config, trainer="simulated"), nodes_of(config), ("actor_train", "actor_gen"))
    emulated, efficiency = profile.engine == "emulated", profile.efficiency

    def pace(wanted: Wanted, num_devices: int) -> Pace:
        return Pace(figures(wanted.device_class), model, num_devices, efficiency, emulated)

    engines: dict[str, Engines] = {}
    for each in placed.of_role("actor_gen"):
        known = engines.get(each.device_class)
        speed = known.speed if known else pace(each, each.num_devices)
        slots = min(config.rollout.engine_slots, efficiency.slots_max)
        engines[each.device_class] = Engines(known.number + 1 if known else 1, speed, slots)
    trainers = placed.of_role("actor_train")
    seconds, num_devices = train_seconds(profile, trainers[0].device_class, model), sum(e.num_devices for e in trainers)
    lengths = [[sum(each.prompts) + sum(each.responses) for each in batch] for batch in batches]
    generated = [sum(sum(each.responses) for each in batch) for batch in batches]
    train_s = [seconds(each, number, num_devices) for each, number in zip(lengths, generated, strict=True)]
    staleness = Staleness.of(config.effective_alpha, config.rollout.groups_per_batch)
    return bound_of(batches, train_s, engines, staleness, config.rollout.group_size)


def bound_of(
    batches: Batches,
    train_s: Sequence[float],
    engines: Mapping[str, Engines],
    staleness: Staleness,
    group_size: int = 1,
) -> Bound:
    """The bound for batches, trained on in `train_s` seconds each, and engines by device class.

    Raises ValueError without batches or engines.
    """
    if not batches or not engines:
        raise ValueError("a lower bound needs at least one batch and one engine")
    rollout = Rollout(engines, [turn for batch in batches for each in batch for turn in each.turns()])
    longest = [
        _within_versions([each.step_s + _alone_s(each, engines) for each in batch], staleness, group_size)
        for batch in batches
    ]
    parts = {
        "training": _mean(train_s),
        "longest trajectory": _mean(longest),
        "rollout": rollout.seconds / len(batches),
    }
    largest = max(parts, key=lambda name: parts[name])
    return Bound(parts[largest], parts, f"rollout: {rollout.limits()}" if largest == "rollout" else largest)


def _alone_s(trajectory: TrainedTrajectory, engines: Mapping[str, Engines]) -> float:
    """Generation of a whole trajectory without any other, each turn on the class that is fastest for it."""
    speeds = [each.speed for each in engines.values()]
    return sum(min(_turn_s(speed, *turn) for speed in speeds) for turn in trajectory.turns())


def _turn_s(speed: Speed, prompt: int, context: int, response: int) -> float:
    """One turn that has an engine for itself: one step reads the prompt, then an arithmetic series decodes."""
    first_s = speed.prefill_step(prompt, prompt * context + prompt * (prompt + 1) / 2)
    step_s, growth_s = speed.decode(1, context + prompt + 1)
    more = max(0, response - 1)
    return first_s + more * step_s + growth_s * more * (more - 1) / 2


def _within_versions(alone_s: Sequence[float], staleness: Staleness, group_size: int) -> float:
    """Seconds per step at least, given those of the trajectories of one batch alone.

    `quota` groups may be one version older than the others: at best those with the longest trajectories.
    """
    ordered = sorted(alone_s, reverse=True)
    others = ordered[staleness.quota * group_size :]
    return max(ordered[0] / (staleness.oldest + 1), others[0] / (staleness.whole + 1) if others else 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# ----------------------------------------------------------------------------------------------------- the program
class Rollout:
    """The linear program of the module docstring, for some turns.

    seconds: the bound, for all turns together. reached_s: what some assignment of tokens to classes reaches.
    prices: those of the bound; the higher, the more would be gained by more of that resource.
    """

    def __init__(self, engines: Mapping[str, Engines], turns: Iterable[Turn]) -> None:
        self._classes = list(engines)
        self._lines: dict[tuple[Kind, str], list[Line]] = {}
        for name, each in engines.items():
            for kind, lines in _lines(each).items():
                self._lines[kind, name] = [(a / each.number, b / each.number) for a, b in lines]
        self._work = _gridded(list(turns))
        self.seconds, self.reached_s = 0.0, math.inf
        rows = [(name, row) for name in engines for row in range(len(ROWS))]
        self.prices: Prices = dict.fromkeys(rows, 1 / len(rows))
        self._search()

    def limits(self) -> str:
        """What the prices say, in words."""
        ordered = sorted(self.prices.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {ROWS[row]} {price:.0%}" for (name, row), price in ordered if price >= SAID)

    def _search(self) -> None:
        """Multiplicative weights: what is loaded more than the rest grows dearer. Both ends come closer on average."""
        prices, mean_prices, mean_loads = self.prices, dict(self.prices), dict.fromkeys(self.prices, 0.0)
        for number in range(1, ITERATIONS + 1):
            loads = self._priced(prices)
            mean_prices = _moved(mean_prices, prices, 2 / (number + 1))
            mean_loads = _moved(mean_loads, loads, 2 / (number + 1))
            self.reached_s = min(self.reached_s, max(mean_loads.values()))
            if number % 10 == 0:
                self._priced(mean_prices)
            if self.seconds >= (1 - CLOSE) * self.reached_s:
                return
            rate = math.sqrt(math.log(len(prices)) / number) / max(loads.values())
            prices = _whole({row: price * math.exp(rate * loads[row]) for row, price in prices.items()})

    def _priced(self, prices: Prices) -> Prices:
        """Every token goes where it is cheapest: the loads. Their value is a bound, which is kept if it is the best."""
        value, loads = 0.0, dict.fromkeys(prices, 0.0)
        for kind, contexts in self._work.items():
            placed = dict.fromkeys(self._classes, (0.0, 0.0))
            offers = [(self._offer(prices, kind, name), name) for name in self._classes]
            for context, tokens in contexts.items():
                cost, name = min((a + b * context, name) for (a, b), name in offers)
                value += cost * tokens
                there, weighted = placed[name]
                placed[name] = there + tokens, weighted + tokens * context
            for name, (tokens, weighted) in placed.items():
                for row, (a, b) in enumerate(self._lines[kind, name]):
                    loads[name, row] += a * tokens + b * weighted
        if value > self.seconds:
            self.seconds, self.prices = value, prices
        return loads

    def _offer(self, prices: Prices, kind: Kind, name: str) -> Line:
        """The price of a token on a class, a line in its context."""
        lines = self._lines[kind, name]
        priced = [(prices[name, row] * a, prices[name, row] * b) for row, (a, b) in enumerate(lines)]
        return sum(a for a, _ in priced), sum(b for _, b in priced)


def _lines(engines: Engines) -> dict[Kind, list[Line]]:
    """Per row of ROWS, what a token adds to it on one engine."""
    speed, slots = engines.speed, engines.slots
    slope = (speed.prefill_step(2 * FAR, 0) - speed.prefill_step(FAR, 0)) / FAR
    overhead = max(0.0, speed.prefill_step(FAR, 0) - slope * FAR)
    attended = (speed.prefill_step(1, FAR) - speed.prefill_step(1, 0)) / FAR
    one_s, read = speed.decode(1, 0)
    full_s, _ = speed.decode(slots, 0)
    return {
        "prefill": [(slope, attended), (0.0, attended), (0.0, attended)],
        "decode": [
            (slope + overhead / slots, read),
            (full_s / slots, read),
            (0.0, read + one_s / max(1, speed.kv_capacity_tokens)),
        ],
    }


def _moved(mean: Prices, value: Prices, weight: float) -> Prices:
    return {row: before + weight * (value[row] - before) for row, before in mean.items()}


def _whole(prices: Prices) -> Prices:
    whole = sum(prices.values())
    return {row: price / whole for row, price in prices.items()}


# ------------------------------------------------------------------------------------------------------------ the work
def _gridded(turns: Sequence[Turn]) -> dict[Kind, dict[float, float]]:
    """Tokens by what they attend to, on a grid; shifted only outwards, with their number and sum of contexts kept."""
    work: dict[Kind, dict[float, float]] = {"prefill": {}, "decode": {}}
    width = max(1.0, max(map(sum, turns), default=0) / GRID)
    for prompt, context, response in turns:
        before = context + prompt
        _spread(work["prefill"], context + 1, before, width)
        _spread(work["decode"], before + 1, before + response - 1, width)
    return work


def _spread(work: dict[float, float], first: int, last: int, width: float) -> None:
    """One token at each context from first to last: half of them to either end, these to the grid points beside it."""
    tokens = last - first + 1
    if tokens < 1:
        return
    for context in (first, last):
        below = math.floor(context / width)
        above_share = context / width - below
        for point, share in ((below, 1 - above_share), (below + 1, above_share)):
            if share:
                work[point * width] = work.get(point * width, 0.0) + share * tokens / 2
