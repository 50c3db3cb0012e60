"""Checkpoints of several ranks: each writes what it holds, and any number of ranks reads it back.

    shards/                            weights, optimizer, random state, reference (torch.distributed.checkpoint),
                                       under transformers' names, whatever trainer wrote them
    config.json, model*.safetensors    the model in Hugging Face format, written by the first rank as it is gathered

Invariants: all ranks see the folder; a fault of one rank is raised by all of them, so that a run without room for a
checkpoint goes on. torch keeps the list of shards as a pickle: load only folders that you trust.
What this file leaves out: the counters and when a checkpoint is complete (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rollart.data.stores.bucket import in_buckets
from rollart.data.trainers import checkpoint
from rollart.data.trainers.checkpoint import SHARDS, TrainerState
from rollart.data.trainers.ranks import Ranks
from rollart.errors import RunFolderError

RANDOM = "random/torch"
FILE_BYTES = 4 << 30
"""Of one file of the model, which is gathered in main memory before it is written."""


def write(
    folder: str,
    config: Any,
    model_folder: str,
    weights: Iterator[tuple[str, Tensor]],
    held: Mapping[str, Tensor],
    state: TrainerState,
    ranks: Ranks,
) -> None:
    """Write everything into an empty or new folder. Raises RunFolderError on all ranks.

    `config`: the model's. `weights`: all of them, tensor by tensor, on the first rank; the others gather along.
    `held`: what this rank writes.
    """
    path, what = Path(folder), f"saving a checkpoint in {folder}"
    with ranks.together(RunFolderError, what):
        if ranks.is_first:
            checkpoint.begin(path)
    with ranks.together(RunFolderError, what):
        try:
            if ranks.is_first:
                write_model(path, config, weights)
        finally:
            deque(weights, maxlen=0)
    with ranks.together(RunFolderError, what), _known():
        state_dict_saver.save({**held, RANDOM: torch.get_rng_state()}, checkpoint_id=path / SHARDS)
    with ranks.together(RunFolderError, what):
        if ranks.is_first:
            checkpoint.copy_companions(Path(model_folder), path)
            checkpoint.finish(path, state)


def write_model(folder: Path, config: Any, weights: Iterator[tuple[str, Tensor]], file_bytes: int = FILE_BYTES) -> None:
    """Config and weights in Hugging Face format, in files of at most `file_bytes`, one in memory at a time."""
    config.save_pretrained(folder)
    files: list[Path] = []
    places: dict[str, int] = {}
    total = 0
    for batch in in_buckets(weights, file_bytes):
        files.append(folder / f"part-{len(files)}.tmp")
        safetensors.torch.save_file(batch, files[-1], metadata={"format": "pt"})
        places |= dict.fromkeys(batch, len(files) - 1)
        total += sum(tensor.nbytes for tensor in batch.values())
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[place] for name, place in places.items()}}
    (folder / "model.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))


class Saved:
    """A checkpoint in shards. Raises RunFolderError when it is damaged, or was written by one process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.state = checkpoint.read_state(folder)
        if not (Path(folder) / SHARDS).is_dir():
            raise RunFolderError(
                f"checkpoint {folder} is not in shards but that of the embedded trainer; go on with "
                "trainer = 'embedded', or start anew from it as a model"
            )
        self._reader = FileSystemReader(Path(folder) / SHARDS)
        self.names = frozenset(self._reader.read_metadata().state_dict_metadata)

    def under(self, prefix: str) -> list[str]:
        """What is there with this prefix, without it."""
        return [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]

    def expect(self, names: Iterable[str]) -> None:
        """Raises RunFolderError unless all of them are there."""
        if missing := set(names) - self.names:
            raise RunFolderError(f"it has no {min(missing)}")

    def load(self, held: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's shards, and set the random state; all ranks at once. Raises RunFolderError."""
        self.expect(held)
        random = torch.get_rng_state()
        with _known():
            state_dict_loader.load({**held, RANDOM: random}, storage_reader=self._reader)
        torch.set_rng_state(random)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """One whole tensor, in float32; every rank for itself. Raises RunFolderError."""
        self.expect([name])
        held = {name: torch.empty(tuple(shape), dtype=torch.float32)}
        with _known():
            state_dict_loader.load(held, storage_reader=self._reader, no_dist=True)
        return held[name]


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """torch's own exception is none that a program expects, and tells the ranks' causes in its text."""
    try:
        yield
    except CheckpointException as error:
        causes = {f"{type(each[0]).__name__}: {each[0]}" for each in error.failures.values()}
        raise RunFolderError("; ".join(sorted(causes))) from error
