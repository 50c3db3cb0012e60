"""What a person sees of a run: a live picture in a terminal, plain lines elsewhere.

Invariants: a view draws a `Status` and decides nothing; it writes to one stream, and warnings stand above the picture.
A stream whose reader went away (a closed pipe or terminal, a full disk) ends the view, never the run.
What this file leaves out: where the numbers come from (`pipeline.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollart.metrics import RewardStatus, Status, TaskStatus
from rollart.transcript import printable

TRAINER_CAUSES = {
    "reset": "the batch is not ready: environments are still resetting",
    "generate": "the batch is not ready: the engines are still generating",
    "step": "the batch is not ready: environments are still stepping",
    "score": "the batch is not ready: rewards are still being computed",
    "nothing_running": "the batch is not ready: no trajectory is running",
    "no_engine": "the batch is not ready: trajectories wait for an inference worker, and there is none",
    "weights": "new weights are being published, loaded and checked",
    "suspended": "the engines are being suspended",
    "evaluation": "the policy is being evaluated",
    "checkpoint": "a checkpoint is being written",
}
ENGINE_CAUSES = {
    "training": "every slot is taken by groups that wait for training",
    "reset": "the running environments are still resetting",
    "step": "the running environments are still stepping",
    "score": "the last trajectories are still being scored",
    "suspended": "they are suspended for new weights",
    "weights": "they are loading new weights",
    "no_engine": "there is no inference worker: none has started yet, or none is left",
    "iteration": "this iteration's trajectories are complete, the next ones start after training",
}
WORTH_SAYING = 0.05
"""Share of the window from which a wait gets its sentence."""


class View(Protocol):
    """Where a run shows itself."""

    def update(self, status: Status) -> None:
        """Show the run's present state."""
        ...

    def say(self, text: str) -> None:
        """A milestone."""
        ...

    def warn(self, text: str) -> None:
        """Something that the user should know; the run goes on."""
        ...

    def error(self, text: str) -> None:
        """Why the run ends."""
        ...

    def close(self) -> None:
        """Leave the last picture and give the terminal back. Closing twice is harmless."""
        ...


def open_view(stream: IO[str] | None = None, terminal: str | None = None) -> View:
    """A `LiveView` when `stream` (default: stdout) is a terminal that can move its cursor, else a `LineView`."""
    stream = stream or sys.stdout
    terminal = os.environ.get("TERM", "") if terminal is None else terminal
    if stream.isatty() and terminal not in ("", "dumb", "unknown"):
        return LiveView(Console(file=stream))
    return LineView(stream)


@contextmanager
def _whoever_reads() -> Iterator[None]:
    """What nobody can read any more is not worth the run."""
    try:
        yield
    except OSError:
        return


class LiveView:
    """Redraws one picture in place. It has no thread: it changes when `update` is called."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        with _whoever_reads():
            self._live.start()

    def update(self, status: Status) -> None:
        """Draw."""
        with _whoever_reads():
            self._live.update(picture(status, "#" if self._console.options.ascii_only else "\u2587"), refresh=True)

    def say(self, text: str) -> None:
        """Above the picture."""
        with _whoever_reads():
            self._console.print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Above the picture, in yellow."""
        with _whoever_reads():
            self._console.print(Text(f"warning: {printable(text)}", style="yellow"))

    def error(self, text: str) -> None:
        """Above the picture, in red."""
        with _whoever_reads():
            self._console.print(Text(f"error: {printable(text)}", style="bold red"))

    def close(self) -> None:
        """The last picture stays on the screen."""
        with _whoever_reads():
            self._live.stop()


class LineView:
    """One line per step, but none within `every_s` of the last; without a step, one each `silence_s`,
    followed by why.

    Time is the status's own, so that a run that makes no progress still says why.
    """

    def __init__(self, stream: IO[str], every_s: float = 2.0, silence_s: float = 30.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._silence_s = silence_s
        self._shown: Status | None = None

    def update(self, status: Status) -> None:
        """Write a line if one is due."""
        if not self._is_due(status):
            return
        stuck = self._shown is not None and self._shown.step == status.step
        self._shown = status
        self._write(line(status))
        for sentence in filter(None, (trainer_sentence(status), engine_sentence(status)) if stuck else ()):
            self._write(f"    {sentence}")

    def say(self, text: str) -> None:
        """A line."""
        self._write(printable(text))

    def warn(self, text: str) -> None:
        """A line."""
        self._write(f"warning: {printable(text)}")

    def error(self, text: str) -> None:
        """A line."""
        self._write(f"error: {printable(text)}")

    def close(self) -> None:
        """Nothing to give back."""

    def _is_due(self, status: Status) -> bool:
        if self._shown is None:
            return True
        passed_s = status.elapsed_s - self._shown.elapsed_s
        if status.step == self._shown.step:
            return passed_s >= self._silence_s
        return passed_s >= self._every_s or status.step >= status.steps

    def _write(self, text: str) -> None:
        with _whoever_reads():
            self._stream.write(text + "\n")
            self._stream.flush()


# ------------------------------------------------------------------------------------------------------ the sentences
def trainer_sentence(status: Status) -> str:
    """Why the trainer waits."""
    return _sentence("The trainer waits", status.trainer_waits, TRAINER_CAUSES, status.window_s)


def engine_sentence(status: Status) -> str:
    """Why the engines wait."""
    return _sentence("The engines wait", status.engine_waits, ENGINE_CAUSES, status.window_s)


def _sentence(who: str, waits: Mapping[str, float], causes: Mapping[str, str], window_s: float) -> str:
    if not window_s:
        return ""
    share, cause = _main_wait(waits, window_s)
    if not cause:
        return f"{who} for nothing."
    return f"{who} {share:.0%} of the time, mostly because {causes.get(cause, f'of {cause}')}."


def _main_wait(waits: Mapping[str, float], window_s: float) -> tuple[float, str]:
    """The waits' share of the window, and the largest cause if they are worth a word."""
    share = min(1.0, sum(waits.values()) / window_s) if window_s else 0.0
    return share, max(waits, key=lambda name: waits[name]) if share >= WORTH_SAYING else ""


# ------------------------------------------------------------------------------------------------------------ one line
def line(status: Status) -> str:
    """A status as one line without colour."""
    parts = [f"step {status.step}/{status.steps}", duration(status.elapsed_s)]
    if status.phase != "training":
        parts.insert(0, status.phase)
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    parts += [f"{name} {_task_line(task)}" for name, task in status.tasks.items()]
    parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.ages:
        parts.append("age " + _counts(status.ages))
    for who, waits in (("trainer", status.trainer_waits), ("engines", status.engine_waits)):
        share, cause = _main_wait(waits, status.window_s)
        parts += [f"{who} idle {share:.0%}: {cause}"] if cause else []
    return " | ".join(parts)


def _task_line(task: TaskStatus) -> str:
    text = f"reward {_number(task.reward)} success {_share(task.success)}"
    return text if task.eval_last is None else f"{text} (eval {_evaluated(task)})"


def _evaluated(task: TaskStatus) -> str:
    if task.eval_last is None:
        return "-"
    return (
        _share(task.eval_last) if task.eval_first is None else f"{_share(task.eval_first)} -> {_share(task.eval_last)}"
    )


# ---------------------------------------------------------------------------------------------------------- a picture
def picture(status: Status, block: str = "\u2587") -> RenderableType:
    """A status as a dozen lines, from 80 columns on. `block`: what bars are made of."""
    sentences = [Text(text) for text in (trainer_sentence(status), engine_sentence(status)) if text]
    return Group(_head(status), _progress(status), Text(), _tasks(status), Text(), _facts(status, block), *sentences)


def _head(status: Status) -> Text:
    text = Text(f"rollart  schedule {status.schedule}, alpha {status.alpha:g}, weights version {status.version}")
    text.append(f"  {status.folder}", style="dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _progress(status: Status) -> Table:
    left = "" if status.eta_s is None else f", {duration(status.eta_s)} left"
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, status.steps), completed=status.step)
    row.add_row(status.phase, bar, f"step {status.step}/{status.steps}, {duration(status.elapsed_s)}{left}")
    return row


def _tasks(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in ("reward", "success", "eval first -> last", "trajectories"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, task in status.tasks.items():
        figures = (_number(task.reward), _share(task.success), _evaluated(task), f"{task.trajectories:,}")
        table.add_row(Text(printable(name)), *figures)
    return table


def _facts(status: Status, block: str) -> Table:
    running = ", ".join(f"{count} {stage}" for stage, count in status.running.items() if count)
    rows = {
        "speed": f"{status.tokens_per_s:,.0f} tokens/s, {status.trajectories_per_s:.1f} trajectories/s, "
        f"loss {_number(status.loss, '.4g')}",
        "running": f"{sum(status.running.values())} trajectories" + (f": {running}" if running else ""),
        "queues": f"{status.ready_groups} groups ready of {status.groups_per_batch} for a batch, "
        f"{status.free_slots} of {status.slots} slots free",
        "age": _bars({str(age): count for age, count in sorted(status.ages.items())}, block),
        "rollout": _bars(status.stages, block),
        "training": f"{_of_window(status.train_s, status)} of the time",
        "of no use": _counts(status.aborted) if any(status.aborted.values()) else "none",
    }
    if status.rewards:
        rows["rewards"] = "  ".join(_reward(name, reward) for name, reward in status.rewards.items())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows.items():
        table.add_row(label, Text(text))
    return table


def _reward(name: str, reward: RewardStatus) -> str:
    parts = [f"{reward.processes} processes, {reward.utilisation:.0%} busy", f"{reward.calls:,} calls"]
    parts += [f"{reward.failures:,} failures"] if reward.failures else []
    parts += [f"half within {1000 * reward.latency_s:g} ms"] if reward.latency_s is not None else []
    parts += [f"cost {reward.cost:.4g}"] if reward.cost else []
    return f"{printable(name)} {', '.join(parts)}"


def _bars(values: Mapping[str, float], block: str, width: int = 16) -> str:
    """Shares of a whole as bars that are `width` blocks long together."""
    total = sum(values.values())
    if not total:
        return "-"
    shares = {name: value / total for name, value in values.items() if value}
    bars = {name: block * round(width * share) for name, share in shares.items()}
    return "  ".join(" ".join(filter(None, (name, bars[name], f"{share:.0%}"))) for name, share in shares.items())


def _of_window(seconds: float, status: Status) -> str:
    return _share(min(1.0, seconds / status.window_s) if status.window_s else None)


def _counts(values: Mapping[str, int] | Mapping[int, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in sorted(values.items()) if count)


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def duration(seconds: float) -> str:
    """`42s`, `3m10s`, `2h05m`, `3d04h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
