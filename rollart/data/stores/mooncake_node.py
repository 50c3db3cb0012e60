"""The processes of a Mooncake store, as a program.

    python -m rollart.data.stores.mooncake_node master HOST:PORT METRICS_PORT     the master, which knows what is where
    python -m rollart.data.stores.mooncake_node node HOST:PORT BYTES              memory for the store of that master
    python -m rollart.data.stores.mooncake_node clear HOST:PORT PREFIX            remove the keys of a run

It says `ready` on its standard output when it is. With `--guarded` it ends when its standard input does, so that no
process outlives who started it; otherwise with SIGTERM or Ctrl-C.
What this file leaves out: mooncake's own options, which `mooncake_master` takes when it is called by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from rollart.data.stores.mooncake_shelf import connect
from rollart.errors import RollartError, WeightsError, to_install

BUFFER_BYTES = 16 << 20
LEASE_MS = 60_000
"""Longest that the transfer of one bucket may take. We remove by force, which no lease holds up."""
PARENT_DEATH_SIGNAL = 1
LOOK_S = 0.05
START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 3.0


def main() -> int:
    """Parse the words and do it."""
    words = _parser().parse_args()
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    if words.guarded:
        threading.Thread(target=_watch_input, args=(done,), daemon=True).start()
    try:
        return int(words.run(words, done))
    except RollartError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    master = commands.add_parser("master")
    master.add_argument("address")
    master.add_argument("metrics_port", type=int)
    master.add_argument("--client-ttl-s", type=int, default=10)
    master.set_defaults(run=_master)
    node = commands.add_parser("node")
    node.add_argument("address")
    node.add_argument("bytes", type=int)
    node.add_argument("--protocol", default="tcp")
    node.set_defaults(run=_node)
    clear = commands.add_parser("clear")
    clear.add_argument("address")
    clear.add_argument("prefix")
    clear.set_defaults(run=_clear)
    for command in (master, node, clear):
        command.add_argument("--guarded", action="store_true", help="end with the standard input")
    return parser


def _watch_input(done: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    done.set()


def _watch_process(process: subprocess.Popen[bytes], done: threading.Event) -> None:
    process.wait()
    done.set()


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _master(words: argparse.Namespace, done: threading.Event) -> int:
    """Run the program that comes with mooncake."""
    host, _, port = words.address.rpartition(":")
    process = subprocess.Popen(
        [
            str(_program()),
            f"-rpc_address={host}",
            f"-rpc_port={port}",
            f"-metrics_host={host}",
            f"-metrics_port={words.metrics_port}",
            f"-client_ttl={words.client_ttl_s}",
            f"-default_kv_lease_ttl={LEASE_MS}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=_die_with_parent,
    )
    try:
        _wait_until_open(host, int(port), process, done)
        _ready()
        threading.Thread(target=_watch_process, args=(process, done), daemon=True).start()
        done.wait()
        return process.poll() or 0
    finally:
        process.kill()
        process.wait()


def _program() -> Path:
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (program := Path(folder) / "mooncake_master").is_file():
            return program
    raise WeightsError(f"there is no mooncake_master here; {to_install('mooncake')}")


def _die_with_parent() -> None:
    """In the child, on Linux: be killed when whoever started it is."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _wait_until_open(host: str, port: int, process: subprocess.Popen[bytes], done: threading.Event) -> None:
    for _ in range(int(START_TIMEOUT_S / LOOK_S)):
        if process.poll() is not None:
            raise WeightsError(f"mooncake_master ended at once with code {process.returncode}")
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            if done.wait(LOOK_S):
                raise WeightsError("told to end before it began") from None
    raise WeightsError(f"mooncake_master does not listen on {host}:{port} after {START_TIMEOUT_S:g} s")


def _node(words: argparse.Namespace, done: threading.Event) -> int:
    """Own memory until told to end; what lies in it is then gone."""
    client = connect(words.address, words.protocol, words.bytes, BUFFER_BYTES)
    _ready()
    done.wait()
    leaving = threading.Thread(target=client.close, daemon=True)
    leaving.start()
    leaving.join(CLOSE_TIMEOUT_S)
    os._exit(0)  # without a master to take leave of, it would go on trying


def _clear(words: argparse.Namespace, _done: threading.Event) -> int:
    client = connect(words.address, "tcp", 0, BUFFER_BYTES)
    code = client.remove_by_regex(f"^{re.escape(words.prefix)}/", True)
    client.close()
    if code < 0:
        raise WeightsError(f"keys of {words.prefix} cannot be removed at {words.address} (Mooncake code {code})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
