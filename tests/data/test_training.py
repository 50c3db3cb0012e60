"""The train worker and its handle, with a fake trainer behind and a fake worker between."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest
import torch
from msgspec.structs import replace

from rollart.config import parse
from rollart.data import roles
from rollart.data.trainers import check_installed
from rollart.data.training import RemoteTrainer, TrainWorker
from rollart.data.weights import FileWeightStore
from rollart.errors import ConfigError, RankError, RewardError, WeightsError, WeightsLost, WorkerDied
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest
from rollart.virtual_time import run_virtual


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


# --------------------------------------------------------------------------------------------------------------- ranks
class FakeRank:
    """Notes its calls in a list that all ranks share, and answers, fails or dies as told."""

    def __init__(self, name, calls, outcome=None):
        self.name, self.calls, self.outcome = name, calls, outcome

    async def call(self, method, *args, returns):
        self.calls.append((self.name, method, *args))
        await asyncio.sleep(0)
        self.calls.append((self.name, "done"))
        if callable(self.outcome):
            return await self.outcome()
        if self.outcome is not None:
            raise self.outcome
        return [self.name]


def ranks(*outcomes):
    calls = []
    return calls, RemoteTrainer(*(FakeRank(f"r{rank}", calls, each) for rank, each in enumerate(outcomes)))


def test_every_rank_is_called_and_the_first_one_answers_for_all():
    calls, remote = ranks(None, None)
    assert asyncio.run(remote.logprobs([1, 2])) == ["r0"]
    assert calls[:2] == [("r0", "logprobs", [1, 2]), ("r1", "logprobs", [1, 2])]


def test_what_is_bulky_goes_to_the_first_rank_alone():
    calls, remote = ranks(None, None)
    batch, rows = TrainBatch(step=1, version=0, groups=[]), [([1], [1.0])]

    async def run():
        await remote.train_step(batch)
        await remote.warmup(rows, 5, 0.1, 100)

    asyncio.run(run())
    assert [call for call in calls if call[1] != "done"] == [
        ("r0", "train_step", batch),
        ("r1", "train_step", None),
        ("r0", "warmup", rows, 5, 0.1, 100),
        ("r1", "warmup", None, 5, 0.1, 100),
    ]


def test_calls_of_a_group_come_one_after_the_other_to_all_ranks():
    calls, remote = ranks(None, None)

    async def run():
        await asyncio.gather(remote.save("a"), remote.logprobs([1, 2]))

    asyncio.run(run())
    assert [call[1] for call in calls] == ["save", "save", "done", "done", "logprobs", "logprobs", "done", "done"]


@pytest.mark.parametrize(
    ("outcomes", "raised"),
    [
        ((RankError("gone"), WorkerDied("r1 is dead")), WorkerDied),
        ((RankError("gone"), RewardError("nan")), RewardError),
        ((RankError("gone"), None), RankError),
    ],
)
def test_of_several_failures_the_likeliest_cause_is_raised(outcomes, raised):
    _, remote = ranks(*outcomes)
    with pytest.raises(raised):
        asyncio.run(remote.logprobs([1, 2]))


def test_a_rank_that_is_still_waiting_is_not_waited_for_when_another_died_long_ago():
    """Its own time limit may be far away."""
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run():
        _, remote = ranks(WorkerDied("dead"), forever)
        with pytest.raises(WorkerDied):
            await remote.logprobs([1, 2])

    run_virtual(run())
    assert ended


def test_what_the_store_has_lost_is_published_once_more_by_all_ranks_and_said_once():
    calls, said = [], []

    class Losing(FakeRank):
        async def call(self, method, *args, returns):
            await super().call(method, *args, returns=returns)
            if (method, self.name) == ("publish", "r0"):
                raise WeightsLost("the store is full")
            return WeightManifest(*args, (), (), note="now in files")

    remote = RemoteTrainer(*(Losing(name, calls) for name in ("r0", "r1")), say=said.append)
    assert asyncio.run(remote.publish(1)).note == "now in files"
    asked = [call for call in calls if call[1] != "done"]
    assert asked == [("r0", "publish", 1), ("r1", "publish", 1), ("r0", "rescue", 1), ("r1", "rescue", 1)]
    assert said == ["weights: now in files"]


def test_an_unknown_trainer_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="trainer: unknown 'fsdp3'"):
        roles.training(
            "nowhere", "fsdp3", {}, "cpu", 1.0, 0, {"folder": str(tmp_path), "bucket_bytes": 1024, "keep": 2}
        )


def test_a_check_of_the_config_knows_which_trainers_are_here():
    config = parse("[tasks.frozenlake]\n")
    check_installed(config)
    with pytest.raises(ConfigError, match="trainer: unknown 'fsdp3'; did you mean 'fsdp2'"):
        check_installed(replace(config, trainer="fsdp3"))


def test_the_handle_and_the_place_of_weights_import_without_torch():
    code = "import sys, rollart.data.training, rollart.data.weights_place, rollart.learn.advantage as _; "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
