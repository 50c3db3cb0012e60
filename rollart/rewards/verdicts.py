"""Scores kept by the content of the question, in files that processes share.

Invariants: a reader sees a whole file or none; a folder holds at most its share of the limit, those that were asked
for last. What this file leaves out: what a question is (`judge.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from rollart.files import cache_folder, write_atomic

FOLDERS = 256
"""By the first two digits of the name, so that making room reads a small part of the cache."""


class Verdicts:
    """`folder`: "" for `judge` in the cache folder. `max_bytes`: of all files; 0 keeps nothing.

    Names are hexadecimal digests.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = Path(folder) if folder else cache_folder() / "judge"
        self._share = max_bytes // FOLDERS

    def get(self, name: str) -> float | None:
        """The score, or None where it is not known."""
        path = self._path(name)
        try:
            score = json.loads(path.read_bytes())["score"]
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return float(score)

    def put(self, name: str, score: float) -> None:
        """Keep a score; a disk that is full is said and costs no more than a second question."""
        data = json.dumps({"score": score}).encode()
        path = self._path(name)
        if len(data) > self._share:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(path.parent, len(data))
            write_atomic(path, data)
        except OSError as error:
            logging.getLogger(__name__).warning("a verdict could not be kept: %s", error)

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        with os.scandir(folder) as entries:
            files = sorted((stat.st_mtime, stat.st_size, entry.path) for entry in entries if (stat := _stat(entry)))
        room = self._share - sum(size for _, size, _ in files)
        for _, size, path in files:
            if room >= num_bytes:
                return
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                os.unlink(path)
            room += size

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.json"


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
