"""The five schedules over fakes, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollart.errors import RankError, RolloutError, WeightsError, WorkerDied
from rollart.types import HELD_OUT, ParameterInfo, TaskSpec
from rollart.virtual_time import run_virtual
from tests.fakes import FakeEnv, FakeReward, FakeRun, share

ALL = ["sync", "sync_plus", "one_off", "areal", "rollart"]
OVERLAPPING = ["one_off", "areal", "rollart"]


def trained(**options: object) -> FakeRun:
    async def main() -> FakeRun:
        return await FakeRun(**options).train()  # type: ignore[arg-type]

    return run_virtual(main())


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_trains_all_steps_and_evaluates_first_and_last(schedule: str) -> None:
    run = trained(schedule=schedule)
    assert [summary.step for summary in run.hooks.summaries] == [1, 2, 3, 4, 5, 6]
    assert [(step, result.version) for step, result in run.hooks.evaluations] == [(0, 0), (6, 6)]
    assert run.proxy.version == 6
    assert run.hooks.checkpoints == [6]
    assert [version for _, version in run.engines[0].updates] == [0, 1, 2, 3, 4, 5, 6]
    assert sum(run.ledger.ages.values()) == sum(run.ledger.lags.values()) == 6 * 2 * 2


@pytest.mark.parametrize("schedule", ["sync", "sync_plus"])
def test_alternating_schedules_generate_nothing_while_training(schedule: str) -> None:
    run = trained(schedule=schedule, eval__episodes=1)
    after_first = run.trainer.spans[1:]
    assert after_first
    for begin, end in after_first:
        assert not [when for when, _, _ in run.env.steps if begin < when < end]
    assert set(run.ledger.ages) == set(run.ledger.lags) == {0}
    assert run.ledger.snapshot()["waits_s"]["training"] > 3


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_overlapping_schedules_generate_while_training(schedule: str) -> None:
    run = trained(schedule=schedule, train_s=0.5)
    assert run.ledger.overlap > 0.5
    assert any(begin < when < end for begin, end in run.trainer.spans for when, _, _ in run.env.steps)


def test_overlap_is_faster_than_alternation() -> None:
    seconds = {}
    for schedule in ("sync_plus", "rollart"):
        run = trained(schedule=schedule)
        seconds[schedule] = run.trainer.spans[-1][1] - run.trainer.spans[0][1]
    assert seconds["rollart"] < 0.75 * seconds["sync_plus"]


def test_sync_steps_environments_together_and_sync_plus_does_not() -> None:
    def num_tokens(request: object) -> int:
        return 1 + int(share(request.request_id) * 8)  # type: ignore[attr-defined]

    def moments(schedule: str) -> Counter[float]:
        run = trained(schedule=schedule, num_tokens=num_tokens, eval__episodes=1, steps=2)
        return Counter(round(when, 6) for when, env_id, _ in run.env.steps if not env_id.startswith("eval"))

    assert set(moments("sync").values()) == {4}
    assert set(moments("sync_plus").values()) != {4}


def test_sync_scores_only_when_all_trajectories_of_the_iteration_have_ended() -> None:
    tasks = {"maze": TaskSpec("maze", has_reward=True)}
    slow = lambda call, env_id, task: 5.0 if env_id == "g0-m0-a0" and call == "step" else None  # noqa: E731
    spans = {}
    for schedule in ("sync", "sync_plus"):
        reward = FakeReward()
        run = trained(
            schedule=schedule, tasks=tasks, reward=reward, env=FakeEnv(misbehave=slow), steps=1, eval__episodes=1
        )
        spans[schedule] = max(t.seconds["score"] for t in run.recorder.kept)
    assert spans["sync"] >= 5.0 > spans["sync_plus"]


def test_one_off_finishes_an_iteration_under_the_weights_it_began_with() -> None:
    run = trained(schedule="one_off", num_tokens=lambda request: 9, train_s=0.3)
    for trajectory in run.recorder.kept:
        assert len({version for turn in trajectory.turns for version in turn.versions}) == 1
    assert set(run.ledger.ages) == {0}
    assert run.ledger.lags == {0: 4, 1: 20}


def test_rollart_interrupts_and_resumes_trajectories_across_updates() -> None:
    run = trained(schedule="rollart", num_tokens=lambda request: 1 + int(share(request.trajectory_id) * 30))
    mixed = [t for t in run.recorder.kept if len({v for turn in t.turns for v in turn.versions}) > 1]
    assert mixed


def straggler(call: str, env_id: str, task: str) -> float | None:
    """One trajectory whose second step takes the time of several updates."""
    return 12.0 if env_id == "g2-m0-a0" and call == "step" else None


def test_rollart_aborts_what_grows_stale_and_areal_lets_it_end_and_evicts() -> None:
    aborted = trained(schedule="rollart", env=FakeEnv(misbehave=straggler), train_s=0.2, steps=20)
    assert aborted.ledger.aborted["stale"] >= 1
    straggling = next(t for t in aborted.recorder.lost if t.trajectory_id == "g2-m0-a0")
    assert straggling.stop_reason == "stale"
    assert sum(straggling.seconds.values()) < 12, "it was aborted in the middle of its step"
    evicted = trained(schedule="areal", env=FakeEnv(misbehave=straggler), train_s=0.2, steps=60)
    assert evicted.scheduler.book.counts.causes["stale"] >= 1
    straggling = next(t for t in evicted.recorder.lost if t.trajectory_id == "g2-m0-a0")
    assert straggling.stop_reason == "done", "areal does not abort in flight"


def test_staleness_is_below_the_bound_where_speeds_allow_it() -> None:
    run = trained(schedule="rollart", alpha=4, train_s=0.1, token_s=0.2, steps=10)
    assert max(run.ledger.ages) < 4
    slow_learner = trained(schedule="rollart", alpha=2, train_s=20.0, steps=10)
    assert max(slow_learner.ledger.ages) <= 2
    assert slow_learner.ledger.ages[0] > 0


@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.25])
@pytest.mark.parametrize("schedule", ["rollart", "areal"])
def test_a_fractional_alpha_bounds_the_share_of_older_groups(alpha: float, schedule: str) -> None:
    def num_tokens(request: object) -> int:
        return 1 + int(share(request.request_id) ** 4 * 60)  # type: ignore[attr-defined]

    run = trained(
        schedule=schedule, alpha=alpha, train_s=0.3, steps=30, num_tokens=num_tokens, rollout__groups_per_batch=4
    )
    assert len(run.hooks.summaries) == 30


@pytest.mark.parametrize("schedule", ALL)
def test_a_hung_environment_costs_one_trajectory(schedule: str) -> None:
    env = FakeEnv(misbehave=lambda call, env_id, task: "hang" if env_id == "g1-m1-a0" and call == "step" else None)
    run = trained(schedule=schedule, env=env, steps=30)
    assert len(run.hooks.summaries) == 30
    lost = [t for t in run.recorder.lost if t.trajectory_id == "g1-m1-a0"]
    assert lost[0].stop_reason in ("env_error", "stale")


@pytest.mark.parametrize("answer", ["raise", "none", 17, msgspec.UNSET])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_misbehaving_environment_costs_one_trajectory(call: str, answer: object) -> None:
    def misbehave(which: str, env_id: str, task: str) -> object:
        return answer if env_id.startswith("g1-m1-a0") and which == call else None

    run = trained(env=FakeEnv(misbehave=misbehave), alpha=8, steps=12)
    assert len(run.hooks.summaries) == 12
    lost = [t for t in run.recorder.lost if t.stop_reason == "env_error"]
    assert [t.trajectory_id for t in lost] == ["g1-m1-a0"]
    assert lost[0].cause
    assert ("maze", run.source.draw(1)[1]) in run.trained_specs


def test_when_all_environments_fail_the_run_ends_with_the_cause() -> None:
    with pytest.raises(RolloutError, match=r"20 groups in a row were dropped.*env_error: the maze has no exit"):
        trained(env=FakeEnv(misbehave=lambda call, env_id, task: "raise"), max_drops=20, eval__episodes=1)


def test_empty_generations_everywhere_end_with_a_clear_error() -> None:
    with pytest.raises(RolloutError, match="no token was generated"):
        trained(num_tokens=lambda request: 0, eval__episodes=1)


def test_some_empty_generations_are_legal_actions() -> None:
    run = trained(num_tokens=lambda request: 0 if request.request_id.endswith("t0") else 2)
    assert all(t.turns[0].action_text == "" and t.start_version is not None for t in run.recorder.kept)


def test_one_task_that_always_fails_does_not_stop_the_other() -> None:
    tasks = {"good": TaskSpec("good"), "bad": TaskSpec("bad", env_retries=0)}
    env = FakeEnv(misbehave=lambda call, env_id, task: "raise" if task == "bad" else None)
    run = trained(tasks=tasks, env=env, steps=8)
    assert {task for task, _ in run.trained_specs} == {"good"}
    assert run.recorder.counts["groups/given_up"] > 0


def test_a_batch_smaller_than_the_groups_in_flight_is_taken_at_once() -> None:
    run = trained(schedule="rollart", alpha=5, rollout__groups_per_batch=1, steps=10)
    assert [len(batch.groups) for batch in run.trainer.batches] == [1] * 10


@pytest.mark.parametrize("schedule", ["sync_plus", "one_off", "rollart"])
def test_redundant_groups_are_aborted_when_the_batch_is_full(schedule: str) -> None:
    env = FakeEnv(misbehave=lambda call, env_id, task: 4.0 * share(env_id) if call == "step" else None)
    run = trained(schedule=schedule, env=env, rollout__extra_groups=2, steps=8, train_s=0.1)
    assert run.ledger.aborted["redundant"] > 0
    assert run.scheduler.book.counts.ends["aborted"] > 0
    counts = run.ledger.snapshot()
    assert counts["tokens_kept_mean"] > 0
    assert counts["tokens_finished_mean"] > 0


def test_redundant_groups_are_kept_when_asked_to() -> None:
    env = FakeEnv(misbehave=lambda call, env_id, task: 4.0 * share(env_id) if call == "step" else None)
    options = {"env": env, "rollout__extra_groups": 2, "rollout__on_target": "keep", "steps": 8}
    run = trained(schedule="one_off", **options)
    assert run.ledger.aborted["redundant"] == 0
    assert max(run.ledger.ages) == 1


def test_redundant_members_are_aborted_in_engine_and_environment() -> None:
    run = trained(rollout__extra_members=2, num_tokens=lambda request: 1 + int(share(request.trajectory_id) * 40))
    redundant = [t for t in run.recorder.lost if t.stop_reason == "redundant"]
    assert redundant
    assert run.engines[0].aborted
    assert not run.engines[0].in_flight
    assert set(run.env.closed) >= {t.trajectory_id for t in redundant if t.seconds.get("reset", 0) > 0}
    longest = max(2 * (1 + int(share(t.trajectory_id) * 40)) for t in run.recorder.kept)
    assert longest < max(2 * (1 + int(share(t.trajectory_id) * 40)) for t in redundant)


def test_zero_variance_groups_are_replaced_up_to_the_limit() -> None:
    env = FakeEnv(reward=lambda env_id: 1.0)
    run = trained(env=env, rollout__zero_variance="replace", rollout__groups_per_batch=4, rollout__replace_limit=0.5)
    assert len(run.hooks.summaries) == 6
    assert 10 <= run.scheduler.book.counts.zero_variance <= 14
    assert run.recorder.counts["groups/zero_variance/maze"] == run.scheduler.book.counts.zero_variance


@pytest.mark.parametrize("schedule", ALL)
def test_stop_and_resume_gives_the_same_data_order_and_trains_nothing_twice(schedule: str) -> None:
    options = {"schedule": schedule, "steps": 12, "log__checkpoint_every": 1}
    whole = trained(**options)

    async def halves() -> tuple[FakeRun, FakeRun]:
        first = FakeRun(**options)  # type: ignore[arg-type]
        saved: dict[int, bytes] = {}
        first.hooks.on_checkpoint = lambda step: saved.__setitem__(step, msgspec.msgpack.encode(first.loop.snapshot()))
        first.hooks.on_step = lambda summary: first.loop.request_stop() if summary.step == 5 else None
        await first.train()
        state = msgspec.msgpack.decode(saved[first.loop.step])
        second = FakeRun(**options, start_step=state["step"])  # type: ignore[arg-type]
        second.scheduler.restore(state["scheduler"])
        return first, await second.train()

    first, second = run_virtual(halves())
    assert first.loop.step == 5
    assert [summary.step for summary in second.hooks.summaries] == list(range(6, 13))
    ids = [g.spec.index for run in (first, second) for batch in run.trainer.batches for g in batch.groups]
    assert len(ids) == len(set(ids)) == 24
    trained_in_halves = first.trained_specs + second.trained_specs
    fresh = [whole.source.draw(n) for n in range(40)]
    assert set(trained_in_halves) <= set(fresh)
    assert set(trained_in_halves[:20]) <= set(fresh[:26]), "the order of the data was kept"
    assert set(fresh[:20]) <= set(trained_in_halves), "nothing was lost"


def test_a_batch_in_hand_at_the_checkpoint_is_trained_after_resuming() -> None:
    async def main() -> tuple[list[str], list[str]]:
        first = FakeRun(schedule="rollart", steps=9, log__checkpoint_every=3, train_s=5.0)
        states: dict[int, bytes] = {}
        first.hooks.on_checkpoint = lambda step: states.__setitem__(
            step, msgspec.msgpack.encode(first.scheduler.snapshot())
        )
        await first.train()
        second = FakeRun(schedule="rollart", steps=9, start_step=3)
        second.scheduler.restore(msgspec.msgpack.decode(states[3]))
        await second.train()
        names = [[t.trajectory_id for g in b.groups for t in g.trajectories] for b in first.trainer.batches]
        return names[3], [t.trajectory_id for g in second.trainer.batches[0].groups for t in g.trajectories]

    in_hand, resumed = run_virtual(main())
    assert in_hand == resumed


def test_a_canary_that_differs_names_worker_version_and_difference() -> None:
    async def main() -> None:
        run = FakeRun(num_workers=2)
        run.hooks.on_step = lambda summary: setattr(run.engines[1], "logprob_shift", 0.25)
        await run.train()

    with pytest.raises(WeightsError, match=r"version 1, inference worker 'inference-1'.* differ by 0\.25") as caught:
        run_virtual(main())
    assert "or the engine computes in another precision: then raise train.canary_tolerance" in str(caught.value)


def test_mismatching_parameters_end_the_run_before_step_1() -> None:
    async def main() -> None:
        run = FakeRun()
        run.engines[0].parameter_infos = [ParameterInfo("embed", (8, 5), "float32"), ParameterInfo("tail", (1,), "f")]
        try:
            await run.train()
        finally:
            assert not run.env.resets

    with pytest.raises(WeightsError, match=r"embed is float32\[8, 4\].*float32\[8, 5\].*head is missing.*tail is mis"):
        run_virtual(main())


def test_a_dead_worker_ends_the_run_with_its_name_and_reason() -> None:
    async def main() -> None:
        run = FakeRun()
        run.hooks.on_step = lambda summary: run.worker.die("signal 9") if summary.step == 2 else None
        await run.train()

    with pytest.raises(WorkerDied, match="worker 'env-0' died: signal 9"):
        run_virtual(main())


def test_the_death_of_one_of_two_inference_workers_costs_the_run_nothing_but_time() -> None:
    async def main() -> FakeRun:
        run = FakeRun(num_workers=2)
        run.hooks.on_step = lambda summary: setattr(run.engines[0], "dead", "signal 9")
        return await run.train()

    run = run_virtual(main())
    assert run.loop.step == run.config.steps
    assert {each.stop_reason for each in run.recorder.lost} <= {"cancelled", "done"}, "its requests went to the other"
    assert run.proxy.num_workers == 1


def test_the_death_of_the_last_inference_worker_ends_the_run_when_nothing_takes_its_place() -> None:
    async def main() -> None:
        run = FakeRun(train_s=50.0)

        def kill(summary: object) -> None:
            run.engines[0].dead = "signal 9"
            run.worker.die("signal 9")

        run.hooks.on_step = kill
        await run.train()

    with pytest.raises(WorkerDied, match="worker 'env-0' died: signal 9"):
        run_virtual(main())


def test_a_failing_train_step_ends_the_run_while_the_loop_waits_for_a_batch() -> None:
    async def main() -> None:
        run = FakeRun(schedule="rollart", train_s=0.5)
        run.trainer.fail_at = 2
        await run.train()

    with pytest.raises(RuntimeError, match="out of memory in train_step"):
        run_virtual(main())


def test_one_failed_generation_stays_with_its_trajectory() -> None:
    async def main() -> FakeRun:
        run = FakeRun()
        run.engines[0].failing = lambda request: request.trajectory_id == "g0-m0-a0"
        return await run.train()

    run = run_virtual(main())
    failed = [t for t in run.recorder.lost if t.stop_reason == "generation_error"]
    assert [t.trajectory_id for t in failed] == ["g0-m0-a0"]
    assert "out of KV memory" in failed[0].cause


def test_a_stop_finishes_the_train_step_and_saves() -> None:
    async def main() -> FakeRun:
        run = FakeRun(schedule="rollart", train_s=10.0)
        asyncio.get_running_loop().call_later(15.0, run.loop.request_stop)
        return await run.train()

    run = run_virtual(main())
    assert run.loop.step == len(run.trainer.batches) == 2
    assert run.hooks.checkpoints == [2]


@pytest.mark.parametrize("schedule", ALL)
def test_a_fault_that_leaves_the_trainer_alive_ends_the_run_after_a_checkpoint(schedule: str) -> None:
    async def main() -> FakeRun:
        run = FakeRun(schedule=schedule, steps=1000, train_s=10.0)

        def all_engines_die() -> None:
            run.proxy.lost("inference-0")
            run.loop.end(WorkerDied("no engine is left"))

        asyncio.get_running_loop().call_later(35.0, all_engines_die)
        with pytest.raises(WorkerDied, match="no engine is left"):
            await run.train()
        return run

    run = run_virtual(main())
    assert run.hooks.checkpoints == [run.loop.step] == [len(run.trainer.batches)]
    assert run.loop.step >= 1


def test_a_fault_after_the_last_checkpoint_ends_the_run_at_once() -> None:
    async def main() -> FakeRun:
        run = FakeRun(schedule="rollart", train_s=0.1)

        def while_the_last_evaluation_runs(step: int) -> None:
            run.proxy.lost("inference-0")
            asyncio.get_running_loop().call_later(10.0, run.loop.end, WorkerDied("no engine is left"))

        run.hooks.on_checkpoint = while_the_last_evaluation_runs
        with pytest.raises(WorkerDied, match="no engine is left"):
            await run.train()
        return run

    assert run_virtual(main()).hooks.checkpoints == [6]


def ended_by_a_fault(match: str, fault: Callable[[FakeRun], None], **options: Any) -> FakeRun:
    """A run that `fault` was to break."""

    async def main() -> FakeRun:
        run = FakeRun(**{"steps": 1000, "train_s": 10.0, **options})
        fault(run)
        with pytest.raises(RuntimeError, match=match):
            await run.train()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return run

    return run_virtual(main())


def at(seconds: float, error: Exception) -> Callable[[FakeRun], None]:
    """A fault that ends the run in so many seconds."""

    def fault(run: FakeRun) -> None:
        asyncio.get_running_loop().call_later(seconds, run.supervisor.fail, error)

    return fault


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("schedule", ALL)
def test_weights_for_which_there_is_no_room_are_saved_before_the_run_ends(schedule: str, asynchronous: bool) -> None:
    def fault(run: FakeRun) -> None:
        run.store.full_at = 3

    options = {"schedule": schedule, "weights__asynchronous": asynchronous}
    run = ended_by_a_fault("no room for version 3", fault, **options)
    assert run.hooks.checkpoints == [3] == [run.loop.step]
    assert [summary.step for summary in run.hooks.summaries] == [1, 2, 3]
    assert run.hooks.told == ["ending after this step, with a checkpoint: no room for version 3"]


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_the_train_step_that_runs_when_a_fault_ends_the_run_is_finished_and_saved(schedule: str) -> None:
    run = ended_by_a_fault("every group fails", at(35.0, RolloutError("every group fails")), schedule=schedule)
    assert run.hooks.checkpoints == [run.loop.step] == [len(run.trainer.batches)]
    assert run.loop.step >= 3
    assert run.trainer.spans[-1][1] > 35.0


def test_groups_that_are_dropped_in_a_row_end_the_run_after_a_checkpoint() -> None:
    def fault(run: FakeRun) -> None:
        run.hooks.on_step = lambda summary: setattr(run.engines[0], "failing", lambda request: summary.step >= 2)

    run = ended_by_a_fault("20 groups in a row were dropped", fault, max_drops=20)
    assert run.hooks.checkpoints == [run.loop.step]
    assert run.loop.step >= 2


def test_what_a_failed_or_dead_trainer_holds_is_not_saved() -> None:
    failed = ended_by_a_fault("out of memory", lambda run: setattr(run.trainer, "fail_at", 3))
    assert (failed.hooks.checkpoints, failed.hooks.told, failed.loop.step) == ([], [], 2)
    dead = ended_by_a_fault("signal 9", at(35.0, WorkerDied("worker 'training-0' died: signal 9")))
    assert (dead.hooks.checkpoints, dead.hooks.told) == ([], [])
    cause = ended_by_a_fault("rank 1 cannot go on", at(35.0, RankError("rank 1 cannot go on")))
    assert (cause.hooks.checkpoints, cause.hooks.told) == ([], [])


def test_a_train_step_that_fails_after_the_fault_does_not_hide_it() -> None:
    def fault(run: FakeRun) -> None:
        run.trainer.fail_at = 3
        run.hooks.on_step = lambda summary: at(5.0, WeightsError("no room"))(run) if summary.step == 2 else None

    run = ended_by_a_fault("no room", fault, schedule="rollart")
    assert run.hooks.checkpoints == []
    assert run.hooks.told[-1] == "no checkpoint of step 3: out of memory in train_step"


def test_a_trainer_that_hangs_keeps_no_failed_run_from_ending() -> None:
    run = ended_by_a_fault("no room", at(35.0, WeightsError("no room")), schedule="rollart", train_s=1e9)
    assert run.hooks.checkpoints == []
    assert run.hooks.told[-1] == "no checkpoint of step 1: it took more than 1800 s"


def test_a_checkpoint_that_is_written_when_a_fault_comes_is_written_to_its_end_and_once() -> None:
    def fault(run: FakeRun) -> None:
        run.hooks.save_s = 5.0
        run.hooks.on_checkpoint = lambda step: at(2.0, WeightsError("no room"))(run)

    run = ended_by_a_fault("no room", fault, log__checkpoint_every=2)
    assert run.hooks.checkpoints == [2]


def test_what_is_saved_already_is_not_saved_again_when_a_fault_ends_the_run() -> None:
    def fault(run: FakeRun) -> None:
        run.hooks.on_checkpoint = lambda step: at(0.05, WeightsError("no room"))(run)

    run = ended_by_a_fault("no room", fault, schedule="sync_plus", log__checkpoint_every=2)
    assert (run.hooks.checkpoints, run.hooks.told) == ([2], [])


async def cancelled(task: asyncio.Future[None], run: FakeRun, after_s: float) -> None:
    """Cancels a run, which leaves nothing behind."""
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run.check()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_cancelling_a_run_that_saves_after_a_fault_ends_it_at_once() -> None:
    async def main() -> FakeRun:
        run = FakeRun(schedule="rollart", train_s=10.0)
        task = asyncio.ensure_future(run.loop.run())
        at(35.0, WeightsError("no room"))(run)
        await cancelled(task, run, 36.0)
        return run

    run = run_virtual(main())
    assert run.hooks.checkpoints == []
    assert run.hooks.told == ["ending after this step, with a checkpoint: no room"]


def test_cancelling_the_run_leaves_nothing_behind() -> None:
    async def main() -> FakeRun:
        run = FakeRun(train_s=10.0)
        task = asyncio.ensure_future(run.loop.run())
        await cancelled(task, run, 12.0)
        return run

    run_virtual(main())


@pytest.mark.parametrize("schedule", ALL)
def test_an_evaluation_sees_one_version(schedule: str) -> None:
    run = trained(schedule=schedule, eval__every=2, eval__episodes=4, train_s=0.1)
    assert [step for step, _ in run.hooks.evaluations] == [0, 2, 4, 6]
    for step, result in run.hooks.evaluations:
        versions = {version for t in result.trajectories for turn in t.turns for version in turn.versions}
        assert versions == {step}
        assert [t.seed for t in result.trajectories] == [HELD_OUT + n for n in range(4)]
    assert all(r.sampling.temperature == 0.0 for r in run.engines[0].requests if r.trajectory_id.startswith("eval"))


def test_a_run_that_cannot_fill_a_batch_says_so() -> None:
    async def main() -> None:
        run = FakeRun(rollout__groups_per_batch=2)
        run.scheduler.book.rules = msgspec.structs.replace(run.scheduler.book.rules, slots=1)
        await run.train()

    with pytest.raises(RolloutError, match=r"nothing can be admitted, but the batch lacks 1 groups"):
        run_virtual(main())


def test_waits_for_the_batch_are_explained_by_stage() -> None:
    run = trained(schedule="sync_plus", env=FakeEnv(reset_s=8.0), eval__episodes=1)
    waits = run.ledger.snapshot()["waits_s"]
    assert waits["reset"] > 10 * waits["generate"] > 0
    assert waits["weights"] > 0


def test_the_wait_for_an_inference_worker_in_place_of_the_last_one_is_named() -> None:
    async def main() -> FakeRun:
        run = FakeRun(schedule="sync_plus", eval__episodes=1)
        engine = run.engines[0]

        def the_last_one_dies(step: object) -> None:
            run.proxy.lost(engine.name)
            asyncio.get_running_loop().call_later(30.0, lambda: run.background.spawn(run.proxy.join(engine), "join"))

        run.hooks.on_step = lambda summary: the_last_one_dies(summary) if summary.step == 2 else None
        return await run.train()

    run = run_virtual(main())
    waits = run.ledger.snapshot()["waits_s"]
    assert run.loop.step == run.config.steps
    assert waits["no_engine"] > 20.0 > waits["generate"] > 0


def test_two_equal_runs_are_equal() -> None:
    first, second = trained(alpha=1.5), trained(alpha=1.5)
    assert first.trained_specs == second.trained_specs
    assert first.trainer.spans == second.trainer.spans
    assert first.ledger.snapshot() == second.ledger.snapshot()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_weights_that_the_store_has_lost_are_published_once_more_by_the_trainer(asynchronous: bool) -> None:
    run = FakeRun(weights__asynchronous=asynchronous)
    store = run.store
    run.hooks.on_step = lambda summary: store.lost.add(summary.version + 1) if summary.step in (2, 3) else None

    async def main() -> None:
        await run.train()

    run_virtual(main())
    assert run.trainer.rescued == [3, 4]
    assert [version for _, version in run.engines[0].updates] == [0, 1, 2, 3, 4, 5, 6]


def test_weights_that_are_lost_again_after_their_rescue_end_the_run() -> None:
    run = FakeRun()
    run.store.lost.add(2)
    run.trainer.can_rescue = False

    async def main() -> None:
        with pytest.raises(WeightsError, match="version 2 is out of reach"):
            await run.train()

    run_virtual(main())
