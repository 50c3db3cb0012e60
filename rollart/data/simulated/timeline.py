"""Timeline: what ran where and when, for the Chrome and Perfetto trace viewers.

Invariants: it never holds more than `limit` entries, and counts those beyond; spans of one track and name that follow
without a gap are one span.
What this file leaves out: who writes it (engines, trainer, simulator) and to which file.
Format: "Trace Event Format" of the Chromium project: complete events ("X"), counters ("C") and metadata ("M"), times in
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

GAP_S = 1e-6
"""Spans this near follow one another."""


class _Span(Struct):
    track: str
    name: str
    begin_s: float
    end_s: float


class _Sample(Struct):
    track: str
    at_s: float
    values: dict[str, float]


class Timeline:
    """`limit`: most spans and samples together; `dropped`: how many came when it was full. `every_s`: samples of a
    counter that come sooner than this after one replace it."""

    def __init__(self, limit: int = 200_000, every_s: float = 0.1) -> None:
        self.dropped = 0
        self._limit, self._every_s = limit, every_s
        self._spans: list[_Span] = []
        self._samples: list[_Sample] = []
        self._last_span: dict[str, _Span] = {}
        self._last_sample: dict[str, _Sample] = {}

    def span(self, track: str, name: str, begin_s: float, end_s: float) -> None:
        """Something called `name` went on from `begin_s` to `end_s` on a track, after all that is known of it."""
        last = self._last_span.get(track)
        if last is not None and last.name == name and begin_s - last.end_s <= GAP_S:
            last.end_s = end_s
        elif self._has_room():
            last = self._last_span[track] = _Span(track, name, begin_s, end_s)
            self._spans.append(last)

    def counter(self, track: str, values: Mapping[str, float], at_s: float) -> None:
        """What was counted at a moment."""
        last = self._last_sample.get(track)
        if last is not None and (at_s - last.at_s < self._every_s or last.values == values):
            if at_s - last.at_s < self._every_s:
                last.values = dict(values)
        elif self._has_room():
            last = self._last_sample[track] = _Sample(track, at_s, dict(values))
            self._samples.append(last)

    def _has_room(self) -> bool:
        """Whether one more can be kept; it counts as dropped otherwise."""
        room = len(self._spans) + len(self._samples) < self._limit
        self.dropped += not room
        return room

    def to_chrome(self) -> dict[str, Any]:
        """What the viewers read, as JSON: a row for each track of spans, and each counter."""
        tracks = dict.fromkeys(each.track for each in self._spans)
        rows = {track: number for number, track in enumerate(tracks, start=1)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": track}}
            for track, row in rows.items()
        ]
        spans = [
            {
                **{"ph": "X", "name": each.name, "pid": 1, "tid": rows[each.track]},
                **{"ts": each.begin_s * 1e6, "dur": (each.end_s - each.begin_s) * 1e6},
            }
            for each in self._spans
        ]
        samples = [
            {"ph": "C", "name": each.track, "pid": 1, "ts": each.at_s * 1e6, "args": each.values}
            for each in self._samples
        ]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"dropped": self.dropped},
            "traceEvents": names + spans + samples,
        }
