"""Functions as users write them, good and bad; each leaves a trace in the file that it is told."""

import os
import subprocess
import sys
import time
import zlib

from rollart.types import RewardRequest


def echo(value, **more):
    return {"value": value, **more} if more else value


def pid(*_):
    return os.getpid()


def slow(seconds):
    time.sleep(seconds)
    return seconds


def mark(path, seconds=0.0):
    """Leaves a line per call, so that a test can count executions."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return 1.0


def mixed(path, number, does=""):
    """Leaves its number once it begins; then is quick, unless told to hang or to kill its process."""
    with open(path, "a") as file:
        file.write(f"{number}\n")
    if does == "hang":
        time.sleep(600)
    if does == "die":
        os.kill(os.getpid(), 9)
    return number


def raising(text="no such thing"):
    raise KeyError(text)


def exiting(*_):
    sys.exit(3)


def dying(path=""):
    """Ends its process without a word, as a segmentation fault or the kernel's memory killer does."""
    if path and os.path.exists(path):
        return "second try"
    if path:
        open(path, "w").close()
    return os.kill(os.getpid(), 9)


def with_children(path):
    """Starts a process that would outlive it, says which, and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(f"{child.pid} {os.getpid()}")
    time.sleep(600)


def holding_the_interpreter(*_):
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def no_number(*_):
    return float("nan")


def no_data(*_):
    return object()


def too_large_a_number(*_):
    return 2**70


def half_a_character(*_):
    return "\ud800"


def numbers_of_numpy():
    import numpy as np

    return [np.float64(1.5), np.float64(2.5)]


def hungry(megabytes):
    return len(bytearray(megabytes << 20))


def score(request: RewardRequest) -> float:
    return float(len(request.responses[0]))


def score_untyped(request):
    return float(len(request.responses[0]))


async def score_later(request: RewardRequest) -> float:
    return float(len(request.responses[0]))


def score_group(requests: list[RewardRequest]) -> list[float]:
    longest = max(len(request.responses[0]) for request in requests)
    return [len(request.responses[0]) / longest for request in requests]


class Scaled:
    """A function with constructor arguments."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor


def shouting(*_):
    print("hello from a function")  # noqa: T201
    os.write(1, b"and from below\n")
    return 1


loaded_at = time.time()


def fate(number):
    """Of a call of `flaky`: 5 % hang, 15 % raise, 15 % kill their process on the first try."""
    drawn = zlib.crc32(str(number).encode()) % 100
    return "hangs" if drawn < 5 else "raises" if drawn < 20 else "dies first" if drawn < 35 else "scores"


def flaky(path, number):
    match fate(number):
        case "hangs":
            time.sleep(600)
        case "raises":
            raise KeyError("no luck")
        case "dies first" if not os.path.exists(f"{path}-{number}"):
            open(f"{path}-{number}", "w").close()
            os.kill(os.getpid(), 9)
    time.sleep(0.01)
    with open(path, "a") as file:
        file.write(f"{number}\n")
    return float(number)


def long_text(megabytes):
    return "x" * (megabytes << 20)


def with_daemons(path):
    """Starts one process in a session of its own, and one that has lost its parent besides."""
    sleep = "import time; time.sleep(600)"
    daemon = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    command = f"[sys.executable, '-c', {sleep!r}], stdout=subprocess.DEVNULL, start_new_session=True"
    orphan = f"import subprocess, sys; print(subprocess.Popen({command}).pid)"
    lost = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, check=True)
    with open(path, "w") as file:
        file.write(f"{daemon.pid} {lost.stdout.strip()} {os.getpid()}")
    return 1


class Ugly(Exception):
    def __str__(self):
        sys.exit(1)


def ugly():
    raise Ugly


class Uncallable:
    pass
