"""Finding an action in free text. The first known word wins, in any case; nothing else in the text matters."""

from __future__ import annotations

import re
from collections.abc import Sequence

INVALID = "Invalid action."
"""First line of the observation after a text without an action."""


class ActionWords:
    """The names of a discrete action space.

    >>> ActionWords(["left", "right"]).find("I go Right, then left")
    1
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        longest_first = sorted(self.words, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
        self._index = {word.casefold(): index for index, word in enumerate(self.words)}

    def find(self, text: str) -> int | None:
        """Index of the word that comes first in `text`, or None."""
        match = self._pattern.search(text)
        return self._index[match[1].casefold()] if match else None

    def exactly(self, text: str) -> int | None:
        """Index of the word that `text` is, blanks at its ends aside, or None where it is anything else."""
        return self._index.get(text.strip().casefold())
