"""FrozenLake as text: many short turns on Gymnasium's own `FrozenLake-v1`, one map per seed, others for evaluation.

Invariant: the dynamics are Gymnasium's; this file only draws the map, writes the grid and reads the action.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rollart.tasks import held_out
from rollart.tasks.actions import INVALID, ActionWords
from rollart.tasks.definition import TaskDefinition

WORDS = ("left", "down", "right", "up")  # in Gymnasium's order of action numbers
AROUND = (("up", -1, 0), ("down", 1, 0), ("left", 0, -1), ("right", 0, 1))


class FrozenLakeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `frozenlake`."""

    size: Annotated[int, Meta(ge=2, le=32, description="Side of the square map.")] = 4
    frozen_probability: Annotated[
        float, Meta(ge=0.5, le=1, description="Share of safe cells; large maps with few of them take long to draw.")
    ] = 0.8
    slippery: Annotated[bool, Meta(description="Moves may slide sideways.")] = False
    anywhere: Annotated[
        bool, Meta(description="Start and goal may be any two cells, not only the corners: many more maps.")
    ] = False
    view: Annotated[
        Literal["map", "near", "both"],
        Meta(description="What is shown: the map, or in which directions the goal and safe cells lie."),
    ] = "map"
    invalid_penalty: Annotated[float, Meta(ge=0, description="Subtracted for a text without a direction.")] = 0.0
    exact: Annotated[
        bool, Meta(description="An answer is one direction and nothing else; otherwise the first one named counts.")
    ] = False
    discount: Annotated[
        float, Meta(gt=0, le=1, description="The goal is worth discount ** (steps - 1): below 1, short ways pay more.")
    ] = 1.0
    invalid_ends: Annotated[bool, Meta(description="A text without a direction ends the episode.")] = False


class FrozenLake:
    """Reward 1 (discounted by the steps taken) at the goal, 0 otherwise; a hole ends the episode."""

    def __init__(self, options: FrozenLakeOptions | None = None) -> None:
        self._options = options or FrozenLakeOptions()
        self._actions = ActionWords(WORDS)
        self._map: list[str] = []
        self._state = 0
        self._steps = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the map of `seed` and stand on its start."""
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        options = self._options
        make = _map_with_ends_anywhere if options.anywhere else generate_random_map
        self._map = held_out.draw(seed, lambda each: make(options.size, options.frozen_probability, each), " ".join)
        self._env = gymnasium.make(
            "FrozenLake-v1", desc=self._map, is_slippery=options.slippery, disable_env_checker=True
        )
        self._state = int(self._env.reset(seed=seed)[0])
        self._steps = 0
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move by the direction that `action` is or names; without one nothing moves, or all ends."""
        self._steps += 1
        number = self._actions.exactly(action) if self._options.exact else self._actions.find(action)
        if number is None:
            options = self._options
            info = {"invalid": True}
            return f"{INVALID}\n{self._observation()}", -options.invalid_penalty, options.invalid_ends, False, info
        state, reward, terminated, truncated, _ = self._env.step(number)
        self._state = int(state)
        worth = float(reward) * self._options.discount ** (self._steps - 1)
        return self._observation(), worth, terminated, truncated, {}

    def sample_action(self, rng: random.Random) -> str:
        """One of the four words."""
        return rng.choice(WORDS)

    def _observation(self) -> str:
        row, column = divmod(self._state, self._options.size)
        lines = []
        if self._options.view != "near":
            grid = [list(line) for line in self._map]
            grid[row][column] = "P"
            lines += [" ".join(cells) for cells in grid]
        if self._options.view != "map":
            lines.append(" ".join(["goal", *self._towards_goal(row, column)]))
            lines.append(" ".join(["frozen", *self._safe(row, column)]))
        return "\n".join(lines)

    def _towards_goal(self, row: int, column: int) -> list[str]:
        goal_row, goal_column = divmod("".join(self._map).index("G"), self._options.size)
        return [word for word, down, right in AROUND if down * (goal_row - row) + right * (goal_column - column) > 0]

    def _safe(self, row: int, column: int) -> list[str]:
        size = self._options.size
        return [
            word
            for word, down, right in AROUND
            if 0 <= row + down < size and 0 <= column + right < size and self._map[row + down][column + right] != "H"
        ]


def _map_with_ends_anywhere(size: int, frozen_probability: float, seed: int | None) -> list[str]:
    """What Gymnasium's `generate_random_map` draws, but with S and G on any two cells that a way joins."""
    rng = random.Random(seed)
    while True:
        cells = ["F" if rng.random() < frozen_probability else "H" for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        cells[start], cells[goal] = "S", "G"
        if goal in _reached(cells, size, start):
            return ["".join(cells[row * size : (row + 1) * size]) for row in range(size)]


def _reached(cells: list[str], size: int, start: int) -> set[int]:
    reached, open_cells = {start}, [start]
    while open_cells:
        row, column = divmod(open_cells.pop(), size)
        for _, down, right in AROUND:
            inside = 0 <= row + down < size and 0 <= column + right < size
            cell = (row + down) * size + column + right
            if inside and cell not in reached and cells[cell] != "H":
                reached.add(cell)
                open_cells.append(cell)
    return reached


TASK = TaskDefinition(
    name="frozenlake",
    summary="Walk over a frozen lake, many short turns (Gymnasium's FrozenLake-v1)",
    load="rollart.tasks.frozenlake:FrozenLake",
    options=FrozenLakeOptions,
    system_prompt="Walk from P to G. Avoid H. Answer up, down, left or right.",
    max_turns=16,
    max_turn_tokens=8,
    max_tokens=1024,
    success_reward=0.05,  # at the goal, however long the way was
)
