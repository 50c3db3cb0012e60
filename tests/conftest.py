"""How every test of this suite runs.

Invariant: whether a test passes depends on the code alone, neither on how busy the machine is nor on chance. So
Hypothesis keeps no time limit per example, and draws the same examples every time.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("rollart", deadline=None, derandomize=True)
settings.load_profile("rollart")
