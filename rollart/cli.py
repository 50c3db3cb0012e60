"""The command line: `rollart train | check | pools | eval | tasks | profile | simulate | plan | serve-reward |
package-reward`.

Invariant: nothing heavy is imported before the arguments and the config are known to be good, and every error of ours
is one line on stderr with an exit code: 2 for what the user wrote, 1 for the rest, 130 for an interrupt. What this file
leaves out: the work, which is reached through `Parts`.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rollart import __version__
from rollart.errors import ConfigError, RollartError, RunFolderError
from rollart.plan_command import add_options

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from rollart.config import Config
    from rollart.data.serverless.package import Order
    from rollart.data.serverless.server import Settings
    from rollart.plan_command import Order as PlanOrder
    from rollart.profiling import Recorded
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
  rollart train --resume runs/latest --checkpoint 50       ... from an older one; what came after it is forgotten
  rollart check configs/default.toml alpha=2               is it valid, and what follows from it?
  rollart pools configs/default.toml                       which devices there are and which run holds them
  rollart eval runs/latest --episodes 200                  greedy, on held-out seeds
  rollart tasks frozenlake                                 what a task does and its options
  rollart simulate configs/paper.toml schedule=areal       the same control plane on a modelled cluster, in minutes
  rollart plan configs/paper.toml --trials 60              what would be faster at the same cost, and why
  rollart profile runs/latest --out mine.toml              a recorded run as a workload for `rollart simulate`
  rollart serve-reward rewards:score                       a function as an HTTP service
  rollart package-reward rewards:score --target lambda     what is needed to deploy it elsewhere

Any key of the config can be set on the command line as key=value or section.key=value; values are TOML.
A task's own options are tasks.NAME.options.KEY=value. ROLLART_TRACEBACK=1 shows where an error comes from.
"""

PROFILING = """\
Reads what a run recorded, finished or not, and writes its workload as TOML: per task the turns, tokens, seconds and
failures, and the trainer's seconds per token. `reasons` tell from how many samples each number comes.

  rollart profile runs/latest --out mine.toml
  rollart simulate configs/default.toml simulate.profile=mine.toml

Only sampled trajectories show how numbers spread: log.trajectories_every = 1 and log.trajectories = 64 keep many."""
SERVING = """\
Prints its URL when calls are served, then one line per call on stderr. Ctrl-C or SIGTERM: running calls finish, new
ones are turned away; a second one ends at once. A call that hangs is cut, its process ended. Without calls it holds no
process of the function.

  curl -H 'Content-Type: application/json' -d '{"args": [1, 2]}' http://127.0.0.1:8000/

/health, /ready and /openapi.json say the rest; serverless_url = "http://127.0.0.1:8000" in a config calls it."""
SIMULATING = """\
Runs the control plane of `rollart train` under a virtual clock: engines, environments, rewards and the trainer are models
of the devices in [pools] and of the workload in [simulate] profile. Prints step time and where it goes, throughput,
utilisation, waits, staleness, lost work, cost, and the share of what is possible. The same config gives the same result.
--trace opens in https://ui.perfetto.dev or chrome://tracing. docs/simulate.md says what the models are."""
PLANNING = """\
Simulates other pool mixes, splits of training and rollout, engines, affinities and redundancies: first in short, then
the best for as many steps as the config says. Prints the best plans, what they change and why they gain, and writes the
best one as a config for `rollart simulate` and `rollart train`. By default a plan costs at most what the pools of the
config cost an hour, and its alpha is at most the config's own. Ctrl-C ends the search with the best so far.
docs/plan.md says more."""
PACKAGING = """\
Writes a folder with the function's own modules, its handler, requirements.txt, the platform's manifest and a README.txt
that says what was assumed, then prints the next command. Nothing is sent anywhere.

  knative, docker   a container that answers HTTP: functions-framework
  lambda            AWS Lambda through SAM
  fc                Alibaba Function Compute through Serverless Devs"""


LEAST_MEMORY_BYTES = 64 << 20


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
        """The tasks of a config, with rewards that can be called. Raises ConfigError."""
        from rollart.data.serverless.registry import check_urls
        from rollart.exporter import parse
        from rollart.tasks import registry

        found = registry.specs(config)
        check_urls(config)
        if config.log.prometheus:
            parse(config.log.prometheus)
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
        return _train(parts, words, options.resume, options.checkpoint)
    if options.command == "check":
        return _check(parts, words)
    if options.command == "pools":
        return _pools(parts, words, options.repair)
    if options.command == "eval":
        return _evaluate(parts, options)
    if options.command == "profile":
        return _profile(parts, options.run, options.out)
    if options.command == "tasks":
        return _tasks(parts, options.name)
    if options.command == "simulate":
        print(parts.simulate(_load(words), options.trace, options.json))
        return 0
    if options.command == "plan":
        return _plan(parts, options, words)
    return _serve(parts, options) if options.command == "serve-reward" else _package(parts, options)


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
    train.add_argument(
        "--checkpoint", metavar="STEP", type=_count, help="go on from this step; later ones are forgotten"
    )
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
    simulate = command("simulate", "run a config on a modelled cluster, in virtual time", SIMULATING)
    simulate.add_argument("words", **config_words)  # type: ignore[arg-type]
    simulate.add_argument("--trace", metavar="FILE", type=Path, help="write a timeline for the Perfetto trace viewer")
    simulate.add_argument("--json", metavar="FILE", type=Path, help="write the result as JSON")
    add_options(command("plan", "search for a better plan of pools and policies", PLANNING), config_words)
    profile = command("profile", "write the workload that a run recorded", PROFILING)
    profile.add_argument("run", metavar="RUN", type=Path, help="a run folder, such as runs/latest")
    profile.add_argument("--out", metavar="FILE", type=Path, help="default: standard output")
    _add_serving(command("serve-reward", "serve a function over HTTP", SERVING))
    _add_packaging(command("package-reward", "write what is needed to deploy a function", PACKAGING))
    return parser, commands


def _add_serving(serve: _Parser) -> None:
    add = serve.add_argument
    _add_function(serve)
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1; any other needs --token-env")
    add("--port", metavar="N", type=_port, default=8000, help="default: 8000; 0 takes a free one")
    add("--token-env", metavar="NAME", default="", help="the environment variable that holds the callers' token")
    add("--max-concurrency", metavar="N", type=_count, default=0, help="processes at most (default: one per core)")
    add("--timeout-s", metavar="S", type=_seconds, default=60.0, help="of one call, then it is cut (default: 60)")
    add("--max-body-bytes", metavar="N", type=_count, default=6_000_000, help="of one call (default: 6000000)")
    add("--idle-s", metavar="S", type=_seconds, default=30.0, help="then a process without calls ends (default: 30)")
    add("--memory-bytes", metavar="N", type=_memory, default=0, help="of one process (default: no limit)")


def _add_packaging(package: _Parser) -> None:
    add = package.add_argument
    _add_function(package)
    add("--target", choices=("knative", "lambda", "fc", "docker"), required=True, help="where it is to run")
    add("--out", metavar="FOLDER", type=Path, help="default: FUNCTION-TARGET, such as score-lambda")
    add("--force", action="store_true", help="write into a folder that is not empty")


def _add_function(parser: _Parser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION, or a class to be called")
    parser.add_argument("--options", metavar="JSON", type=_object, default={}, help="of a class: its arguments")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _memory(text: str) -> int:
    if _count(text) < LEAST_MEMORY_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text} is too little for a Python process; take at least {LEAST_MEMORY_BYTES}"
        )
    return int(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('a JSON object is needed, such as {"factor": 2}')
    return value


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
