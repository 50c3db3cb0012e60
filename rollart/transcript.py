"""A trajectory as text for people and as one JSON line for programs.

Invariant: the JSON line holds everything that training saw of the trajectory, token by token; text from a model or an
environment cannot move the cursor or forge a heading, since control characters are shown as escapes and every line of
it is indented behind a mark. What this file leaves out: files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from rollart.types import Trajectory, Turn


def as_text(trajectories: Iterable[Trajectory], trained: bool = True) -> str:
    """Conversations, one after another. Lines behind `|` have loss mask 0, those behind `>` mask 1.

    `trained`: a train step has consumed them; those of an evaluation teach nothing, and are told without masks.
    """
    return "\n".join(_conversation(trajectory, trained) for trajectory in trajectories)


def as_jsonl(trajectories: Iterable[Trajectory]) -> bytes:
    """One line each. `tokens`, `loss_mask`, `logprobs` and `versions` run along each other; where the model did not
    generate the token, the mask is 0, the log-probability 0.0 and the version -1.
    What begins with `turn_` has one entry per turn.
    """
    return b"".join(msgspec.json.encode(_record(trajectory)) + b"\n" for trajectory in trajectories)


def printable(text: str) -> str:
    """`text` with control characters as escapes, but for newlines."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task": trajectory.task,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "cause": _utf8(trajectory.cause),
        "seconds": trajectory.seconds,
        "failed_resets_s": trajectory.failed_resets_s,
        "tokens": trajectory.tokens(),
        "loss_mask": [int(bit) for bit in trajectory.loss_mask()],
        "logprobs": trajectory.behaviour_logprobs(),
        "versions": [
            version
            for turn in trajectory.turns
            for part in ([-1] * len(turn.observation), turn.versions)
            for version in part
        ],
        "observations": [_utf8(turn.observation_text) for turn in trajectory.turns],
        "actions": [_utf8(turn.action_text) for turn in trajectory.turns],
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "turn_step_s": [turn.step_s for turn in trajectory.turns],
        "turn_observation_tokens": [len(turn.observation) for turn in trajectory.turns],
        "turn_response_tokens": [len(turn.action) for turn in trajectory.turns],
    }


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _conversation(trajectory: Trajectory, trained: bool) -> str:
    reason = f"{trajectory.stop_reason} ({trajectory.cause})" if trajectory.cause else trajectory.stop_reason
    lines = [
        f"==== {trajectory.task}, seed {trajectory.seed}: reward {trajectory.reward:.3f}, {printable(reason)}",
        f"     {trajectory.trajectory_id} of {trajectory.group_id}, {_counted(len(trajectory.turns), 'turn')}, "
        f"{_counted(trajectory.num_tokens, 'token')}, {trajectory.num_generated_tokens} of them "
        f"{'trained on' if trained else 'generated'}",
    ]
    for index, turn in enumerate(trajectory.turns, start=1):
        lines += _turn(index, turn, trained)
    return "\n".join(lines) + "\n"


def _turn(index: int, turn: Turn, trained: bool) -> list[str]:
    versions = sorted(set(turn.versions))
    span = f", version {'-'.join(str(v) for v in dict.fromkeys((versions[0], versions[-1])))}" if versions else ""
    ended = "" if turn.finish_reason == "stop" else f", ended by {turn.finish_reason}"
    masked, learned = (", mask 0", ", mask 1") if trained else ("", "")
    return [
        f"[{index}] environment, {_counted(len(turn.observation), 'token')}{masked}",
        *_marked("|", turn.observation_text),
        f"[{index}] model, {_counted(len(turn.action), 'token')}{learned}{span}, reward {turn.reward:+.3f}{ended}",
        *_marked(">", turn.action_text),
    ]


def _marked(mark: str, text: str) -> list[str]:
    return [f"  {mark} {line}".rstrip() for line in printable(text).split("\n")]


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
