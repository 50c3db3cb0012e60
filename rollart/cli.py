"""The command line: `rollart train | check | pools | eval | tasks`.

Invariant: nothing heavy is imported before the arguments and the config are known to be good, and every error of ours
is one line on stderr with an exit code: 2 for what the user wrote, 1 for the rest, 130 for an interrupt. What this file
leaves out: the work, which is reached through `Parts`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollart import __version__
from rollart.errors import ConfigError, RollartError, RunFolderError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from rollart.config import Config
    from rollart.resource.placement import Placement
    from rollart.resource.pool import PoolRow
    from rollart.tasks.registry import TaskInfo
    from rollart.types import TaskSpec

EXAMPLES = """\
examples:
  rollart train configs/default.toml                       train, with a live view in a terminal
  rollart train configs/default.toml steps=50 schedule=sync_plus train.learning_rate=3e-4
  rollart train --resume runs/latest                       go on from the newest checkpoint
  rollart train --resume runs/latest steps=400             ... and further than first asked for
  rollart check configs/default.toml alpha=2               is it valid, and what follows from it?
  rollart pools configs/default.toml                       which devices there are and which run holds them
  rollart eval runs/latest --episodes 200                  greedy, on held-out seeds
  rollart tasks frozenlake                                 what a task does and its options

Any key of the config can be set on the command line as key=value or section.key=value; values are TOML.
A task's own options are tasks.NAME.options.KEY=value. ROLLART_TRACEBACK=1 shows where an error comes from.
"""


class Parts:
    """What the commands call, imported when it is called; tests hand in another."""

    def train(self, config: Config, resume: Path | None) -> int:
        """Train to the end; the exit code."""
        from rollart import pipeline

        return pipeline.train(config, resume=resume)

    def evaluate(self, run: Path, episodes: int | None, checkpoint: int | None) -> int:
        """Evaluate a checkpoint (default: the newest) of a run folder; the exit code."""
        from rollart import pipeline

        return pipeline.evaluate(run, episodes=episodes, checkpoint=checkpoint)

    def specs(self, config: Config) -> dict[str, TaskSpec]:
        """The tasks of a config, with rewards that can be called. Raises ConfigError."""
        from rollart.data.serverless.registry import check_urls
        from rollart.tasks import registry

        found = registry.specs(config)
        check_urls(config)
        return found

    def describe(self) -> list[TaskInfo]:
        """All tasks that can be named in a config."""
        from rollart.tasks import registry

        return registry.describe()

    def place(self, config: Config) -> Placement | None:
        """Where the workers of a config go; None where only the cluster can tell. Raises ConfigError."""
        from rollart.resource.devices import this_node
        from rollart.resource.placement import place

        return None if config.runtime == "ray" else place(config, [this_node()])

    def pools(self, config: Config, repair: str) -> list[PoolRow]:
        """The pools of a config as they are now, other runs' bindings included. Raises RollartError."""
        from rollart import workers

        return workers.view(config, repair)


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
    parser, commands = _parsers()
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
    if options.command == "train":
        return _train(parts, words, options.resume)
    if options.command == "check":
        return _check(parts, words)
    if options.command == "pools":
        return _pools(parts, words, options.repair)
    if options.command == "eval":
        return _evaluate(parts, options)
    return _tasks(parts, options.name)


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # argparse would hide a broken pipe.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="rollart",
        description="Reinforcement learning of LLM agents on many tasks at once, each stage on the hardware it suits.",
        epilog=EXAMPLES,
        formatter_class=shape,
    )
    parser.add_argument("--version", action="version", version=f"rollart {__version__}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands: dict[str, _Parser] = {}

    def command(name: str, summary: str, details: str) -> _Parser:
        commands[name] = group.add_parser(
            name, help=summary, description=f"{summary}.\n\n{details}", epilog=EXAMPLES, formatter_class=shape
        )
        return commands[name]

    config_words = {"nargs": "*", "metavar": "CONFIG.toml key=value", "help": "the config, then overrides"}
    train = command("train", "train, writing a run folder", "Ctrl-C stops with a checkpoint; a second one at once.")
    train.add_argument("words", **config_words)  # type: ignore[arg-type]
    train.add_argument("--resume", metavar="RUN", type=Path, help="a run folder; its config serves if none is named")
    check = command("check", "validate a config without running it", "Prints the resolved config and what follows.")
    check.add_argument("words", **config_words)  # type: ignore[arg-type]
    pools = command("pools", "show the pools of a config and who holds them", "Reads the store of [resources].")
    pools.add_argument("words", **config_words)  # type: ignore[arg-type]
    pools.add_argument("--repair", metavar="NODE", default="", help="first say that the devices of a node work again")
    evaluate = command("eval", "evaluate a run on held-out seeds", "Greedy; prints reward and success per task.")
    evaluate.add_argument("run", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    evaluate.add_argument("--episodes", metavar="N", type=_count, help="episodes per task (default: the config's)")
    evaluate.add_argument("--checkpoint", metavar="STEP", type=_count, help="its step (default: the newest)")
    tasks = command("tasks", "list tasks and their options", "Your own: env = 'module:Class' in [tasks.NAME].")
    tasks.add_argument("name", metavar="NAME", nargs="?", help="only this task")
    return parser, commands


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _load(words: list[str], resume: Path | None = None) -> Config:
    from rollart.config import load
    from rollart.run_folder import resolved_config

    if words and "=" not in words[0]:
        return load(words[0], words[1:])
    if resume is None:
        raise ConfigError("no config; name a file such as configs/default.toml")
    return resolved_config(resume, words)


def _train(parts: Parts, words: list[str], resume: Path | None) -> int:
    config = _load(words, resume)
    parts.specs(config)
    parts.place(config)
    return parts.train(config, resume)


def _check(parts: Parts, words: list[str]) -> int:
    from rollart.config import to_toml
    from rollart.report import derived

    config = _load(words)
    specs, placement = parts.specs(config), parts.place(config)
    print(to_toml(config))
    print(derived(config, specs, placement))
    return 0


def _pools(parts: Parts, words: list[str], repair: str) -> int:
    from rollart.report import pools

    config = _load(words)
    parts.specs(config)
    print(pools(parts.pools(config, repair)))
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


def _tasks(parts: Parts, name: str | None) -> int:
    from rollart.checks import nearest
    from rollart.report import described

    known = parts.describe()
    names = [task.name for task in known]
    if name is not None and name not in names:
        raise ConfigError(f"{name!r} is not a task{nearest(name, names)}")
    print("\n\n".join(described(task) for task in known if name in (None, task.name)))
    return 0
