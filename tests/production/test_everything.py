"""Ray, vLLM, FSDP2 on two ranks and Mooncake in one run, as `configs/production.toml` has them: it trains; it falls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rollart.cli import main
from rollart.data.stores.mooncake_service import key_prefix
from rollart.data.stores.mooncake_shelf import MooncakeShelf
from rollart.data.weights import BucketStore
from rollart.run_folder import checkpoints
from tests.data.serverless.invoke_engine import environ
from tests.e2e.conftest import watched
from tests.e2e.laboratory import REPOSITORY, Laboratory, Process, batches, check_audit, lines, steps_done, summary

REASON = "not installed: {}; run them with: make test-production"
MISSING = [name for name in ("ray", "vllm") if find_spec(name) is None]
if MISSING:
    pytest.skip(REASON.format(", ".join(MISSING)), allow_module_level=True)
pytest.importorskip("mooncake.store", reason=REASON.format("mooncake, or its libraries"), exc_type=ImportError)

pytestmark = pytest.mark.e2e

TEXT = (REPOSITORY / "configs" / "production.toml").read_text()
SMALL = (
    *("rollout.groups_per_batch=4", "rollout.group_size=4", "rollout.engine_slots=16", "rollout.zero_variance=keep"),
    *("model.warmup_steps=5", "model.warmup_episodes=16", "eval.every=0", "eval.episodes=2"),
    *("weights.bucket_bytes=262144", "log.trajectories_every=1", "log.trajectories=1000", "log.tensorboard=false"),
    *("engine_options.kv_cache_memory_bytes=16777216", "roles.environment.workers=1", "train.collective_timeout_s=60"),
)
PATIENCE_S = 400.0
ALPHA = 1


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """A place for runs that start a Ray of their own; afterwards nothing of them is left, not even in shared memory."""
    with environ(RAY_ADDRESS="local"):
        yield from watched(Laboratory(tmp_path))


def store_of(process: Process, run: Path) -> BucketStore:
    """The run's own Mooncake store, once it is there."""
    process.until(lambda: of_store(process, "node"), "a Mooncake node")  # started when the master listens
    words = words_of(of_store(process, "node")[0])
    address = words[words.index("node") + 1]
    return BucketStore(MooncakeShelf(address, key_prefix(run)), bucket_bytes=262144, keep=3)


def of_store(process: Process, part: str) -> list[psutil.Process]:
    """Processes of the run's Mooncake store."""
    return [each for each in process.workers() if {part, "--guarded"} <= set(words_of(each))]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none where it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def check_versions(run: Path) -> int:
    """Every generated token that was trained on has a version within the bound of its batch; the newest of them."""
    newest = 0
    for batch in batches(run):
        step = batch["step"]
        ages = {
            trajectory: age
            for group in batch["groups"]
            for trajectory, age in zip(group["trajectories"], group["ages"], strict=True)
        }
        sampled = lines(run / "trajectories" / f"step-{step:06d}.jsonl")
        assert {each["trajectory_id"] for each in sampled} == ages.keys()
        for each in sampled:
            versions = [version for version, bit in zip(each["versions"], each["loss_mask"], strict=True) if bit]
            held = versions[0] + ages[each["trajectory_id"]]  # by the engines, at get_batch
            assert versions == sorted(versions)
            assert max(0, step - 2) <= held <= step - 1  # the trainer may be one step further
            assert held - ALPHA <= versions[0] <= versions[-1] <= held
            newest = max(newest, versions[-1])
    return newest


def test_a_run_trains_on_all_of_them_with_versions_that_rise(lab: Laboratory) -> None:
    steps = 4
    process = lab.start(f"steps={steps}", *SMALL, text=TEXT)
    store = store_of(process, lab.run)
    process.until(lambda: store.has(2), "its third version")
    first, second = ([bucket.checksum for bucket in store.manifest(version).buckets] for version in (1, 2))
    assert len(first) > 1
    assert first != second
    everybody = process.workers()
    assert process.wait(PATIENCE_S) == 0, process.text()
    assert "files" not in process.text()
    check_audit(lab.run, steps, ALPHA)
    assert check_versions(lab.run) >= 1
    trained = [line for line in lines(lab.run / "metrics.jsonl") if "canary" in line]
    assert len(trained) == steps
    assert max(line["canary"] for line in trained) < 1e-3
    assert min(line["train/grad_norm"] for line in trained) > 0
    found = summary(lab.run)
    assert found["outcome"] == "completed"
    assert {"training-0", "training-1", "inference-0"} <= found["resources"]["workers"].keys()
    assert not psutil.wait_procs(everybody, 30.0)[1]


def test_what_is_killed_is_replaced_until_it_is_a_rank_and_the_last_checkpoint_goes_on_without_any_of_them(
    lab: Laboratory,
) -> None:
    process = lab.start("steps=1000", "log.checkpoint_every=1", *SMALL, text=TEXT)
    go_on(process, lab.run)
    (guard,) = of_store(process, "master")
    for master in guard.children():
        master.kill()
    process.until(lambda: "on, they go through files in" in process.text(), "files")
    go_on(process, lab.run)
    kill_in_an_update(process)
    process.until(lambda: "inference-0.1 runs on H20:0 of pool H20" in process.text(), "a new inference worker")
    go_on(process, lab.run)
    everybody = process.workers()
    process.worker("training-1").kill()
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert "training-1" in error
    assert "Traceback" not in process.text()
    assert not psutil.wait_procs(everybody, 30.0)[1]
    done, saved = steps_done(lab.run), checkpoints(lab.run)[-1]
    assert 0 <= done - saved <= 1
    assert f"go on from step {saved} with: rollart train --resume" in process.text()
    assert summary(lab.run)["resources"]["restarts"] == {"inference-0": 1}
    check_audit(lab.run, done, ALPHA)
    check_versions(lab.run)
    plain = ("runtime=inline", "engine=embedded", "engine_options={}", "weights.store=file")
    assert main(["train", "--resume", str(lab.run), f"steps={saved + 1}", "roles.actor_train.workers=1", *plain]) == 0
    check_audit(lab.run, saved + 1, ALPHA)


def go_on(process: Process, run: Path) -> None:
    """Wait for three more steps."""
    done = steps_done(run)
    process.until(lambda: steps_done(run) >= done + 3, "three more steps")


def kill_in_an_update(process: Process) -> None:
    """SIGKILL to the inference worker when the trainer has new weights and all wait for it to take them.

    The ranks are held until all that they left to generate is generated; then they end their step without it.
    """
    inference, *ranks = (process.worker(name) for name in ("inference-0", "training-0", "training-1"))
    for rank in ranks:
        rank.suspend()
    process.until(lambda: is_idle(inference), "an end of what there is to generate")
    inference.suspend()
    for rank in ranks:
        rank.resume()
    process.until(lambda: is_idle(ranks[0]), "an end of training")
    inference.kill()


def is_idle(process: psutil.Process) -> bool:
    """Whether it computes nothing for a second."""
    return process.cpu_percent(1.0) < 10.0
