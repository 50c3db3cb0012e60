"""Read by Python at its start where PYTHONPATH has this folder: whoever imports Megatron-Core is given a CPU for it."""

from __future__ import annotations

import sys
from typing import Any


class BeforeMegatron:
    """Finds nothing itself."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        """Once, when the first module of Megatron is about to be imported."""
        if name == "megatron.core" and "torch" in sys.modules:
            sys.meta_path.remove(BeforeMegatron)  # type: ignore[arg-type]
            from tests.production.cpu_for_gpu import pretend

            pretend()


sys.meta_path.insert(0, BeforeMegatron)  # type: ignore[arg-type]
