"""The train worker and its handle, with a fake trainer behind and a fake worker between."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest
import torch

from rollart.data import roles
from rollart.data.training import RemoteTrainer, TrainWorker
from rollart.data.weights import FileWeightStore
from rollart.errors import ConfigError, WeightsError
from rollart.types import ParameterInfo, TrainBatch, TrainReport


class FakeTrainer:
    def __init__(self):
        self.weight = 0.0
        self.calls = []

    def train_step(self, batch):
        self.weight += 1
        return TrainReport(batch.step, loss=0.5, grad_norm=1.0, learning_rate=0.1, trained_tokens=3, seconds=0.0)

    def warmup(self, sequences, steps, learning_rate, batch_tokens, progress):
        progress(steps, 1.0)
        self.calls.append(("warmup", sequences, steps, learning_rate, batch_tokens))
        return 2.0, 1.0

    def tensors(self):
        return [("w", torch.tensor([self.weight]))]

    def logprobs(self, tokens):
        return [-1.0] * (len(tokens) - 1)

    def parameters(self):
        return [ParameterInfo("w", (1,), "float32")]

    def save(self, folder):
        self.calls.append(("save", folder))

    def load(self, folder):
        self.calls.append(("load", folder))


class FakeWorker:
    """Calls the object directly, and checks that the caller says what it expects back."""

    name = "train0"

    def __init__(self, subject):
        self.subject = subject
        self.returns = {}

    async def call(self, method, *args, returns):
        self.returns[method] = returns
        result = getattr(self.subject, method)(*args)
        return await result if inspect.isawaitable(result) else result


@pytest.fixture
def store(tmp_path):
    return FileWeightStore(tmp_path, bucket_bytes=1024, keep=2)


def test_weights_trained_through_the_handle_arrive_in_the_store(store):
    async def run():
        remote = RemoteTrainer(FakeWorker(TrainWorker(FakeTrainer(), store)))
        report = await remote.train_step(TrainBatch(step=7, version=0, groups=[]))
        return report, await remote.publish(1)

    report, manifest = asyncio.run(run())
    assert report.step == 7
    assert manifest.parameters == (ParameterInfo("w", (1,), "float32"),)
    ((name, tensor),) = store.fetch(1)
    assert (name, tensor.tolist()) == ("w", [1.0])


def test_publishing_a_version_twice_fails_through_the_handle(store):
    async def run():
        remote = RemoteTrainer(FakeWorker(TrainWorker(FakeTrainer(), store)))
        await remote.publish(1)
        await remote.publish(1)

    with pytest.raises(WeightsError, match="already published"):
        asyncio.run(run())


def test_every_other_call_reaches_the_trainer_with_its_arguments(store):
    trainer = FakeTrainer()
    worker = FakeWorker(TrainWorker(trainer, store))
    remote = RemoteTrainer(worker)
    rows = [([1, 2], [0.0, 1.0])]

    async def run():
        assert await remote.warmup_progress() == (0, 0.0)
        assert await remote.warmup(rows, 5, 0.1, 100) == (2.0, 1.0)
        assert await remote.warmup_progress() == (5, 1.0)
        assert await remote.logprobs([1, 2, 3]) == [-1.0, -1.0]
        assert await remote.parameters() == [ParameterInfo("w", (1,), "float32")]
        await remote.save("a")
        await remote.load("b")

    asyncio.run(run())
    assert trainer.calls == [("warmup", rows, 5, 0.1, 100), ("save", "a"), ("load", "b")]
    assert worker.returns["parameters"] == list[ParameterInfo]


def test_an_unknown_trainer_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="trainer: unknown 'fsdp3'"):
        roles.training(
            "nowhere", "fsdp3", {}, "cpu", 1.0, 0, {"folder": str(tmp_path), "bucket_bytes": 1024, "keep": 2}
        )


def test_the_handle_and_the_folder_import_without_torch():
    code = "import sys, rollart.data.training, rollart.data.weights_folder, rollart.learn.advantage as _; "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
