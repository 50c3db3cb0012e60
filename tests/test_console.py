"""The live view, drawn on a recording console, and its plain lines."""

from __future__ import annotations

import errno
import io
from typing import Any

import pytest
from rich.console import Console

from rollart.console import LineView, LiveView, duration, engine_sentence, line, open_view, picture, trainer_sentence
from rollart.control.evaluator import TaskResult
from rollart.metrics import Status, TaskStatus
from rollart.observer import successes

BLOCK = "\u2587"


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "step": 55,
        "steps": 300,
        "folder": "runs/default-20260101-120000",
        "version": 54,
        "elapsed_s": 77.0,
        "eta_s": 265.0,
        "tasks": {
            "frozenlake": TaskStatus(reward=0.412, success=0.41, trajectories=5120, eval_first=0.12, eval_last=0.45),
            "[red]my[/red]": TaskStatus(),
        },
        "loss": 0.01234,
        "tokens_per_s": 12345.6,
        "trajectories_per_s": 61.3,
        "running": {"reset": 4, "generate": 90, "step": 0},
        "ready_groups": 5,
        "groups_per_batch": 16,
        "free_slots": 3,
        "slots": 32,
        "ages": {1: 200, 0: 800},
        "aborted": {"stale": 3, "redundant": 1200, "cancelled": 0},
        "stages": {"reset": 10.0, "generate": 30.0},
        "train_s": 6.0,
        "trainer_waits": {"generate": 3.0, "reset": 1.0},
        "engine_waits": {"training": 0.2},
        "window_s": 10.0,
    }
    return Status(**{**values, **changes})


def drawn(shown: Status, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(picture(shown))
    return console.export_text()


def test_the_picture_tells_progress_tasks_speed_queues_ages_and_stages() -> None:
    text = drawn(status())
    for part in (
        "schedule rollart, alpha 1, weights version 54",
        "runs/default-20260101-120000",
        "step 55/300, 1m17s, 4m25s left",
        "12,346 tokens/s, 61.3 trajectories/s, loss 0.01234",
        "94 trajectories: 4 reset, 90 generate",
        "5 groups ready of 16 for a batch, 3 of 32 slots free",
        "80%  1 ",
        f"reset {BLOCK * 4} 25%  generate {BLOCK * 12} 75%",
        "60% of the time",
        "redundant: 1,200, stale: 3",
        "[red]my[/red]",
        "12% -> 45%",
    ):
        assert part in text
    row = next(text_line for text_line in text.splitlines() if text_line.startswith("frozenlake"))
    assert row.split() == ["frozenlake", "0.412", "41%", "12%", "->", "45%", "5,120"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_fits_its_terminal(width: int) -> None:
    long = status(tasks={"a.very.long.module.path.of.an.environment:Class" * 2: TaskStatus()})
    text = drawn(long, width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) <= 22
    for name in ("reward", "success", "eval first -> last", "trajectories"):
        assert name in text


@pytest.mark.parametrize(
    ("waits", "sentence"),
    [
        (
            {"generate": 3.0, "reset": 1.0},
            "The trainer waits 40% of the time, mostly because the batch is not ready: "
            "the engines are still generating.",
        ),
        (
            {"step": 9.0},
            "The trainer waits 90% of the time, mostly because the batch is not ready: "
            "environments are still stepping.",
        ),
        (
            {"nothing_running": 10.0},
            "The trainer waits 100% of the time, mostly because the batch is not ready: no trajectory is running.",
        ),
        (
            {"no_engine": 10.0},
            "The trainer waits 100% of the time, mostly because the batch is not ready: trajectories wait for an "
            "inference worker, and there is none.",
        ),
        ({"earthquake": 5.0}, "The trainer waits 50% of the time, mostly because of earthquake."),
        ({"generate": 0.1}, "The trainer waits for nothing."),
        ({}, "The trainer waits for nothing."),
    ],
)
def test_a_sentence_says_why_the_trainer_waits(waits: dict[str, float], sentence: str) -> None:
    assert trainer_sentence(status(trainer_waits=waits)) == sentence
    assert sentence in " ".join(drawn(status(trainer_waits=waits)).split())


@pytest.mark.parametrize(
    ("waits", "sentence"),
    [
        (
            {"training": 6.0},
            "The engines wait 60% of the time, mostly because every slot is taken by groups that wait for training.",
        ),
        (
            {"no_engine": 10.0, "step": 1.0},
            "The engines wait 100% of the time, mostly because there is no inference worker: none has started yet, or "
            "none is left.",
        ),
        ({"weights": 1.0}, "The engines wait 10% of the time, mostly because they are loading new weights."),
        ({}, "The engines wait for nothing."),
    ],
)
def test_a_sentence_says_why_the_engines_wait(waits: dict[str, float], sentence: str) -> None:
    assert engine_sentence(status(engine_waits=waits)) == sentence
    assert sentence in drawn(status(engine_waits=waits))


def test_a_run_that_has_just_begun_is_drawn_too() -> None:
    text = drawn(Status(step=0, steps=10, phase="warm-up"), 80)
    assert "warm-up" in text
    assert "step 0/10, 0s" in text
    assert "waits" not in text


def live_view() -> tuple[LiveView, Console]:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    return LiveView(console), console


def test_warnings_and_errors_stand_above_the_picture() -> None:
    view, console = live_view()
    view.update(status())
    view.warn("metrics.jsonl: [bold]disk full\x1b[2J")
    view.error("the engine is gone")
    view.say("evaluation done")
    view.update(status(step=56))
    view.close()
    view.close()
    text = console.export_text()
    assert "warning: metrics.jsonl: [bold]disk full\\x1b[2J" in text
    assert "error: the engine is gone" in text
    assert text.rindex("warning") < text.rindex("evaluation done") < text.rindex("step 56/300")


def test_a_terminal_without_unicode_gets_plain_bars() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = LiveView(Console(file=stream, width=100, force_terminal=True))
    view.update(status())
    view.close()
    stream.seek(0)
    assert "generate ############ 75%" in stream.read()


class Gone(io.StringIO):
    """A stream that nobody reads any more; `errno` says what it was."""

    def __init__(self, errno: int) -> None:
        super().__init__()
        self.errno = errno

    def write(self, text: str) -> int:
        raise OSError(self.errno, "nobody is there")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_reader_that_went_away_does_not_end_the_run(is_terminal: bool) -> None:
    terminal = Console(file=Gone(errno.EIO), width=100, force_terminal=True)
    view = LiveView(terminal) if is_terminal else LineView(Gone(errno.EPIPE))
    view.update(status())
    view.say("a milestone")
    view.warn("a warning")
    view.error("an error")
    view.close()


def shown_lines(*shown: Status) -> list[str]:
    stream = io.StringIO()
    view = LineView(stream)
    for each in shown:
        view.update(each)
    return stream.getvalue().splitlines()


def test_a_line_tells_the_same_in_short() -> None:
    assert line(status(tasks={"maze": TaskStatus(reward=0.5, success=0.25, eval_first=0.0, eval_last=1.0)})) == (
        "step 55/300 | 1m17s | 4m25s left | maze reward 0.500 success 25% (eval 0% -> 100%) | 12,346 tokens/s | "
        "loss 0.01234 | age 0: 800, 1: 200 | trainer idle 40%: generate"
    )
    assert line(Status(step=0, steps=5, phase="warm-up")) == "warm-up | step 0/5 | 0s | 0 tokens/s"


def test_one_evaluation_is_one_value_and_two_are_a_way() -> None:
    first, later = (TaskResult(8, 0, success, 0.5, 3.0, 9.0) for success in (0.06, 0.91))
    shown = {}
    for name, pair in {"none": (None, None), "one": (first, first), "two": (first, later)}.items():
        shown[name] = line(status(tasks={"maze": TaskStatus(reward=0.5, success=0.25, **successes(*pair))}))
    assert "eval" not in shown["none"]
    assert "(eval 6%) |" in shown["one"]
    assert "(eval 6% -> 91%) |" in shown["two"]


def test_lines_come_per_step_but_not_faster_than_one_can_read_and_the_last_always() -> None:
    steps = [status(step=step, steps=4, elapsed_s=seconds) for step, seconds in ((1, 0), (2, 1), (3, 2.5), (4, 2.6))]
    assert [text.split(" |")[0] for text in shown_lines(*steps)] == ["step 1/4", "step 3/4", "step 4/4"]


def test_a_run_without_progress_says_why_every_half_minute() -> None:
    lines = shown_lines(*(status(elapsed_s=seconds) for seconds in (0, 10, 29, 31, 59, 62)))
    assert len(lines) == 7
    assert lines[1].startswith("step 55/300 | 31s")
    assert lines[2] == f"    {trainer_sentence(status())}"
    assert lines[3] == "    The engines wait for nothing."


def test_plain_output_keeps_warnings_on_lines_of_their_own() -> None:
    stream = io.StringIO()
    view = open_view(stream)
    view.warn("disk full\x1b[2J")
    view.error("the end")
    view.say("done")
    view.close()
    assert stream.getvalue() == "warning: disk full\\x1b[2J\nerror: the end\ndone\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "kind"), [("xterm-256color", LiveView), ("dumb", LineView), ("", LineView)])
def test_only_a_terminal_that_can_move_its_cursor_gets_the_picture(terminal: str, kind: type) -> None:
    view = open_view(Terminal(), terminal)
    view.close()
    assert type(view) is kind


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
