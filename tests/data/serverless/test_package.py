"""A packaged function runs where it is deployed: each package under its platform's own runtime, without rollart."""

import contextlib
import http.server
import importlib.util
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import yaml

from rollart.cli import main
from rollart.config import parse
from rollart.data.serverless.modules import closure, located
from rollart.data.serverless.package import TARGETS, Order, package
from rollart.data.serverless.registry import check_urls
from rollart.errors import ConfigError

EVENTS = [
    ({"args": ["grüße"]}, {"result": {"says": "grüße!", "length": 5}}),
    (
        {"batch": [{"args": ["a"]}, {"args": ["b"]}]},
        {"batch": [{"result": {"says": f"{x}!", "length": 1}} for x in "ab"]},
    ),
]
SITE = [entry for entry in sys.path if "site-packages" in entry]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's folder: a function that imports a neighbour, a package and something installed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "wordy" / "deep").mkdir(parents=True)
    (folder / "scores.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "import json, not_installed_anywhere_else\n"
        "from wordy.deep import signs\n"
        "if TYPE_CHECKING:\n    import nothing_at_run_time\n"
        "def score(text): return {'says': signs.shout(text), 'length': len(text)}\n"
        "class Times:\n    def __init__(self, by): self.by = by\n    def __call__(self, x): return x * self.by\n"
        "def fails(): raise ValueError('as it does')\n"
    )
    (folder / "not_installed_anywhere_else.py").write_text("")
    (folder / "unused.py").write_text("")
    (folder / "wordy" / "__init__.py").write_text("")
    (folder / "wordy" / "deep" / "__init__.py").write_text("")
    (folder / "wordy" / "deep" / "signs.py").write_text(
        "from ..ends import END\ndef shout(text):\n    import msgspec\n    return text + END\n"
    )
    (folder / "wordy" / "ends.py").write_text("END = '!'\n")
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wordy", "rollart_file_scores")]:
        del sys.modules[name]


def packed(project, tmp_path, target, name="score", **options):
    """The folder of a package."""
    out = tmp_path / f"{name}-{target}"
    assert "next: " in package(Order(f"{project / 'scores.py'}:{name}", target, out, options))
    return out


def isolated():
    """Where a package runs there is no rollart: only what is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(SITE), "PYTHONDONTWRITEBYTECODE": "1"}


# ------------------------------------------------------------------------------------------------------ what is written
@pytest.mark.parametrize("target", TARGETS)
def test_it_holds_the_modules_that_are_imported_and_names_what_is_installed(project, tmp_path, target):
    out = packed(project, tmp_path, target)
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    modules = {"scores.py", "not_installed_anywhere_else.py", "wordy/__init__.py", "wordy/ends.py"}
    assert modules | {"wordy/deep/__init__.py", "wordy/deep/signs.py", "rollart_handler.py", "README.txt"} <= names
    assert "unused.py" not in names
    requirements = (out / "requirements.txt").read_text().split()
    assert [line for line in requirements if line.startswith("msgspec==")]
    assert [line for line in requirements if line.startswith("functions-framework")] == (
        ["functions-framework>=3.10,<4"] if target in ("docker", "knative") else []
    )
    readme = (out / "README.txt").read_text()
    assert "wordy/ends.py" in readme
    assert "$" not in readme.replace("`kubectl get ksvc $name`", "")


def test_the_manifests_name_the_function_its_entry_and_scale_to_zero(project, tmp_path):
    service = yaml.safe_load((packed(project, tmp_path, "knative") / "service.yaml").read_text())
    assert (service["kind"], service["metadata"]["name"]) == ("Service", "score")
    annotations = service["spec"]["template"]["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/min-scale"] == "0"
    sam = yaml.safe_load((packed(project, tmp_path, "lambda") / "template.yaml").read_text())
    function = sam["Resources"]["Reward"]["Properties"]
    assert (function["FunctionName"], function["Handler"]) == ("score", "lambda_function.lambda_handler")
    fc = yaml.safe_load((packed(project, tmp_path, "fc") / "s.yaml").read_text())
    properties = fc["resources"]["reward"]["props"]
    assert (properties["functionName"], properties["handler"]) == ("score", "index.handler")


def test_the_command_in_the_users_folder_says_what_is_next(project, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rollart", "package-reward", "scores:score", "--target", "lambda"],
        cwd=shutil.copytree(project, tmp_path / "mine"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *SITE])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "next: cd score-lambda && sam build && sam deploy --guided"
    assert (tmp_path / "mine" / "score-lambda" / "wordy" / "ends.py").read_text() == "END = '!'\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no.such.module:f"], "no module 'no.such.module' among the installed packages"),
        (["tests.data.serverless.user_functions:ecko"], "has no 'ecko'; did you mean 'echo'?"),
        (["tests.data.serverless.user_functions:loaded_at"], "which cannot be called"),
        (["tests.data.serverless.user_functions"], "is not of the form module:name"),
        (["msgspec._core:convert"], "has no Python source"),
        (
            ["tests.data.serverless.user_functions:echo", "--options", '{"a": 1}'],
            "is a plain function, which takes none",
        ),
        (
            ["tests.data.serverless.user_functions:Scaled", "--options", '{"facto": 1}'],
            "--options.facto: unknown option",
        ),
        (["json:dumps"], "json:dumps is Python's own"),
        (["math:sqrt"], "math:sqrt is Python's own"),
    ],
)
def test_what_cannot_be_packaged_is_told(capsys, tmp_path, words, reason):
    assert main(["package-reward", *words, "--target", "lambda", "--out", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_copied_is_no_requirement_and_what_it_imports_is_one(project, tmp_path):
    (tmp_path / "plain.py").write_text(
        "from rollart.types import RewardRequest\ndef score(request: RewardRequest): return len(request.responses)\n"
    )
    out = tmp_path / "out"
    package(Order(f"{tmp_path / 'plain.py'}:score", "lambda", out))
    assert [line.partition("==")[0] for line in (out / "requirements.txt").read_text().split()] == ["msgspec"]
    event = {"args": [{"task": "t", "seed": 0, "prompts": ["p"], "responses": ["r"]}]}
    code = f"import lambda_function\nprint(lambda_function.lambda_handler({event!r}, None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=out, env=isolated(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "{'result': 1}\n", done.stderr


@pytest.mark.parametrize("name", ["rule:sorting", "math:Math", "code:Code"])
def test_no_reward_of_ours_requires_rollart(name, tmp_path):
    package(Order(f"rollart.rewards.{name}", "docker", tmp_path / "out"))
    requirements = (tmp_path / "out" / "requirements.txt").read_text()
    assert "rollart" not in requirements
    assert "msgspec==" in requirements


@pytest.mark.parametrize("target", ["lambda", "fc", "docker"])
def test_the_line_that_the_readme_gives_is_a_valid_config(project, tmp_path, target):
    readme = (packed(project, tmp_path, target) / "README.txt").read_text()
    line = readme.partition("under [tasks.NAME]:  ")[2].partition("\n")[0]
    line = line.replace("ACCOUNT_ID", "1234").replace("REGION", "eu-west-1")
    check_urls(parse(f"[tasks.sorting]\n{line}"))


def test_nothing_is_overwritten_unless_it_is_asked_for(capsys, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.txt").write_text("mine")
    words = ["package-reward", "tests.data.serverless.user_functions:echo", "--target", "fc", "--out", str(out)]
    assert main(words) == 2
    assert "this folder is not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["README.txt"]
    assert (out / "README.txt").read_text() == "mine"
    assert main([*words, "--force"]) == 0
    assert (out / "README.txt").read_text() != "mine"


def test_a_module_with_the_name_of_a_file_of_the_package_is_refused(tmp_path):
    (tmp_path / "main.py").write_text("def f(): return 1\n")
    with pytest.raises(ConfigError, match=r"main\.py is a file of the package itself; rename yours"):
        package(Order(f"{tmp_path / 'main.py'}:f", "docker", tmp_path / "out"))


def test_a_module_that_nobody_here_knows_is_said_to_be_missing(tmp_path):
    (tmp_path / "careful.py").write_text("def f():\n    import quite_unknown.inside\n    return 1\n")
    target = f"{tmp_path / 'careful.py'}:f"
    assert closure(located(target, {})).missing == {"quite_unknown"}
    assert "not found here, so not in requirements.txt: quite_unknown" in package(Order(target, "fc", tmp_path / "out"))
    assert "quite_unknown" in (tmp_path / "out" / "README.txt").read_text()


# ------------------------------------------------------------------------------------------------ under their runtimes
def test_lambdas_runtime_serves_the_package(project, tmp_path):
    pytest.importorskip("awslambdaric", reason="the runtime of AWS Lambda: pip install awslambdaric")
    out = packed(project, tmp_path, "lambda")
    with (
        runtime_api() as (address, invoke),
        running(out, "awslambdaric", "lambda_function.lambda_handler", api=address),
    ):
        for event, reply in EVENTS:
            assert invoke(event) == ("response", reply)


def test_a_class_with_options_and_a_function_that_raises_answer_at_lambda(project, tmp_path):
    pytest.importorskip("awslambdaric", reason="the runtime of AWS Lambda: pip install awslambdaric")
    times = packed(project, tmp_path, "lambda", "Times", by=2.5)
    with (
        runtime_api() as (address, invoke),
        running(times, "awslambdaric", "lambda_function.lambda_handler", api=address),
    ):
        assert invoke({"args": [2]}) == ("response", {"result": 5.0})
    fails = packed(project, tmp_path, "lambda", "fails")
    with (
        runtime_api() as (address, invoke),
        running(fails, "awslambdaric", "lambda_function.lambda_handler", api=address),
    ):
        kind, reply = invoke({})
        assert (kind, reply["error"]["type"], reply["error"]["message"]) == ("response", "ValueError", "as it does")


@pytest.mark.parametrize("target", ["docker", "knative"])
def test_the_containers_command_serves_the_package(project, tmp_path, target):
    pytest.importorskip("functions_framework", reason="the runtime of the container: pip install functions-framework")
    out = packed(project, tmp_path, target)
    command = json.loads((out / "Dockerfile").read_text().rpartition("CMD ")[2])
    assert command[0] == "functions-framework"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        running(out, "functions_framework", *command[1:], "--host", "127.0.0.1", port=str(port)),
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        until_it_listens(port)
        for event, reply in EVENTS:
            assert client.post("/", json=event).json() == reply
        bad = client.post("/", content=b"{", headers={"Content-Type": "application/json"})
        assert (bad.status_code, bad.json()["error"]["type"]) == (400, "BadRequest")
        assert client.get("/").status_code == 405


def test_function_computes_entry_answers_bytes(project, tmp_path):
    out = packed(project, tmp_path, "fc")
    program = "import sys, index; sys.stdout.write(index.handler(sys.stdin.buffer.read(), None))"
    for event, reply in EVENTS:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=out,
            env=isolated(),
            input=json.dumps(event).encode(),
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout) == reply


def test_a_reward_of_a_trajectory_takes_rollarts_types_along_and_nothing_heavy(tmp_path):
    out = tmp_path / "out"
    package(Order("tests.data.serverless.user_functions:score", "fc", out))
    assert sorted(path.name for path in (out / "rollart").rglob("*.py")) == ["__init__.py", "types.py"]
    assert "torch" not in (out / "requirements.txt").read_text()
    request = {"task": "t", "seed": 1, "prompts": ["q"], "responses": ["four"], "env_reward": 0.0, "info": {}}
    program = "import sys, index, rollart; print(rollart.__file__); print(index.handler(sys.stdin.buffer.read(), None))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=out,
        env={**isolated(), "PYTHONPATH": os.pathsep.join([str(out), *SITE])},
        input=json.dumps({"args": [request]}).encode(),
        capture_output=True,
        check=True,
    )
    where, reply = done.stdout.decode().splitlines()
    assert Path(where) == out / "rollart" / "__init__.py"
    assert json.loads(reply) == {"result": 4.0}


@contextlib.contextmanager
def running(folder, module, *words, api="", port="8080"):
    """A platform's runtime on a package, in a process that has ended afterwards."""
    environment = isolated() | {"AWS_LAMBDA_RUNTIME_API": api, "PORT": port, "WORKERS": "1", "THREADS": "1"}
    environment |= {"AWS_LAMBDA_FUNCTION_NAME": "f", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512", "LAMBDA_TASK_ROOT": "."}
    assert importlib.util.find_spec(module)
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words], cwd=folder, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@contextlib.contextmanager
def runtime_api():
    """Lambda's runtime interface (2018-06-01) for one runtime: its address, and a way to invoke what polls it."""
    asked, answered = queue.Queue(), queue.Queue()

    class Api(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if (event := asked.get()) is None:
                return
            self.send_response(200)
            self.send_header("Lambda-Runtime-Aws-Request-Id", "1")
            self.send_header("Lambda-Runtime-Deadline-Ms", str(int(time.time() * 1000) + 60_000))
            self.send_header("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:here:0:function:f")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(event)))
            self.end_headers()
            self.wfile.write(event)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answered.put((self.path.rpartition("/")[2], json.loads(body)))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    def invoke(event):
        asked.put(json.dumps(event).encode())
        return answered.get(timeout=30)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", invoke
        finally:
            asked.put(None)
            server.shutdown()
            thread.join()


def until_it_listens(port, seconds=30.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "it never listened"
            time.sleep(0.05)
