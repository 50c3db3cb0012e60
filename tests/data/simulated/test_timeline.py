"""The timeline: bounded, merged where nothing is lost, readable by trace viewers."""

from __future__ import annotations

import json

from rollart.data.simulated.timeline import Timeline


def events(timeline: Timeline, phase: str) -> list[dict[str, object]]:
    return [each for each in timeline.to_chrome()["traceEvents"] if each["ph"] == phase]


def test_spans_that_follow_without_a_gap_are_one() -> None:
    timeline = Timeline()
    for begin in range(3):
        timeline.span("engine", "decode", begin, begin + 1)
    timeline.span("engine", "prefill", 3, 4)
    timeline.span("engine", "decode", 4, 5)
    timeline.span("engine", "decode", 5.5, 6)
    assert [(each["name"], each["ts"], each["dur"]) for each in events(timeline, "X")] == [
        ("decode", 0, 3e6),
        ("prefill", 3e6, 1e6),
        ("decode", 4e6, 1e6),
        ("decode", 5.5e6, 0.5e6),
    ]


def test_tracks_are_rows_with_names_and_do_not_merge() -> None:
    timeline = Timeline()
    timeline.span("a", "decode", 0, 1)
    timeline.span("b", "decode", 1, 2)
    rows = {each["args"]["name"]: each["tid"] for each in events(timeline, "M")}
    assert [each["tid"] for each in events(timeline, "X")] == [rows["a"], rows["b"]]
    assert rows["a"] != rows["b"]


def test_a_counter_keeps_changes_and_not_too_many_of_them() -> None:
    timeline = Timeline(every_s=1.0)
    for at, value in ((0.0, 1), (0.5, 2), (2.0, 2), (3.0, 5), (3.1, 6)):
        timeline.counter("requests", {"running": value}, at)
    assert [(each["ts"], each["args"]) for each in events(timeline, "C")] == [
        (0.0, {"running": 2}),
        (3e6, {"running": 6}),
    ]


def test_beyond_its_limit_it_counts_what_it_drops_and_still_merges() -> None:
    timeline = Timeline(limit=2)
    timeline.span("a", "decode", 0, 1)
    timeline.counter("b", {"n": 1}, 0)
    timeline.span("a", "prefill", 1, 2)
    timeline.counter("c", {"n": 1}, 0)
    timeline.span("a", "decode", 1, 3)
    assert timeline.dropped == 2
    assert [each["dur"] for each in events(timeline, "X")] == [3e6]
    assert timeline.to_chrome()["otherData"] == {"dropped": 2}


def test_it_is_json() -> None:
    timeline = Timeline()
    timeline.span("a", "decode", 0, 1)
    timeline.counter("b", {"n": 1}, 0)
    assert json.loads(json.dumps(timeline.to_chrome())) == timeline.to_chrome()
