"""Lanes, hosted environments and the checks of replies."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from rollart.errors import EnvError, RewardError
from rollart.tasks.hosted import HostedEnv
from rollart.tasks.lane import Lane
from rollart.tasks.replies import reset_reply, score, step_reply
from rollart.types import EnvReply


def test_a_lane_makes_its_calls_in_order_on_one_thread():
    lane, seen = Lane("test"), []
    futures = [lane.submit(EnvError, "call", lambda n=n: seen.append((n, threading.get_ident()))) for n in range(5)]
    lane.end()
    for future in futures:
        future.result(10)
    assert [n for n, _ in seen] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


@pytest.mark.parametrize(
    "error", [KeyError("seed"), SystemExit(3), StopIteration(), KeyboardInterrupt(), TimeoutError()]
)
def test_whatever_a_call_raises_comes_back_as_the_asked_error_with_its_place(error):
    def call():
        raise error

    lane = Lane("test")
    with pytest.raises(EnvError, match=rf"^reset of x: {type(error).__name__}: .*\(test_hosted.py:\d+\)") as caught:
        lane.submit(EnvError, "reset of x", call).result(10)
    assert caught.value.__cause__ is error
    assert lane.submit(EnvError, "next", lambda: 5).result(10) == 5
    lane.end()


class Unsayable(Exception):
    def __str__(self):
        raise OSError("lost for words")


def test_an_error_that_cannot_be_shown_is_an_error_all_the_same():
    def call():
        raise Unsayable

    lane = Lane("test")
    with pytest.raises(EnvError, match=r"^step: Unsayable: \(its text cannot be shown: OSError\)"):
        lane.submit(EnvError, "step", call).result(10)
    lane.end()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_process_that_a_call_forked_ends_with_its_call(leaves):
    def call():
        child = os.fork()
        if child == 0 and leaves:
            sys.exit(3)
        return child

    lane = Lane("test")
    child = lane.submit(EnvError, "step", call).result(10)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert time.monotonic() < deadline
    lane.end()


def test_a_cancelled_call_is_never_made():
    lane, gate, made = Lane("test"), threading.Event(), []
    lane.submit(EnvError, "wait", gate.wait)
    waiting = lane.submit(EnvError, "call", lambda: made.append(1))
    assert waiting.cancel()
    gate.set()
    lane.submit(EnvError, "last", lambda: None).result(10)
    lane.end()
    assert made == []


class Recorder:
    def __init__(self):
        self.threads = [threading.get_ident()]
        self.closed = threading.Event()

    def reset(self, seed=None):
        self.threads.append(threading.get_ident())
        return str(seed), {}

    def step(self, action):
        self.threads.append(threading.get_ident())
        return action, 1, True, np.False_, {"n": 1, "array": np.zeros(2)}

    def close(self):
        self.threads.append(threading.get_ident())
        self.closed.set()


def test_an_environment_lives_on_one_thread_from_constructor_to_close():
    made = []

    def make():
        made.append(Recorder())
        return made[-1]

    hosted = HostedEnv("x", make)
    assert hosted.reset(3).result(10) == EnvReply("3")
    assert hosted.step("go").result(10) == EnvReply("go", 1.0, True, False, {"n": 1})
    assert not hosted.is_busy
    hosted.retire()
    assert made[0].closed.wait(10)
    assert len(set(made[0].threads)) == 1
    assert threading.get_ident() not in made[0].threads


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, r"returned None; expected \(observation, info\)"),
        ("text", "returned str 'text'"),
        (("a", {}, 1), "returned tuple of 3"),
        ((None, {}), "returned observation None; expected a str"),
        ((np.zeros(3), {}), "returned observation ndarray array"),
        (("a", None), "returned info None; expected a dict"),
    ],
)
def test_a_reset_must_return_observation_and_info(value, reason):
    with pytest.raises(EnvError, match=f"^reset of x {reason}"):
        reset_reply(value, "reset of x")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "returned None"),
        (("a", 1.0, True, {}), "returned tuple of 4"),
        (("a", float("nan"), True, False, {}), "returned reward float nan; expected a finite number"),
        (("a", float("inf"), True, False, {}), "returned reward float inf"),
        (("a", "1", True, False, {}), "returned reward str '1'"),
        (("a", None, True, False, {}), "returned reward None"),
        (("a", 1.0, "no", False, {}), "returned terminated str 'no'; expected True or False"),
        (("a", 1.0, False, None, {}), "returned truncated None"),
        ((b"a", 1.0, False, False, {}), "returned observation bytes"),
        (("a" * 500, 1.0, False, False, []), "returned info list"),
    ],
)
def test_a_step_must_return_its_five_values(value, reason):
    with pytest.raises(EnvError, match=f"^step of x {reason}"):
        step_reply(value, "step of x")


def test_numbers_of_numpy_are_numbers_and_info_keeps_plain_data_only():
    info = {"a": [1, {"b": None}], "big": 2**70, "set": {1}, 3: "x", "deep": {"x": [object()]}, "text": "é"}
    reply = step_reply(("o", np.float32(0.5), np.True_, False, info), "step")
    assert reply == EnvReply("o", 0.5, True, False, {"a": [1, {"b": None}], "text": "é"})
    assert type(reply.reward) is float
    assert type(reply.terminated) is bool


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("-inf"), [1.0], 1j])
def test_a_reward_must_be_a_finite_number(value):
    with pytest.raises(RewardError, match=r"^reward of x returned .*; expected a finite number"):
        score(value, "reward of x")


def test_a_long_value_is_shown_short():
    with pytest.raises(EnvError) as caught:
        reset_reply("x" * 10_000, "reset of x")
    assert len(str(caught.value)) < 200


def test_text_that_utf8_cannot_hold_is_refused_as_an_observation_and_left_out_of_info():
    with pytest.raises(EnvError, match=r"reset returned observation str '.*ud800'; expected text that UTF-8 can hold"):
        reset_reply(("\ud800", {}), "reset")
    reply = reset_reply(("ok", {"a": "\ud800", "\ud800": 1, "b": ["\udfff"], "c": "\u03a9"}), "reset")
    assert reply == EnvReply("ok", info={"c": "\u03a9"})


def test_a_call_after_the_end_fails_at_once_instead_of_never():
    hosted = HostedEnv("quiet", Recorder)
    hosted.retire().result(10)
    with pytest.raises(EnvError, match="reset of task 'quiet': its thread has ended"):
        hosted.reset(1).result(10)
