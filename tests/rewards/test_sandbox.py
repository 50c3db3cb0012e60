"""The sandbox against programs that mean harm. Each test says what would be seen outside."""

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rollart.errors import ConfigError
from rollart.rewards.sandbox import Sandbox

ROOT = Path(__file__).parents[2]


def why_not() -> str:
    try:
        Sandbox()
    except ConfigError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap works")
box = Sandbox if why_not() else Sandbox(timeout_s=20.0)


def test_a_program_runs_with_its_input_and_its_status():
    outcome = box.run("import sys\nprint(sys.stdin.read()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)", b"abc")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (3, b"cba\n", b"oh\n")
    assert not outcome.timed_out
    assert not outcome.too_long


def test_it_is_the_same_python_without_what_this_environment_installed():
    outcome = box.run("import sys\nprint(sys.version, sys.prefix, sep='|')\nimport msgspec")
    assert outcome.stdout.decode() == f"{sys.version}|{sys.base_prefix}\n"
    assert b"No module named 'msgspec'" in outcome.stderr or sys.prefix == sys.base_prefix


def test_a_run_keeps_nothing_for_the_next():
    assert box.run("open('/tmp/a', 'w').write('x')").status == 0
    assert box.run("import os; print(os.listdir('/tmp'))").stdout == b"[]\n"


def test_a_fork_bomb_ends_and_is_small():
    program = "import os, time\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    time.sleep(0.01)"
    started = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from rollart.rewards.sandbox import Sandbox\nSandbox(timeout_s=3.0, processes=8).run({program!r})",
        ],
        cwd=ROOT,
    )
    most, me = 0, psutil.Process(started.pid)
    while started.poll() is None:
        try:
            most = max(most, len(me.children(recursive=True)))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    assert started.wait() == 0
    assert 3 <= most <= 8 + 3, "bwrap, its init, and the limit"


def test_memory_beyond_the_limit_is_refused():
    outcome = box.run("x = bytearray(2 << 30)")
    assert outcome.status == 1
    assert b"MemoryError" in outcome.stderr


def test_an_endless_loop_is_ended():
    outcome = Sandbox(timeout_s=1.0).run("print('begun', flush=True)\nwhile True: pass")
    assert (outcome.status, outcome.stdout, outcome.timed_out) == (None, b"begun\n", True)


def test_a_sleeping_program_that_closed_its_output_is_ended():
    outcome = Sandbox(timeout_s=1.0).run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)")
    assert (outcome.status, outcome.timed_out) == (None, True)


@pytest.mark.parametrize("output", ["closes", "keeps"])
def test_a_daemon_ends_with_its_program(output):
    name = uuid.uuid4().hex
    program = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if {output == "closes"}:
            for descriptor in range(3): os.close(descriptor)
        os.execv("/usr/bin/sleep", [{name!r}, "600"])
    os._exit(0)
os.wait()
print("gone")
"""
    outcome = Sandbox(timeout_s=10.0).run(program)
    assert (outcome.status, outcome.stdout) == (0, b"gone\n"), outcome
    left = [each for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or [])]
    assert not psutil.wait_procs(left, timeout=10)[1]


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = box.run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert outcome.status == 1
    assert b"Error" in outcome.stderr


def test_files_and_environment_of_the_user_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.environ["ROLLART_TEST_SECRET"] = "secret"
    try:
        paths = [str(secret), str(ROOT), "/etc/passwd"]
        look = f"import os; print([os.path.exists(path) for path in {paths}], sorted(os.environ))"
        outcome = box.run(look)
    finally:
        del os.environ["ROLLART_TEST_SECRET"]
    names = "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD']"
    assert outcome.stdout.decode() == f"[False, False, False] {names}\n"
    assert box.run("import os\nfor p in os.listdir('/proc'):\n  if p.isdigit(): print(p)").stdout.split() == [
        b"1",
        b"2",
    ]


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/dev/x", "/etc/x", f"{sys.base_prefix}/x", "/program.py", "/proc/sys/kernel/hostname"]
)
def test_nothing_can_be_written_outside_its_own_folder(path):
    outcome = box.run(f"open({path!r}, 'w').write('x')")
    assert outcome.status == 1
    assert (
        b"Read-only file system" in outcome.stderr
        or b"Permission denied" in outcome.stderr
        or b"No such" in outcome.stderr
    )
    assert not Path(f"{sys.base_prefix}/x").exists()
    assert not Path("/usr/x").exists()


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_its_own_folder_is_small(folder):
    program = f"for i in range(9):\n  with open(f'{folder}/{{i}}', 'wb') as file: file.write(bytes(60 << 20))"
    assert b"No space left" in box.run(program).stderr
    assert b"File too large" in box.run(f"open('{folder}/a', 'wb').write(bytes(70 << 20))").stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_cut(stream):
    outcome = box.run(f"import sys\nwhile True: sys.{stream}.write('x' * 100000)")
    assert outcome.too_long
    assert outcome.status is None
    assert len(getattr(outcome, stream)) == box.output_bytes


def test_no_way_back_to_root():
    outcome = box.run("import os\nprint(os.getuid() == 0)\nos.setuid(0)")
    assert outcome.status == 1 or os.geteuid() != 0
    assert b"False" in outcome.stdout or os.geteuid() != 0
    assert (
        box.run("print([l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')])").stdout
        == b"['0000000000000000']\n"
    )


def test_without_bubblewrap_nothing_runs():
    program = "from rollart.rewards.sandbox import Sandbox\nSandbox()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PATH": ""}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "apt install bubblewrap" in done.stderr.splitlines()[-1]


def test_a_sandbox_that_cannot_start_says_why(tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permissions to create a namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    program = "from rollart.rewards.sandbox import Sandbox\nSandbox()"
    path = f"{tmp_path}{os.pathsep}{os.path.dirname(shutil.which('sh') or '')}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "no permissions to create a namespace; are user namespaces allowed?" in done.stderr.splitlines()[-1]


def test_limits_in_which_nothing_runs_are_refused():
    with pytest.raises(ConfigError, match="does not work in a sandbox of these limits"):
        Sandbox(output_bytes=2)
