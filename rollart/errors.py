"""The exception tree, one branch for each boundary that a fault can cross.

    RollartError
    |-- ConfigError          what the user wrote cannot work          (also ValueError)
    |-- ResourceError        a device or worker slot is missing       (also RuntimeError)
    |-- WorkerError          a worker failed a call                   (also RuntimeError)
    |   `-- WorkerDied       ... because its process is gone
    |-- GenerationError      the inference engine                     (also RuntimeError)
    |   `-- ServerAway       ... whose server has been away for long
    |-- EnvError             reset, step or close of an environment   (also RuntimeError)
    |   `-- EnvTimeout       ... which did not answer in time         (also TimeoutError)
    |-- RolloutError         no batch of trajectories can become ready (also RuntimeError)
    |-- RewardError          a reward function                        (also RuntimeError)
    |-- FunctionError        a function behind a URL                  (also RuntimeError)
    |   |-- FunctionTimeout  ... which did not answer in time         (also TimeoutError)
    |   `-- EndpointError    ... which could not be reached: transient
    |       `-- EndpointBusy ... because it takes no more calls now
    |-- TrainError           a training step                          (also RuntimeError)
    |   `-- RankError        ... which waited in vain for another rank
    |-- WeightsError         publishing, fetching or checking weights (also RuntimeError)
    |   `-- WeightsLost      ... which another place could still give
    `-- RunFolderError       the run folder or a checkpoint           (also OSError)

Every class takes one message, so every instance can be pickled and sent by name over a wire.
Foreign exceptions are mapped beside the only foreign import with `boundary`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def to_install(extra: str) -> str:
    """How an extra gets here, for errors: rollart is not on PyPI, and some extras have environments of their own."""
    if extra == "ray":
        return "in rollart's checkout: make env-ray, then .venv-ray/bin/rollart instead of rollart"
    if extra == "vllm":
        return (
            "in rollart's checkout: make env-production, then .venv-production/bin/rollart instead of rollart; "
            "for GPUs see docs/engines.md"
        )
    return f"in rollart's checkout: pip install -e '.[{extra}]'"


class RollartError(Exception):
    """Root of everything that rollart raises on purpose."""


class ConfigError(RollartError, ValueError):
    """The configuration, a path or a command-line value cannot work; the message names the key and the way out."""


class ResourceError(RollartError, RuntimeError):
    """No device or worker of the asked kind."""


class WorkerError(RollartError, RuntimeError):
    """A call on a worker failed; the message ends with the remote traceback."""


class WorkerDied(WorkerError):
    """The process behind a worker is gone."""


class GenerationError(RollartError, RuntimeError):
    """The inference engine refused or failed a request."""


class ServerAway(GenerationError):
    """The server that an inference worker stands for has not answered for long."""


class EnvError(RollartError, RuntimeError):
    """An environment raised, or returned something that is not an observation."""


class EnvTimeout(EnvError, TimeoutError):
    """An environment did not answer within its time limit."""


class RolloutError(RollartError, RuntimeError):
    """The rollout cannot go on: nothing runs and nothing can be admitted, or every group fails."""


class RewardError(RollartError, RuntimeError):
    """A reward function raised, or returned something that is not a finite number."""


class FunctionError(RollartError, RuntimeError):
    """A function behind a URL raised, or what it returned cannot be used."""


class FunctionTimeout(FunctionError, TimeoutError):
    """A function behind a URL did not answer within its time limit."""


class EndpointError(FunctionError):
    """A function could not be reached, turned the call away, or its process died under it. Another try may succeed."""


class EndpointBusy(EndpointError):
    """A function's endpoint takes no more calls for now."""


class TrainError(RollartError, RuntimeError):
    """Training cannot go on, for example after several losses in a row that are not finite."""


class RankError(TrainError):
    """A rank of the trainer cannot go on, as another one is gone or hangs."""


class WeightsError(RollartError, RuntimeError):
    """Weights are missing, damaged, of the wrong shape, or not those that were published."""


class WeightsLost(WeightsError):
    """A version could not be put into the store, or cannot be had from it; whoever has it can publish it elsewhere."""


class RunFolderError(RollartError, OSError):
    """A run folder or checkpoint cannot be written or read."""


@contextmanager
def boundary(kind: type[RollartError], what: str) -> Iterator[None]:
    """Re-raise any foreign exception as `kind`, saying what was being done.

    >>> with boundary(EnvError, "reset of task 'maze'"):
    ...     raise KeyError("seed")
    Traceback (most recent call last):
    rollart.errors.EnvError: reset of task 'maze': KeyError: 'seed'
    """
    try:
        yield
    except RollartError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {said(error)}") from error


def said(error: BaseException) -> str:
    """The text of an exception, also of one whose own `__str__` fails."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its text cannot be shown: {type(fault).__name__})"


def by_name(name: str, message: str) -> RollartError:
    """The exception of class `name` with `message`; a name that is not ours becomes a `WorkerError`."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, RollartError):
        return kind(message)
    return WorkerError(f"{name}: {message}")
