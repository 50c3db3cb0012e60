"""The command line: `rollart train | check | pools | eval | tasks | profile | simulate | plan | serve-reward |
package-reward`.

Invariant: nothing heavy is imported before the arguments and the config are known to be good, and every error of ours
is one line on stderr with an exit code: 2 for what the user wrote, 1 for the rest, 130 for an interrupt. What this file
leaves out: the arguments (`arguments.py`), and the work, which is reached through `Parts`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.arguments import parsers
from rollart.errors import ConfigError, RollartError, RunFolderError

if TYPE_CHECKING:
    from rollart.config import Config
    from rollart.data.serverless.package import Order
    from rollart.data.serverless.server import Settings
    from rollart.plan_command import Order as PlanOrder
    from rollart.profiling import Recorded
    from rollart.resource.placement import Placement
    from rollart.resource.pool import PoolRow
    from rollart.tasks.registry import TaskInfo
    from rollart.types import TaskSpec


class Parts:
    """What the commands call, imported when it is called; tests hand in another."""

    def train(self, config: Config, resume: Path | None, checkpoint: int | None = None) -> int:
        """Train to the end; the exit code."""
        from rollart import pipeline

        return pipeline.train(config, resume=resume, checkpoint=checkpoint)

    def evaluate(self, run: Path, episodes: int | None, checkpoint: int | None) -> int:
        """Evaluate a checkpoint (default: the newest) of a run folder; the exit code."""
        from rollart import pipeline

        return pipeline.evaluate(run, episodes=episodes, checkpoint=checkpoint)

    def profile(self, run: Path) -> Recorded:
        """The workload that a run recorded. Raises ConfigError."""
        from rollart import profiling

        return profiling.recorded(run)

    def specs(self, config: Config) -> dict[str, TaskSpec]:
        """The tasks of a config; that what it names is there: rewards, files, engine, a trainer that holds the model.

        Raises ConfigError.
        """
        from rollart.data.engines.installed import check_engine
        from rollart.data.places import check_places
        from rollart.data.serverless.registry import check_urls
        from rollart.data.trainers import check_installed
        from rollart.data.trainers.fit import check_fits
        from rollart.exporter import parse
        from rollart.tasks import registry

        check_places(config)
        found = registry.specs(config)
        check_urls(config)
        check_engine(config)
        check_installed(config)
        check_fits(config)
        if config.log.prometheus:
            parse(config.log.prometheus)
        return found

    def describe(self) -> list[TaskInfo]:
        """All tasks that can be named in a config."""
        from rollart.tasks import registry

        return registry.describe()

    def place(self, config: Config) -> Placement | None:
        """Where the workers of a config go; None where only the cluster can tell. Raises ConfigError."""
        from rollart.data.devices import check_devices
        from rollart.resource.devices import this_node
        from rollart.resource.placement import place

        if config.runtime == "ray":
            return None
        placement = place(config, [this_node()])
        check_devices(config, placement)
        return placement

    def pools(self, config: Config, repair: str) -> list[PoolRow]:
        """The pools of a config as they are now, other runs' bindings included. Raises RollartError."""
        from rollart import pool_view

        return pool_view.view(config, repair)

    def rehearse(self, config: Config) -> None:
        """Whether a config with a table [simulate] could be simulated. Raises RollartError."""
        from rollart import simulator

        if config.simulate is not None:
            simulator.check(config)

    def simulate(self, config: Config, trace: Path | None, json: Path | None) -> str:
        """Run a config on a modelled cluster; what came out, as text. Raises RollartError."""
        from rollart import simulator

        return simulator.run(config, trace, json)

    def plan(self, config: Config, order: PlanOrder) -> tuple[str, bool]:
        """Search for better plans and write the best; the report, and whether it was cut short. Raises RollartError."""
        from rollart import planner

        found = planner.run(config, order)
        return planner.told(found, order.out), found.interrupted

    def serve(self, settings: Settings) -> int:
        """Serve a function over HTTP until a signal; the exit code. Raises ConfigError."""
        from rollart.data.serverless.server import serve

        return serve(settings)

    def package(self, order: Order) -> str:
        """Write what is needed to deploy a function; what to do next. Raises ConfigError."""
        from rollart.data.serverless.package import package

        return package(order)


def main(argv: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Run one command; the exit code."""
    _prepare_streams()
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv), parts or Parts())
        _flush()  # Here, where a reader that went away can still be met.
        return code
    except RollartError as error:
        if os.environ.get("ROLLART_TRACEBACK") == "1":
            raise
        return _complain(error)
    except KeyboardInterrupt:
        print("rollart: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter's own last flush must not complain either.
        _forget_output()
        return 141


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _forget_output()
        raise RunFolderError(f"stdout: {error.strerror or error}") from error


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Text that the terminal's encoding lacks is escaped; a stream that was closed before the start swallows all."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor is free, and the next file or socket would get it
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(error: RollartError) -> int:
    first, _, rest = str(error).partition("\n")
    print(f"rollart: error: {first or type(error).__name__}", file=sys.stderr)
    if rest:
        print("rollart: ROLLART_TRACEBACK=1 shows the rest of it", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _run(argv: list[str], parts: Parts) -> int:
    parser, commands = parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        from rollart.checks import not_a_choice

        raise ConfigError(f"command {not_a_choice(argv[0], list(commands))}")
    # Words may come before and after options; argparse hands back those that it met after one.
    try:
        options, more = parser.parse_known_args(argv)
    except SystemExit:
        return 0  # --help or --version; mistakes are ConfigError.
    if not options.command:
        parser.print_help()
        return 0
    words = [*getattr(options, "words", []), *(more if hasattr(options, "words") else [])]
    odd = [word for word in more if word.startswith("-") or not hasattr(options, "words")]
    if odd:
        commands[options.command].error(f"unknown argument {odd[0]!r}")
    return _commands(parts, options, words)[options.command]()


def _commands(parts: Parts, options: argparse.Namespace, words: list[str]) -> dict[str, Callable[[], int]]:
    return {
        "train": lambda: _train(parts, words, options.resume, options.checkpoint),
        "check": lambda: _check(parts, words),
        "pools": lambda: _pools(parts, words, options.repair),
        "eval": lambda: _evaluate(parts, options),
        "profile": lambda: _profile(parts, options.run, options.out),
        "tasks": lambda: _tasks(parts, options.name),
        "simulate": lambda: _simulate(parts, options, words),
        "plan": lambda: _plan(parts, options, words),
        "serve-reward": lambda: _serve(parts, options),
        "package-reward": lambda: _package(parts, options),
    }


def _load(words: list[str], resume: Path | None = None) -> Config:
    from rollart.config import load
    from rollart.run_folder import resolved_config

    if words and "=" not in words[0]:
        return load(words[0], words[1:])
    if resume is None:
        raise ConfigError("no config; name a file such as configs/default.toml")
    return resolved_config(resume, words)


def _train(parts: Parts, words: list[str], resume: Path | None, checkpoint: int | None) -> int:
    if checkpoint is not None and resume is None:
        raise ConfigError("--checkpoint says where a run goes on; name that run: --resume RUN")
    config = _load(words, resume)
    parts.specs(config)
    parts.place(config)
    return parts.train(config, resume, checkpoint)


def _check(parts: Parts, words: list[str]) -> int:
    from rollart.config import to_toml
    from rollart.data.engines.installed import missing
    from rollart.report import derived, warnings
    from rollart.run_folder import to_stderr

    config = _load(words)
    parts.rehearse(config)
    try:
        specs, placement = parts.specs(config), parts.place(config)
    except ConfigError as error:
        if config.simulate is None:
            raise
        print(to_toml(config))
        to_stderr(f"this config can be simulated, but not trained: {error}")
        return 0
    print(to_toml(config))
    print(derived(config, specs, placement))
    for warning in warnings(config):
        to_stderr(warning)
    for package in missing(config):
        to_stderr(f"{package} is not installed here; the run needs it where it works (docs/production.md)")
    return 0


def _pools(parts: Parts, words: list[str], repair: str) -> int:
    from rollart.report import pools

    config = _load(words)
    parts.specs(config)
    rows = parts.pools(config, repair)
    if repair:
        names = ", ".join(sorted({row.pool for row in rows if row.node == repair}))
        print(f"repaired: the devices of {repair} in {names or 'no pool'} count as working again")
    print(pools(rows))
    return 0


def _evaluate(parts: Parts, options: argparse.Namespace) -> int:
    from rollart.run_folder import checkpoints, resolved_config

    resolved_config(options.run)
    steps = checkpoints(options.run)
    if not steps:
        raise ConfigError(f"{options.run}: this run has no checkpoint yet")
    if options.checkpoint is not None and options.checkpoint not in steps:
        have = ", ".join(map(str, steps))
        raise ConfigError(f"--checkpoint: {options.run} has none of step {options.checkpoint}; it has: {have}")
    return parts.evaluate(options.run, options.episodes, options.checkpoint)


def _profile(parts: Parts, run: Path, out: Path | None) -> int:
    from rollart.data.simulated.profile import to_toml
    from rollart.files import write_atomic
    from rollart.run_folder import to_stderr

    recorded = parts.profile(run)
    for warning in recorded.warnings:
        to_stderr(warning)
    text = to_toml(recorded.profile)
    if out is None:
        print(text, end="")
        return 0
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror or error}") from error
    names = ", ".join(recorded.profile.tasks)
    print(f"{out}: {names}; next: rollart simulate CONFIG.toml simulate.profile={out}")
    return 0


def _tasks(parts: Parts, name: str | None) -> int:
    from rollart.checks import nearest
    from rollart.report import described

    known = parts.describe()
    names = [task.name for task in known]
    if name is not None and name not in names:
        raise ConfigError(f"{name!r} is not a task{nearest(name, names)}")
    print("\n\n".join(described(task) for task in known if name in (None, task.name)))
    return 0


def _simulate(parts: Parts, options: argparse.Namespace, words: list[str]) -> int:
    print(parts.simulate(_load(words), options.trace, options.json))
    return 0


def _plan(parts: Parts, options: argparse.Namespace, words: list[str]) -> int:
    from rollart.plan_command import order

    config = _load(words)
    text, interrupted = parts.plan(config, order(options, words[0]))
    print(text)
    return 130 if interrupted else 0


def _serve(parts: Parts, options: argparse.Namespace) -> int:
    from rollart.data.serverless.server import Settings

    given = {name: value for name, value in vars(options).items() if name not in ("command", "function")}
    return parts.serve(Settings(target=options.function, **given))


def _package(parts: Parts, options: argparse.Namespace) -> int:
    from rollart.data.serverless.package import Order

    print(parts.package(Order(options.function, options.target, options.out, options.options, options.force)))
    return 0
