"""`rollart plan`: the search for a plan that trains more tokens per second, or for less money, than a config.

    explore   short simulations: a coarse grid around the config, then, round by round, what several improvements give
              together, and the neighbours of the best so far
    halve     twice as many steps for the better half, until the best have been simulated as long as the config says
              (successive halving: Karnin, Koren and Somekh, ICML 2013; Jamieson and Talwalkar, AISTATS 2016)

All simulations have the config's seed, so that plans are compared on the same tasks (common random numbers). A plan
that cannot be simulated, because the model does not fit or devices are lacking, is counted by its reason and left out.

Invariant: the same config, allowance and number of trials give the same plans, however many processes simulate; a plan
with a greater alpha than the config's comes only when it is allowed, and is marked. What this file leaves out: which
plans there are (`plan_space.py`), the simulation (`simulator.py`) and the words (`plan_report.py`).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace

from rollart import simulator
from rollart.config import Config
from rollart.errors import ConfigError, RollartError
from rollart.plan_choice import Choice, changes, configured
from rollart.plan_command import Allowance, Objective, Order
from rollart.plan_processes import Runner, Simulate, as_interrupt, runner
from rollart.plan_report import Plan, Plans, report, to_config, to_json
from rollart.plan_space import Space
from rollart.sections import SimulateConfig
from rollart.simulation import Simulation

BEAM = 2
"""Plans whose neighbours are tried in a round."""
MERGED = 4
"""Kinds of improvements that are tried together with the best one."""
BALANCED = 6
"""Best plans whose split of devices is tried anew, as their simulation suggests."""
SLACK = 0.1
"""What idle devices are worth while exploring: what limits a plan may be what the next change removes."""
PATIENCE = 2
"""Rounds without a gain after which exploring ends."""
SHORT = 2
"""Measured steps of an exploring simulation."""
WORTH = 0.005
"""Gain of a round below which it counts as none."""
WIDTH = 8
"""Plans of a round at least; beyond it a quarter of the trials."""


def run(config: Config, order: Order) -> Plans:
    """Search, with progress on stderr, and write the files. Raises RollartError."""
    for path in (order.out, order.json):
        if path is not None:
            simulator.writable(path)
    with as_interrupt():
        found = plan(
            config,
            _simulated,
            order.allowed,
            objective=order.objective,
            trials=order.trials,
            top=order.top,
            jobs=order.jobs,
            say=_teller(),
        )
    return written(found, order)


def written(found: Plans, order: Order) -> Plans:
    """The files are written: the best as a config, if it is better than what was given, and all figures if wanted.

    Raises RunFolderError.
    """
    if found.best is not None:
        simulator.write(order.out, to_config(found.best, found.given, order.source).encode())
    if order.json is not None:
        simulator.write(order.json, to_json(found).encode())
    return found


def told(found: Plans, out: Path) -> str:
    """What the command prints."""
    text = report(found)
    return text if found.best is None else f"{text}\n\n{out}: plan {found.plans.index(found.best) + 1} as a config"


def plan(
    config: Config,
    simulate: Simulate,
    allowed: Allowance | None = None,
    *,
    objective: Objective = "throughput",
    trials: int = 100,
    top: int = 5,
    jobs: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Plans:
    """Search with about `trials` simulations and return the `top` best plans.

    simulate: a function of a module, where `jobs` processes call it. say: hears a line per simulation. A
    KeyboardInterrupt ends the search with what was found, if anything was. Raises ConfigError where the config cannot
    be planned, or simulated itself.
    """
    space = Space(config, allowed or Allowance())
    with runner(simulate, jobs) as run:
        search = _Search(space, run, objective, trials, top, say)
        interrupted = False
        try:
            search.run()
        except KeyboardInterrupt:
            if not search.has_begun:
                raise
            interrupted = True
    return search.plans(interrupted)


class _Search:
    """The two phases, and what is known: (choice, steps) -> simulation."""

    def __init__(
        self, space: Space, runner: Runner, objective: Objective, trials: int, top: int, say: Callable[[str], None]
    ) -> None:
        self._space, self._runner, self._objective, self._say = space, runner, objective, say
        self._config, self._given = space.config, space.given
        self._trials, self._num_done, self._top = trials, 0, top
        self._results: dict[tuple[Choice, int], Simulation] = {}
        self._impossible: dict[Choice, str] = {}
        self._parents: dict[Choice, Choice] = {}
        self._rungs = _rungs(self._config)
        self._survivors = _survivors(len(self._rungs) - 1, top, trials)

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._results)

    def run(self) -> None:
        """Explore, then halve. Raises ConfigError where the config itself cannot be simulated."""
        short = self._rungs[0]
        self._evaluate([self._given], short)
        if failure := self._impossible.get(self._given):
            raise ConfigError(f"the config cannot be simulated as it is: {failure}")
        self._space.tags = _tags(self._config, self._results[self._given, short])
        self._explore()
        for before, steps, number in zip(self._rungs[:-1], self._rungs[1:], self._survivors, strict=True):
            survivors = [choice for choice in self._ranked(before) if choice != self._given][:number]
            self._evaluate([self._given, *survivors], steps)

    def plans(self, interrupted: bool = False) -> Plans:
        """What is known: of the longest simulations that any plan got, and the config as well."""
        lengths = [steps for choice, steps in self._results if choice == self._given]
        others = {steps for choice, steps in self._results if choice != self._given}
        steps = max((length for length in lengths if length in others), default=max(lengths))
        ranked = [choice for choice in self._ranked(steps) if choice != self._given]
        return Plans(
            given=self._plan(self._given, steps),
            plans=[self._plan(choice, steps) for choice in ranked[: self._top]],
            objective=self._objective,
            trials=self._num_done,
            budget=self._space.budget,
            impossible=dict(Counter(self._impossible.values()).most_common()),
            interrupted=interrupted,
        )

    # ------------------------------------------------------------------------------------------------------- exploring
    def _explore(self) -> None:
        """Rounds of short simulations, as long as they gain and trials are left for the second phase."""
        short, start = self._rungs[0], self._space.start()
        frontier, best, in_vain = self._space.grid(), 0.0, 0
        for each in frontier:
            self._parents.setdefault(each, start or each)
        while frontier and self._left() > 0 and in_vain < PATIENCE:
            self._evaluate(frontier[: self._left()], short)
            ranked = self._promising(short)
            reached = max(self._gain(each, short) for each in ranked)
            in_vain = 0 if reached > best * (1 + WORTH) else in_vain + 1
            best = max(best, reached)
            frontier = self._next(ranked)

    def _left(self) -> int:
        """Trials left for exploring; each rung simulates the config itself too."""
        return self._trials - self._num_done - sum(number + 1 for number in self._survivors)

    def _next(self, ranked: Sequence[Choice]) -> list[Choice]:
        """What improvements give together, better splits, then in turn neighbours of both; none that was tried."""
        merged = [each for best in ranked[:BEAM] for each in self._merged(best, ranked)]
        balanced = [self._born(self._balanced(each), each) for each in ranked[:BALANCED]]
        centres = [*ranked[:1], *balanced[:1], *ranked[1:BEAM]]
        around = [[self._born(each, centre) for each in self._space.neighbours(centre)] for centre in centres if centre]
        found = [*merged, *balanced, *(each for row in zip_longest(*around) for each in row)]
        fresh = [each for each in dict.fromkeys(found) if each is not None and not self._tried(each)]
        return fresh[: max(WIDTH, self._trials // 4)]

    def _born(self, choice: Choice | None, parent: Choice) -> Choice | None:
        """It was made from that one, unless it had been before."""
        if choice is not None:
            self._parents.setdefault(choice, parent)
        return choice

    def _merged(self, best: Choice, ranked: Sequence[Choice]) -> list[Choice | None]:
        """The best of a family with each of those of it that beat their parent by another kind of change, and all."""
        short, parent, merged = self._rungs[0], self._parents.get(best, best), best
        worth = self._gain(parent, short) if (parent, short) in self._results else 0.0
        found: list[Choice | None] = []
        kinds = best.kinds(parent)
        for sibling in ranked:
            new = sibling.kinds(parent)
            if self._parents.get(sibling) != parent or new <= kinds or self._gain(sibling, short) <= worth:
                continue
            kinds |= new
            found.append(self._born(self._space.merged(parent, best, sibling), best))
            merged = self._space.merged(parent, merged, sibling) or merged
            found.append(self._born(merged, best))
            if len(found) >= 2 * MERGED:
                break
        return found

    def _balanced(self, choice: Choice) -> Choice | None:
        """Fewer devices for a trainer that mostly waits, else more: rollout waits for the slots that training holds."""
        simulation = self._results[choice, self._rungs[0]]
        return self._space.balanced(choice, simulation.breakdown.get("training", 0.0) / simulation.step_s)

    # ------------------------------------------------------------------------------------------------------ simulating
    def _evaluate(self, choices: Iterable[Choice], steps: int) -> None:
        """Simulate those that were not yet, so long."""
        configs: dict[Choice, Config] = {}
        for each in choices:
            if (each, steps) in self._results or each in self._impossible:
                continue
            try:
                configs[each] = replace(configured(self._config, self._given, each), steps=steps)
            except RollartError as error:
                self._fail(each, str(error))
        if not configs:
            return
        number = f"{len(configs)} plan{'s' if len(configs) != 1 else ''}"
        self._say(f"{number} for {steps} steps{self._best_so_far()}")
        order = list(configs)
        for index, result in self._runner(list(configs.values())):
            self._num_done += 1
            if isinstance(result, str):
                self._fail(order[index], result)
            else:
                self._results[order[index], steps] = result
                self._say(self._line(order[index], steps))

    def _fail(self, choice: Choice, reason: str) -> None:
        self._impossible[choice] = reason.partition("\n")[0]
        self._say(f"[{self._num_done}/{self._trials}] impossible: {self._impossible[choice]}")

    def _line(self, choice: Choice, steps: int) -> str:
        gain = f"{self._gain(choice, steps):.3f}x, " if (self._given, steps) in self._results else ""
        what = "; ".join(changes(self._given, choice)) or "the config as it is"
        return (
            f"[{self._num_done}/{self._trials}] {gain}{self._results[choice, steps].throughput:,.0f} tokens/s: {what}"
        )

    def _best_so_far(self) -> str:
        """Of the short simulations, in which all plans are compared."""
        short = self._rungs[0]
        gains = [self._gain(choice, short) for choice, steps in self._results if steps == short]
        return f"; best so far {max(gains):.3f}x" if len(gains) > 1 else ""

    def _tried(self, choice: Choice) -> bool:
        return choice in self._impossible or (choice, self._rungs[0]) in self._results

    # --------------------------------------------------------------------------------------------------------- ranking
    def _ranked(self, steps: int) -> list[Choice]:
        """Best first; among equal ones those that cost less, then those that change less."""
        there = [choice for choice, length in self._results if length == steps]
        return sorted(there, key=lambda choice: self._rank(choice, steps))

    def _promising(self, steps: int) -> list[Choice]:
        """As `_ranked`, but among about equal ones first those whose devices have more left to give."""

        def soft(choice: Choice) -> float:
            shares = self._results[choice, steps].utilisation.values()
            return self._worth(choice, steps) / (1 + SLACK * sum(shares) / max(1, len(shares)))

        return sorted(self._ranked(steps), key=lambda choice: -soft(choice))

    def _rank(self, choice: Choice, steps: int) -> tuple[float, float, int, str]:
        """Less is better. It does not depend on who was simulated first."""
        cost, number = self._space.cost(dict(choice.devices)), len(changes(self._given, choice))
        return -self._worth(choice, steps), cost, number, repr(choice)

    def _worth(self, choice: Choice, steps: int) -> float:
        """More is better."""
        simulation = self._results[choice, steps]
        if self._objective == "throughput":
            return simulation.throughput
        dear = simulation.cost_per_million_tokens
        return 1 / dear if dear > 0 else 0.0

    def _gain(self, choice: Choice, steps: int) -> float:
        base = self._worth(self._given, steps)
        return self._worth(choice, steps) / base if base else 0.0

    def _plan(self, choice: Choice, steps: int) -> Plan:
        config = configured(self._config, self._given, choice)
        differs = choice.bound > self._config.effective_alpha
        return Plan(choice, config, self._results[choice, steps], self._gain(choice, steps), differs)


def _rungs(config: Config) -> list[int]:
    """Steps of the short simulations, doubled up to the config's."""
    warmup = (config.simulate or SimulateConfig()).warmup_steps
    rungs, steps = [], warmup + SHORT
    while steps < config.steps:
        rungs.append(steps)
        steps *= 2
    return [*rungs, config.steps]


def _survivors(rungs: int, top: int, trials: int) -> list[int]:
    """Plans that reach each rung after the first, at most half of all trials together."""
    share = max(1, trials // (2 * rungs) - 1) if rungs else 0
    return [min(share, top * 2 ** (rungs - rung)) for rung in range(1, rungs + 1)]


def _tags(config: Config, simulation: Simulation) -> list[str]:
    """The task domains, those with the most prompt tokens per generated token first."""
    sums: dict[str, tuple[float, float]] = {}
    for task, means in simulation.trajectories.items():
        tag = config.tasks[task].tag or task
        prompt, response = sums.get(tag, (0.0, 0.0))
        sums[tag] = prompt + means["prompt_tokens"], response + means["response_tokens"]
    return sorted(sums, key=lambda tag: (-sums[tag][0] / max(1.0, sums[tag][1]), tag))


def _teller() -> Callable[[str], None]:
    """Progress on stderr, with the time since now."""
    began = time.monotonic()

    def tell(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"rollart: {minutes}m{seconds:02d}s {line}", file=sys.stderr, flush=True)  # noqa: T201

    return tell


def _simulated(config: Config) -> Simulation:
    """Of the module, so that another process finds it."""
    return simulator.simulate(config)
