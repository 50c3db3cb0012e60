"""Which plans there are around a config, within what is allowed. PURE.

Invariant: every choice that `Space` hands out costs at most the budget, or takes exactly the devices asked for, and
leaves training and rollout at least one worker each; whether the model fits on them, the simulation will say. The order
of choices depends on nothing but the config. What this file leaves out: what a choice is (`plan_choice.py`) and how
good it is (`planner.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from rollart.checks import nearest
from rollart.config import Config
from rollart.errors import ConfigError
from rollart.plan_choice import AUTO, Affinity, Choice, Trainer, given, node_size, pools
from rollart.plan_command import Allowance
from rollart.schedule import SCHEDULES

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
TENSOR_PARALLEL = (1, 2, 4, 8)
QUARTERS = 4
"""The grid of pool mixes gives each class so many parts of the budget."""
SHARES = (1 / 8, 1 / 4, 1 / 2)
"""The grid of splits gives training so much of the devices."""
FACTORS = (0.5, 0.75, 1.25, 1.5, 2.0)
"""By which a neighbour has more or fewer devices for training."""
STEPS = (1, 4)
"""Steps of a pool that a neighbour trades for devices of another class."""
BUSY, MORE, FEWER = 0.5, 1.25, 0.75
"""Training that takes more than this share of the time gets so many more devices for a try, else so many fewer."""
ROUNDING = 1 + 1e-9


class Space:
    """All choices around a config. Raises ConfigError when the config leaves open what a plan must know.

    given: the config's own choice. budget: cost per hour. tags: task domains, those with the most prompt tokens per
    generated token first; declared affinities are split along it, none while it is empty.
    """

    def __init__(self, config: Config, allowed: Allowance) -> None:
        self.config = config
        self.pools = {pool.device_class: pool for pool in pools(config)}
        self.given = given(config)
        self.tags: list[str] = []
        _check(allowed, config, list(self.pools))
        self._exact = None if allowed.devices is None else dict(allowed.devices)
        own = self.cost(dict(self.given.devices))
        self.budget = self.cost(self._exact) if self._exact is not None else allowed.budget or own
        self.max_alpha = config.effective_alpha if allowed.max_alpha is None else allowed.max_alpha
        self._schedules = allowed.schedules

    def cost(self, devices: Mapping[str, int]) -> float:
        """Of so many devices per class, per hour."""
        return sum(number * self.pools[name].cost for name, number in devices.items())

    # ------------------------------------------------------------------------------------------------------- choices
    def start(self) -> Choice | None:
        """The config's own choice where it is allowed, else one of the same proportions; None where nothing fits."""
        own = dict(self.given.devices)
        if own == self._exact or (self._exact is None and self.cost(own) <= self.budget * ROUNDING):
            return self.given
        factor = self.budget / self.cost(own) if self.cost(own) else 1.0
        devices = self._exact or {name: int(number * factor * ROUNDING) for name, number in own.items()}
        trainer = self.given.trainer
        scale = sum(devices.values()) / sum(own.values())
        return self._fitted(replace(self.given, trainer=self._resized(trainer, trainer.total * scale)), devices)

    def grid(self) -> list[Choice]:
        """Coarse: what can vary beside the devices, one by one; then every mix of pools with every split."""
        start = self.start()
        if start is None:
            return []
        found: list[Choice | None] = [start, *self._policies(start)]
        for devices, share in itertools.product([dict(start.devices), *self._mixes()], SHARES):
            there = [name for name, number in devices.items() if number]
            own = start.trainer.device_class
            trainer = replace(start.trainer, device_class=own if own in there else (*there, own)[0])
            trainer = self._resized(trainer, share * sum(devices.values()))
            found.append(self._fitted(replace(start, trainer=trainer), devices))
        return _distinct(found)

    def neighbours(self, choice: Choice) -> list[Choice]:
        """One thing changed, by a step."""
        found = _distinct([*self._splits(choice), *self._trades(choice), *self._policies(choice)])
        return [each for each in found if each != choice]

    def balanced(self, choice: Choice, busy: float) -> Choice | None:
        """Another split, given the share of the time that training takes."""
        total = choice.trainer.total * (MORE if busy > BUSY else FEWER)
        return self._fitted(replace(choice, trainer=self._resized(choice.trainer, total)), dict(choice.devices))

    def merged(self, parent: Choice, one: Choice, other: Choice) -> Choice | None:
        """What both changed of their parent, together; where they changed the same, `one` has its way."""
        changed = {
            name: getattr(one if getattr(one, name) != getattr(parent, name) else other, name)
            for name in Choice.__struct_fields__
            if name != "engines"
        }
        return self._fitted(replace(parent, **changed), dict(changed["devices"]))

    # ------------------------------------------------------------------------------------------------------- devices
    def _fitted(self, choice: Choice, devices: Mapping[str, int]) -> Choice | None:
        """With these devices, and engines on all that training leaves; None where somebody goes without, or if dear."""
        there = {name: number for name, number in devices.items() if number > 0}
        engines = self._engines(choice, there)
        if not engines or self.cost(there) > self.budget * ROUNDING:
            return None
        prefill = choice.prefill if choice.prefill in engines and len(engines) > 1 else ""
        return replace(
            choice,
            devices=tuple(there.items()),
            engines=tuple(engines.items()),
            prefill=prefill,
            free_slots=choice.free_slots if _is_continuous(choice) else "train_end",
            affinity=_among(choice.affinity, [name for name in engines if name != prefill]),
        )

    def _engines(self, choice: Choice, there: Mapping[str, int]) -> dict[str, int] | None:
        """Engines per class; None when training, or a role that plans leave alone, lacks devices."""
        engines: dict[str, int] = {}
        for name, pool in self.pools.items():
            number = there.get(name, 0)
            training = choice.trainer.total if name == choice.trainer.device_class else 0
            left = number * pool.share - pool.reserved - training
            if left < 0:
                return None
            engines[name] = min(left, number) // choice.tensor_parallel
        return {name: number for name, number in engines.items() if number}

    def _mixes(self) -> Iterator[dict[str, int]]:
        """Numbers per class that spend about the whole budget, in quarters of it."""
        if self._exact is not None:
            return
        for parts in itertools.product(range(QUARTERS + 1), repeat=len(self.pools)):
            if sum(parts) == QUARTERS:
                shares = zip(self.pools, parts, strict=True)
                yield {name: self._affordable(name, self.budget * part / QUARTERS) for name, part in shares}

    def _affordable(self, name: str, money: float) -> int:
        """Devices for that much, in whole steps of the pool; as many as now where they cost nothing."""
        pool = self.pools[name]
        if not pool.cost:
            return pool.count
        return int(max(0.0, money) / pool.cost * ROUNDING) // pool.step * pool.step

    def _resized(self, trainer: Trainer, total: float) -> Trainer:
        """About so many devices, in whole steps of the pool; workers as large as they are, or as divides them."""
        step = self.pools[trainer.device_class].step
        devices = max(step, round(total / step) * step)
        most = min(trainer.devices, node_size(self.config), devices)
        size = next(each for each in range(most, 0, -1) if devices % each == 0)
        return replace(trainer, workers=devices // size, devices=size)

    def _splits(self, choice: Choice) -> Iterator[Choice | None]:
        """More or fewer devices for training, or another class for it."""
        trainer, devices = choice.trainer, dict(choice.devices)
        totals = {round(factor * trainer.total) for factor in FACTORS}
        for total in sorted({*totals, trainer.total - trainer.devices, trainer.total + trainer.devices}):
            if total > 0:
                yield self._fitted(replace(choice, trainer=self._resized(trainer, total)), devices)
        for name in devices:
            yield self._fitted(replace(choice, trainer=replace(trainer, device_class=name)), devices)

    def _trades(self, choice: Choice) -> Iterator[Choice | None]:
        """Some devices of one class for as many of another as they cost."""
        if self._exact is not None:
            return
        devices = dict(choice.devices)
        for source, target in itertools.permutations(self.pools, 2):
            for steps in STEPS:
                fewer = devices.get(source, 0) - steps * self.pools[source].step
                others = {**devices, source: max(0, fewer), target: 0}
                more = self._affordable(target, self.budget - self.cost(others))
                yield self._fitted(choice, {**others, target: more})

    # ------------------------------------------------------------------------------------------------------ policies
    def _policies(self, choice: Choice) -> Iterator[Choice | None]:
        """Everything but the number of devices, one at a time."""
        changes: list[dict[str, Any]] = [
            *({"tensor_parallel": each} for each in _beside(choice.tensor_parallel, TENSOR_PARALLEL)),
            *({"affinity": each} for each in self._affinities(choice)),
            *({"prefill": name} for name in ("", *dict(choice.engines)) if len(choice.engines) > 1),
            *({"extra_groups": each} for each in self._extra_groups(choice)),
            *({"extra_members": each} for each in (choice.extra_members - 1, choice.extra_members + 1) if each >= 0),
            *({"on_target": each} for each in ("abort", "keep") if choice.extra_groups not in (0, AUTO)),
            *({"free_slots": each} for each in ("train_start", "train_end") if _is_continuous(choice)),
            *({"engine_slots": each} for each in (choice.engine_slots // 2, choice.engine_slots * 2) if each),
            *({"alpha": each} for each in self._alphas(choice)),
            *self._other_schedules(choice),
        ]
        for change in changes:
            yield self._fitted(replace(choice, **change), dict(choice.devices))

    def _affinities(self, choice: Choice) -> list[Affinity]:
        """None, by measurement, the config's own, and the tags in their order cut in two, for each pair of classes."""
        names = list(dict(choice.engines))
        found: list[Affinity] = [(), AUTO]
        if isinstance(self.config.affinity, dict):
            found.append(tuple(self.config.affinity.items()))
        for one, other in itertools.permutations(names, 2):
            for number in range(1, len(self.tags)):
                split = [one] * number + [other] * (len(self.tags) - number)
                found.append(tuple(zip(self.tags, split, strict=True)))
        return found if len(names) > 1 else []

    def _extra_groups(self, choice: Choice) -> list[int | Literal["auto"]]:
        """By measurement, where admission is continuous; an eighth of a batch more or less."""
        if choice.extra_groups == AUTO:
            return [0]
        step = max(1, self.config.rollout.groups_per_batch // 8)
        paced: list[int | Literal["auto"]] = [AUTO] if _is_continuous(choice) else []
        return paced + [each for each in (choice.extra_groups - step, choice.extra_groups + step) if each >= 0]

    def _alphas(self, choice: Choice) -> list[float]:
        if choice.alpha is None:
            return []
        return [each for each in _beside(choice.alpha, ALPHAS) if each <= self.max_alpha]

    def _other_schedules(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Those that are allowed, with the same alpha where they leave it open."""
        for name in self._schedules:
            implied = SCHEDULES[name].alpha
            alpha = implied if implied is not None else min(self.max_alpha, choice.bound or 1.0)
            needs = SCHEDULES[name].admission == "continuous"
            if name != choice.schedule and alpha <= self.max_alpha and not (needs and alpha == 0):
                yield {"schedule": name, "alpha": None if implied is not None else alpha}


def _is_continuous(choice: Choice) -> bool:
    """Whether groups are admitted as slots are free."""
    return SCHEDULES[choice.schedule].admission == "continuous"


def _beside(value: float, choices: Sequence[Any]) -> list[Any]:
    """The next smaller and the next larger."""
    return [*[each for each in choices if each < value][-1:], *[each for each in choices if each > value][:1]]


def _among(affinity: Affinity, classes: Sequence[str]) -> Affinity:
    """An affinity without the classes that are not there; none where there is no choice."""
    if len(classes) < 2:
        return ()
    return AUTO if affinity == AUTO else tuple(sorted((tag, name) for tag, name in affinity if name in classes))


def _distinct(choices: Iterable[Choice | None]) -> list[Choice]:
    return list(dict.fromkeys(each for each in choices if each is not None))


def _check(allowed: Allowance, config: Config, classes: Sequence[str]) -> None:
    if allowed.budget is not None and allowed.devices is not None:
        raise ConfigError("--budget and --devices both say what may be taken; keep one")
    for name in allowed.devices or {}:
        if name not in classes:
            raise ConfigError(f"--devices: no pool of accelerators has class {name!r}{nearest(name, classes)}")
    if allowed.max_alpha is not None and allowed.max_alpha < config.effective_alpha:
        raise ConfigError(
            f"--max-alpha: {allowed.max_alpha:g} is below the config's own alpha {config.effective_alpha:g}; "
            "lower that first"
        )
