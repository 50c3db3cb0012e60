"""Checkpoints of a run: the trainer's folder and the control plane's state, written together or not at all.

    checkpoints/step-000050/
        trainer/         weights in Hugging Face format, optimizer, random state
        control.msgpack  step, version, data position, open and ready groups, counters

Invariant: a folder without the `.part` suffix is complete; it appears by one rename. What this file leaves out: what
the state means (`control/rollout_scheduler.py`) and the tensors (`data/trainers`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rollart.errors import RunFolderError, boundary
from rollart.run_folder import checkpoint_path, checkpoints

FORMAT = 1


class ControlState(Struct):
    """What the control plane needs to go on: `step` train steps are done and `version` is published."""

    step: int
    version: int
    scheduler: dict[str, Any]
    totals: dict[str, Any]
    ledger: dict[str, Any]
    format: int = FORMAT


class Checkpoints:
    """The checkpoints of one run folder; keeps the newest `kept`, and `source`, the step that the run goes on from.

    From there come the model's files that every later checkpoint holds, and the workers that are started again.
    """

    def __init__(self, folder: Path, kept: int, source: int | None = None) -> None:
        self.folder = folder
        self._kept = kept
        self._source = source

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return checkpoints(self.folder.parent)

    def path(self, step: int) -> Path:
        """Folder of one step."""
        return checkpoint_path(self.folder.parent, step)

    def trainer_folder(self, step: int) -> Path:
        """The Hugging Face folder inside one checkpoint."""
        return self.path(step) / "trainer"

    async def write(self, state: ControlState, save_trainer: Callable[[str], Awaitable[None]]) -> Path:
        """Write one checkpoint. Raises RunFolderError when it cannot; older checkpoints stay as they were."""
        final = self.path(state.step)
        if final.exists():
            return final
        draft = final.with_suffix(".part")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            (draft / "trainer").mkdir(parents=True)
            await save_trainer(str(draft / "trainer"))
            (draft / "control.msgpack").write_bytes(msgspec.msgpack.encode(state))
            os.rename(draft, final)
            for step in [each for each in self.steps() if each != self._source][: -self._kept]:
                shutil.rmtree(self.path(step), ignore_errors=True)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunFolderError(f"checkpoint {final} cannot be written: {error}") from error
        return final

    def forget_after(self, step: int) -> None:
        """Remove what a run that goes on from `step` will do again. Raises RunFolderError."""
        with boundary(RunFolderError, f"checkpoints after step {step} in {self.folder}"):
            for later in [each for each in self.steps() if each > step]:
                shutil.rmtree(self.path(later))

    def read(self, step: int | None = None) -> ControlState:
        """The state of a checkpoint (default: the newest). Raises RunFolderError."""
        known = self.steps()
        if not known:
            raise RunFolderError(f"{self.folder}: no complete checkpoint; the run ended before its first one")
        chosen = known[-1] if step is None else step
        if chosen not in known:
            raise RunFolderError(
                f"{self.folder}: no checkpoint of step {chosen}; there are: {', '.join(map(str, known))}"
            )
        source = self.path(chosen) / "control.msgpack"
        try:
            state = msgspec.msgpack.decode(source.read_bytes(), type=ControlState)
        except (OSError, msgspec.MsgspecError) as error:
            raise RunFolderError(
                f"{source}: cannot be read: {error}; remove {source.parent.name} to go on from the one before"
            ) from error
        if state.format != FORMAT:
            raise RunFolderError(f"{source}: written in format {state.format}, this version reads format {FORMAT}")
        return state
