"""The arguments of every command, with the help that teaches them.

Invariant: nothing heavy is imported, so that --help answers at once; a mistake is a ConfigError of one line. What this
file leaves out: what the commands do (`cli.py`).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rollart import __version__
from rollart.errors import ConfigError
from rollart.plan_command import add_options

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EXAMPLES = {
    "train": (
        ("rollart train configs/default.toml", "with a live view in a terminal"),
        ("rollart train configs/default.toml steps=50 schedule=sync_plus train.learning_rate=3e-4", ""),
        ("rollart train --resume runs/latest steps=400", "go on, and further than first asked for"),
    ),
    "check": (
        ("rollart check configs/default.toml", "is it valid, and what follows from it?"),
        ("rollart check configs/default.toml alpha=2 rollout.extra_groups=auto", ""),
    ),
    "pools": (
        ("rollart pools configs/default.toml", "which devices there are and which run holds them"),
        ("rollart pools configs/default.toml --repair node-3", "its devices work again"),
    ),
    "eval": (
        ("rollart eval runs/latest --episodes 200", "the newest checkpoint"),
        ("rollart eval runs/latest --checkpoint 50", "an older one"),
    ),
    "tasks": (
        ("rollart tasks", "all of them"),
        ("rollart tasks frozenlake", "what it does and its options"),
    ),
    "simulate": (
        ("rollart simulate configs/paper.toml schedule=areal", "in minutes"),
        ("rollart simulate configs/paper.toml --json result.json --trace trace.json", ""),
    ),
    "plan": (
        ("rollart plan configs/paper.toml --trials 60", "at the same cost"),
        ("rollart plan configs/paper.toml --budget 200 --objective cost", ""),
        ("rollart plan configs/paper.toml --devices H800=64,H20=64 --out best.toml", ""),
    ),
    "profile": (
        ("rollart profile runs/latest --out mine.toml", ""),
        ("rollart simulate CONFIG.toml simulate.profile=mine.toml", "those tasks on the pools of CONFIG, as H800"),
    ),
    "serve-reward": (
        ("rollart serve-reward rewards:score", "on http://127.0.0.1:8000"),
        ("rollart serve-reward rewards.py:Score --options '{\"factor\": 2}' --port 0", "a class, any free port"),
    ),
    "package-reward": (
        ("rollart package-reward rewards:score --target lambda", "into score-lambda"),
        ("rollart package-reward rewards:score --target docker --out image --force", ""),
    ),
}
"""Command -> what to type, and what that does where it does not say so itself."""
OVERRIDES = """\
Any key of the config can be set on the command line as key=value or section.key=value; values are TOML.
A task's own options are tasks.NAME.options.KEY=value. ROLLART_TRACEBACK=1 shows where an error comes from.
"""
TAKING_CONFIGS = ("train", "check", "pools", "simulate", "plan")

PROFILING = """\
Reads what a run recorded, finished or not, and writes its workload as TOML: per task the turns, tokens, seconds and
failures, and the trainer's seconds per token. `reasons` tell from how many samples each number comes.

Only sampled trajectories show how numbers spread: log.trajectories_every = 1 and log.trajectories = 64 keep many."""
SERVING = """\
Prints its URL when calls are served, then one line per call on stderr. Ctrl-C or SIGTERM: running calls finish, new
ones are turned away; a second one ends at once. A call that hangs is cut, its process ended. Without calls it holds no
process of the function.

  curl -H 'Content-Type: application/json' -d '{"args": [1, 2]}' http://127.0.0.1:8000/

/health, /ready and /openapi.json say the rest. A run calls it with reward = "http://127.0.0.1:8000" in the task's
table, [tasks.NAME]; the event is then {"args": [TRAJECTORY]}."""
SIMULATING = """\
Runs the control plane of `rollart train` under a virtual clock: engines, environments, rewards, trainer are models of
the devices in [pools] and of the workload that [simulate] names. Prints step time and where it goes, throughput,
utilisation, waits, staleness, lost work, cost, and the share of what is possible. The same config gives the same.

  --trace opens in https://ui.perfetto.dev; docs/simulate.md says what the models are"""
PLANNING = """\
Simulates other pool mixes, splits of training and rollout, engines, affinities and redundancies: first in short, then
the best for as many steps as the config says. Prints the best plans, what they change and why they gain, and writes the
best one as a config for `rollart simulate` and `rollart train`. By default a plan costs at most what the pools of the
config cost an hour, and its alpha is at most the config's own. Ctrl-C or SIGTERM ends the search: the best so far is
printed and written, and the exit code is 130.
docs/plan.md says more."""
PACKAGING = """\
Writes a folder with the function's own modules, its handler, requirements.txt, the platform's manifest and a README.txt
that says what was assumed, then prints the next command. Nothing is sent anywhere.

  knative, docker   a container that answers HTTP: functions-framework
  lambda            AWS Lambda through SAM
  fc                Alibaba Function Compute through Serverless Devs"""


LEAST_MEMORY_BYTES = 64 << 20


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would end the program."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # argparse would hide a broken pipe.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and that of each command by name."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="rollart",
        description="Reinforcement learning of LLM agents on many tasks at once, each stage on the hardware it suits.",
        epilog=f"{_examples(*(each[0] for each in EXAMPLES.values()))}\n{OVERRIDES}",
        formatter_class=shape,
    )
    parser.add_argument("--version", action="version", version=f"rollart {__version__}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands: dict[str, Parser] = {}

    def command(name: str, summary: str, details: str) -> Parser:
        more = f"\n{OVERRIDES}" if name in TAKING_CONFIGS else ""
        commands[name] = group.add_parser(
            name,
            help=summary,
            description=f"{summary}.\n\n{details}",
            epilog=_examples(*EXAMPLES[name]) + more,
            formatter_class=shape,
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


def _examples(*examples: tuple[str, str]) -> str:
    """To end a help text with: what to type, and beside it what that does."""
    width = max(len(words) for words, said in examples if said)
    lines = [f"  {words:<{width}}   {said}".rstrip() for words, said in examples]
    return "\n".join(["examples:", *lines, ""])


def _add_serving(serve: Parser) -> None:
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


def _add_packaging(package: Parser) -> None:
    add = package.add_argument
    _add_function(package)
    add("--target", choices=("knative", "lambda", "fc", "docker"), required=True, help="where it is to run")
    add("--out", metavar="FOLDER", type=Path, help="default: FUNCTION-TARGET, such as score-lambda")
    add("--force", action="store_true", help="write into a folder that is not empty")


def _add_function(parser: Parser) -> None:
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
