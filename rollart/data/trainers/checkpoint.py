"""A trainer's checkpoint folder: the model in Hugging Face format, its tokenizer, and what an exact resume needs.

    config.json, model*.safetensors, tokenizer files ...   loads in transformers or an engine as it is
    state/trainer.safetensors                              optimizer, random state, reference model; of one process
    shards/                                                the same, and the weights, of several (torch's own format)
    trainer.json                                           counters, and the size of every other file

Invariant: `trainer.json` is renamed into place last, so a folder without it, or with other sizes than it says, is
half-written and refused; beside config.json lie no tensors but the model's, for an engine loads all that lie there.
What this file leaves out: which checkpoints are kept, the rest of a run's state, and how shards are written
(`shards.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from msgspec import Struct, field
from torch import Tensor

from rollart.errors import RunFolderError, boundary

STATE, TENSORS, SHARDS = "trainer.json", "state/trainer.safetensors", "shards"
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"})


class TrainerState(Struct, frozen=True):
    """The counters of a trainer. `random_state` is that of `random.Random`; `files` maps names to bytes."""

    steps: int
    nonfinite_in_a_row: int
    random_state: tuple[int, tuple[int, ...], float | None]
    format: int = 1
    files: dict[str, int] = field(default_factory=dict)


def write(
    folder: str | Path,
    model: Any,
    model_folder: Path,
    tensors: Mapping[str, Tensor],
    state: TrainerState,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write everything into an empty or new folder. Raises RunFolderError. `weights`: instead of the model's own."""
    folder = Path(folder)
    with boundary(RunFolderError, f"saving a checkpoint in {folder}"):
        begin(folder)
        model.save_pretrained(folder, state_dict=weights)
        copy_companions(model_folder, folder)
        (folder / TENSORS).parent.mkdir()
        safetensors.torch.save_file(dict(tensors), folder / TENSORS)
        finish(folder, state)


def begin(folder: Path) -> None:
    """Make the folder, or see that it is empty. Raises RunFolderError."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty; save every checkpoint in a folder of its own")


def finish(folder: Path, state: TrainerState) -> None:
    """All else is written: from now on the checkpoint exists."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    _write_last(folder / STATE, msgspec.json.encode(msgspec.structs.replace(state, files=files)))


def read(folder: str | Path) -> tuple[dict[str, Tensor], TrainerState]:
    """The tensors and counters that `write` was given. Raises RunFolderError when they are not all there."""
    folder, state = Path(folder), read_state(folder)
    if (folder / SHARDS).is_dir():
        raise RunFolderError(
            f"checkpoint {folder} is in shards, which the embedded trainer does not read; go on with trainer = 'fsdp2' "
            "(one worker will do), or start anew from it as a model"
        )
    with boundary(RunFolderError, f"reading the checkpoint in {folder}"):
        path = folder / TENSORS if (folder / TENSORS).is_file() else folder / "trainer.safetensors"  # of older ones
        return safetensors.torch.load_file(path), state


def read_state(folder: str | Path) -> TrainerState:
    """The counters, once every file was found to be there. Raises RunFolderError."""
    folder = Path(folder)
    with boundary(RunFolderError, f"reading the checkpoint in {folder}"):
        if not (folder / STATE).is_file():
            raise RunFolderError(f"{folder} holds no {STATE}: not a checkpoint, or half-written; take an earlier one")
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=TrainerState)
        for name, num_bytes in state.files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != num_bytes:
                raise RunFolderError(
                    f"checkpoint {folder} is damaged: {name} should have {num_bytes} bytes, "
                    f"{'but is missing' if found is None else f'not {found}'}; take an earlier one"
                )
        return state


def check_reference(folder: str | Path, state: TrainerState, wanted: bool, there: bool) -> None:
    """A run with a KL goes on only with the policy that it holds on to. Raises RunFolderError."""
    if wanted and state.steps and not there:
        raise RunFolderError(
            f"checkpoint {folder} was made with train.kl_coef = 0 and holds no reference model; "
            "resume with train.kl_coef = 0"
        )


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a model besides its weights: tokenizer, chat template. Existing files are left alone."""
    for path in sorted(source.iterdir()):
        is_state = path.name == STATE or path.name.startswith(".") or path.name.endswith(".index.json")
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not is_state and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)


def _write_last(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
