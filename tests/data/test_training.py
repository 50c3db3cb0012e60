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
from rollart.errors import ConfigError, WeightsError, WeightsLost
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest


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


class PickyStore:
    """Fails a publication with `fault`, if any, after it has read one tensor; remembers what it was told."""

    def __init__(self, fault=None):
        self.fault, self.published, self.rescued = fault, [], []

    def publish(self, version, tensors):
        names = [next(tensors)[0]]
        if self.fault:
            raise self.fault
        self.published.append((version, names + [name for name, _ in tensors]))
        return WeightManifest(version, (), ())

    def rescue(self, version, tensors):
        self.rescued.append((version, [name for name, _ in tensors]))
        return WeightManifest(version, (), (), note="now in files")


class ManyTensors(FakeTrainer):
    """As trainers of several ranks: whoever begins to read its tensors must go on to the end."""

    def __init__(self):
        super().__init__()
        self.readings = []

    def tensors(self):
        self.readings.append("begun")
        for name in "abc":
            yield name, torch.tensor([self.weight])
        self.readings.append("ended")


def test_an_iteration_over_the_tensors_is_always_gone_through():
    store, trainer = PickyStore(WeightsError("the disk is full")), ManyTensors()
    worker = TrainWorker(trainer, store)
    with pytest.raises(WeightsError, match="full"):
        worker.publish(1)
    assert trainer.readings == ["begun", "ended"]
    worker.rescue(1)
    assert trainer.readings == ["begun", "ended"] * 2
    assert store.rescued == [(1, ["a", "b", "c"])]


def test_what_cannot_be_published_in_one_place_is_published_in_the_other_and_said_in_one_line():
    store, said = PickyStore(WeightsLost("the store is full")), []

    async def run():
        remote = RemoteTrainer(FakeWorker(TrainWorker(ManyTensors(), store)), say=said.append)
        assert (await remote.publish(1)).note == "now in files"
        store.fault = None
        await remote.publish(2)
        await remote.rescue(2)

    asyncio.run(run())
    assert (store.published, store.rescued) == ([(2, [*"abc"])], [(1, [*"abc"]), (2, [*"abc"])])
    assert said == ["weights: now in files"] * 2


@pytest.mark.parametrize("then", ["train_step", "warmup", "load", None])
def test_only_the_weights_that_the_trainer_still_has_are_rescued(then):
    store, trainer = PickyStore(), ManyTensors()
    worker = TrainWorker(trainer, store)
    if then is not None:
        worker.publish(1)
        arguments = {"train_step": [TrainBatch(1, 0, [])], "warmup": [[], 1, 0.1, 1], "load": ["folder"]}[then]
        getattr(worker, then)(*arguments)
    with pytest.raises(WeightsError, match="version 1 is lost, and the trainer holds other weights by now"):
        worker.rescue(1)
    assert store.rescued == []


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


def test_the_handle_and_the_place_of_weights_import_without_torch():
    code = "import sys, rollart.data.training, rollart.data.weights_place, rollart.learn.advantage as _; "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
