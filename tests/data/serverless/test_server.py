"""A function as an HTTP service: every route, every limit, and how it ends."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import msgspec
import psutil
import pytest

pytest.importorskip("uvicorn", reason="serve-reward needs the extra: pip install -e '.[serve]'")

from rollart.data.serverless.replies import Call, Refused, Replies
from rollart.data.serverless.server import Settings, _listener, serve
from rollart.errors import ConfigError, EndpointError
from tests.data.serverless.served import MODULE, serving

JSON = {"Content-Type": "application/json"}
TOKEN = "a-secret-of-this-test"
LAMBDA = "/2015-03-31/functions/{}/invocations"


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """One server of `echo` with a small body limit and a token."""
    log = tmp_path_factory.mktemp("echo") / "log"
    words = ["--max-body-bytes", "2000", "--token-env", "REWARD_TOKEN", "--idle-s", "0.5"]
    with open(log, "w") as file, serving("echo", *words, env={"REWARD_TOKEN": TOKEN}, log=file) as server:
        yield server
    assert TOKEN not in log.read_text()
    assert "a secret argument" not in log.read_text()


@pytest.fixture
def client(echo):
    with httpx2.Client(base_url=echo.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        yield client


def plain(server):
    return httpx2.Client(base_url=server.url, trust_env=False, timeout=30)


def problem(response):
    return response.status_code, response.json()["error"]["message"]


# --------------------------------------------------------------------------------------------------------------- calls
@pytest.mark.parametrize("path", ["/", "/invoke"])
def test_a_call_is_answered_with_what_it_took(client, path):
    response = client.post(path, json={"args": ["grüße a secret argument"], "kwargs": {"more": [1]}})
    assert response.json() == {"result": {"value": "grüße a secret argument", "more": [1]}}
    assert float(response.headers["X-Rollart-Run-S"]) > 0
    assert float(response.headers["X-Rollart-Queue-S"]) >= 0
    assert response.headers["X-Rollart-Cold"] in "01"


@pytest.mark.parametrize("sent", ["json", "msgpack"])
@pytest.mark.parametrize("accepted", ["json", "msgpack", None, "*/*"])
def test_the_reply_comes_in_the_media_asked_for_or_that_of_the_request(client, sent, accepted):
    codecs = {"json": msgspec.json, "msgpack": msgspec.msgpack}
    headers = {"Content-Type": f"application/{sent}"}
    headers["Accept"] = f"application/{accepted}" if accepted in codecs else "*/*"
    response = client.post("/", content=codecs[sent].encode({"args": [[1.5, None]]}), headers=headers)
    media = accepted if accepted in codecs else sent
    assert response.headers["Content-Type"] == f"application/{media}"
    assert codecs[media].decode(response.content) == {"result": [1.5, None]}


def test_a_batch_is_answered_member_by_member(client):
    answers = client.post("/", json={"batch": [{"args": [1]}, {"kwargs": {}}]}).json()["batch"]
    assert answers[0] == {"result": 1}
    assert answers[1]["error"]["type"] == "TypeError"


@pytest.mark.parametrize(
    ("content", "headers", "status", "reason"),
    [
        (b"{", JSON, 400, "the body cannot be read"),
        (b"", JSON, 400, "the body cannot be read"),
        (b"[" * 1999, JSON, 400, "the body cannot be read"),
        (b'"\xff"', JSON, 400, "the body cannot be read"),
        (b"5", JSON, 400, "an event is"),
        (b'{"arguments": []}', JSON, 400, "an event is"),
        (b'{"args": {}}', JSON, 400, '"args" is a list'),
        (b'{"args": [%d]}' % 2**70, JSON, 400, "ints"),
        (b"\x81\xa4args\x91\xc1", {"Content-Type": "application/msgpack"}, 400, "the body cannot be read"),
        (b"args=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type is"),
        (b"{}", {}, 415, "Content-Type is"),
        (b"{}", JSON | {"Content-Encoding": "gzip"}, 415, "compressed"),
        (b"{}", JSON | {"Accept": "text/html"}, 406, "application/json or"),
        (b"{}", JSON | {"X-Rollart-Timeout": "soon"}, 400, "X-Rollart-Timeout"),
        (b"{}", JSON | {"X-Rollart-Timeout": "nan"}, 400, "X-Rollart-Timeout"),
        (b"{}", JSON | {"X-Rollart-Timeout": "-1"}, 400, "X-Rollart-Timeout"),
        (b"{}", JSON | {"Idempotency-Key": "k" * 513}, 400, "at most 512"),
        (b"x" * 2001, JSON, 413, "at most 2,000 bytes here (--max-body-bytes)"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_cause(client, content, headers, status, reason):
    said = problem(client.post("/", content=content, headers=headers))
    assert said[0] == status
    assert reason in said[1]


def test_no_more_of_a_body_is_read_than_the_limit_though_its_length_is_not_said(client):
    sent = []

    def endless():
        while True:
            sent.append(1)
            yield b"x" * 1000

    with contextlib.suppress(httpx2.HTTPError):  # the connection may be closed while this side goes on writing
        assert client.post("/", content=endless(), headers=JSON).status_code == 413
    assert len(sent) < 100_000
    assert client.post("/", json={"args": [1]}).json() == {"result": 1}


@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", "Bearer \xff"])
def test_without_its_token_a_call_is_not_served(echo, given):
    headers = JSON | ({"Authorization": given.encode("latin-1")} if given else {})
    with plain(echo) as client:
        response = client.post("/", content=b"{}", headers=headers)
    assert problem(response) == (401, "send the token: Authorization: Bearer TOKEN")
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 405), ("POST", "/health", 405), ("GET", "/x", 404)]
)
def test_an_unknown_route_says_where_the_routes_are(client, method, path, status):
    assert problem(client.request(method, path)) == (status, ANY_ROUTE[status])


ANY_ROUTE = {
    404: "Not Found; the routes are in /openapi.json",
    405: "Method Not Allowed; the routes are in /openapi.json",
}


def test_probes_need_no_token_and_it_goes_back_to_no_process(echo, client):
    client.post("/", json={"args": [1]})
    with plain(echo) as anybody:
        assert anybody.get("/ready").json() == {"ready": True}
        assert anybody.get("/health").json()["processes"] >= 1
        until(lambda: anybody.get("/health").json() == {"alive": True, "processes": 0, "calls": 0})
        assert anybody.get("/ready").json() == {"ready": True}
    assert client.post("/", json={"args": [1]}).headers["X-Rollart-Cold"] == "1"


def test_it_describes_itself(echo):
    with plain(echo) as anybody:
        described = anybody.get("/openapi.json").json()
    assert described["info"]["title"] == f"{MODULE}:echo"
    assert described["paths"]["/"]["post"]["security"] == [{"token": []}]
    assert {"200", "400", "401", "413", "415", "429", "503"} <= described["paths"]["/"]["post"]["responses"].keys()


# -------------------------------------------------------------------------------------------------------------- Lambda
@pytest.mark.parametrize("name", ["echo", "echo:$LATEST", "arn:aws:lambda:eu-central-1:123456789012:function:echo"])
def test_lambdas_clients_call_it(client, name):
    response = client.post(LAMBDA.format(name), content=b'{"args": [1]}')
    assert (response.status_code, response.json()) == (200, {"result": 1})
    assert response.headers["X-Amz-Executed-Version"] == "$LATEST"
    assert "X-Amz-Function-Error" not in response.headers


def test_a_payload_that_is_absent_is_an_empty_event_and_a_dry_run_calls_nothing(client):
    assert client.post(LAMBDA.format("echo")).json()["error"]["type"] == "TypeError"
    dry = client.post(LAMBDA.format("echo"), headers={"X-Amz-Invocation-Type": "DryRun"})
    assert (dry.status_code, dry.content) == (204, b"")


@pytest.mark.parametrize(
    ("name", "content", "headers", "status", "kind"),
    [
        ("other", b"{}", {}, 404, "ResourceNotFoundException"),
        ("echo", b"{", {}, 400, "InvalidRequestContentException"),
        ("echo", b'{"args": [%d]}' % 2**70, {}, 400, "InvalidRequestContentException"),
        ("echo", b"x" * 2001, {}, 413, "RequestTooLargeException"),
        ("echo", b"{}", {"Content-Type": "text/plain"}, 415, "UnsupportedMediaTypeException"),
        ("echo", b"{}", {"X-Amz-Invocation-Type": "Event"}, 422, "InvalidParameterValueException"),
        ("echo", b"{}", {"Authorization": "AWS4-HMAC-SHA256 x"}, 401, "UnrecognizedClientException"),
    ],
)
def test_lambdas_clients_are_refused_in_their_words(client, name, content, headers, status, kind):
    response = client.post(LAMBDA.format(name), content=content, headers=headers)
    assert (response.status_code, response.headers["x-amzn-ErrorType"]) == (status, kind)
    assert response.json()["message"]


@pytest.mark.parametrize(
    ("name", "args", "kind"), [("slow", [60], "Sandbox.Timedout"), ("dying", [], "Runtime.ExitError")]
)
def test_lambdas_clients_hear_that_the_function_was_not_served(name, args, kind):
    with serving(name, "--timeout-s", "0.3") as server, plain(server) as client:
        response = client.post(LAMBDA.format(name), json={"args": args})
        assert (response.status_code, response.headers["X-Amz-Function-Error"]) == (200, "Unhandled")
        assert response.json().keys() == {"errorMessage", "errorType", "stackTrace"}
        assert response.json()["errorType"] == kind
        # The same fault over the plain route: a time limit is an answer, a dead process is another try.
        again = client.post("/", json={"args": args})
        if name == "slow":
            assert (again.status_code, again.json()["error"]["type"]) == (200, "FunctionTimeout")
        else:
            assert problem(again)[0] == 503
            assert "signal SIGKILL" in problem(again)[1]


# -------------------------------------------------------------------------------------------------- limits, keys, time
def test_a_caller_lowers_the_time_limit_and_never_raises_it():
    with serving("slow", "--timeout-s", "1") as server, plain(server) as client:
        for asked, limit in (("0.2", "0.2"), ("1000", "1")):
            fault = client.post("/", json={"args": [60]}, headers={"X-Rollart-Timeout": asked}).json()["error"]
            assert fault["type"] == "FunctionTimeout"
            assert f"within {limit} s" in fault["message"]


def test_a_call_beyond_places_and_queue_comes_again():
    async def main(url):
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            asked = [client.post("/", json={"args": [0.05]}) for _ in range(30)]
            responses = await asyncio.gather(*asked)
            codes = [response.status_code for response in responses]
            assert codes.count(200) >= 9, "one runs, eight wait"
            assert set(codes) == {200, 429}
            assert {response.headers.get("Retry-After") for response in responses} == {None, "1"}

    with serving("slow", "--max-concurrency", "1") as server:
        asyncio.run(main(server.url))


def test_a_key_is_executed_once_whoever_stops_waiting(tmp_path):
    path = str(tmp_path / "marks")
    event, key = {"args": [path, 1.0]}, {"Idempotency-Key": "k"}
    with serving("mark") as server, plain(server) as client:
        with pytest.raises(httpx2.ReadTimeout):
            client.post("/", json=event, headers=key, timeout=0.6)
        assert client.post("/", json=event, headers=key).json() == {"result": 1.0}
        assert client.post(LAMBDA.format("mark"), json=event, headers=key).json() == {"result": 1.0}
        assert len((tmp_path / "marks").read_text().splitlines()) == 1
        assert problem(client.post("/", json={"args": [path, 2.0]}, headers=key))[0] == 409


def test_a_call_without_a_key_ends_with_its_connection():
    with serving("slow", "--max-concurrency", "1") as server, plain(server) as client:
        with pytest.raises(httpx2.ReadTimeout):
            client.post("/", json={"args": [600]}, timeout=0.3)
        assert client.post("/", json={"args": [0]}).json() == {"result": 0}


def test_a_call_that_was_not_answered_is_executed_again_under_its_key(tmp_path):
    event, key = {"args": [str(tmp_path / "tried")]}, {"Idempotency-Key": "k"}
    with serving("dying") as server, plain(server) as client:
        assert client.post("/", json=event, headers=key).status_code == 503
        assert client.post("/", json=event, headers=key).json() == {"result": "second try"}


def test_keys_are_kept_within_bounds_and_a_failure_is_forgotten():
    async def main():
        ran = []

        async def execute(call):
            ran.append(call.key)
            if call.key == "bad":
                raise EndpointError("gone")
            return msgspec.convert({"body": b"x" * (10 << 20)}, type=Answer)

        replies = Replies(execute)
        for key in [*map(str, range(8)), "0", "7", "bad", "bad"]:
            await asyncio.wait([replies.task(Call(b"", key, 1.0))])
        assert ran == [*map(str, range(8)), "0", "bad", "bad"], "seven of ten mebibytes do not fit into 64"
        with pytest.raises(Refused, match="another event"):
            replies.task(Call(b"other", "7", 1.0))

    from rollart.data.serverless.endpoint import Answer

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- the start, the end
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([f"{MODULE}:no_such_function"], "has no 'no_such_function'"),
        (["no.such.module:f"], "no module 'no.such.module'"),
        ([f"{MODULE}:echo", "--options", '{"factor": 2}'], "takes no options"),
        ([f"{MODULE}:echo", "--options", "[1]"], "a JSON object is needed"),
        ([f"{MODULE}:echo", "--host", "0.0.0.0"], "without a token they could all call"),
        ([f"{MODULE}:echo", "--host", "nowhere.invalid"], "no such address"),
        ([f"{MODULE}:echo", "--token-env", "NOT_SET_HERE"], "NOT_SET_HERE, which is not set"),
        ([f"{MODULE}:echo", "--port", "99999"], "is not a port"),
        ([f"{MODULE}:echo", "--timeout-s", "0"], "is not a number of seconds above 0"),
        ([f"{MODULE}:echo", "--max-concurrency", "-1"], "is not a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_told_before_serving(capsys, words, reason):
    from rollart.cli import main

    assert main(["serve-reward", "--port", "0", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert reason in said.err


def test_a_port_that_is_taken_names_the_way_out(echo):
    port = int(echo.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=r"cannot be listened to: .*--port 0 takes a free one"):
        serve(Settings(target=f"{MODULE}:echo", port=port))


def test_a_class_gets_its_options_and_a_function_may_be_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Times:\n    def __init__(self, by): self.by = by\n    def __call__(self, x): return x * self.by\n"
    )
    with serving(f"{file}:Times", "--options", '{"by": 3}') as server, plain(server) as client:
        assert client.post("/", json={"args": [2]}).json() == {"result": 6}


def test_it_is_not_ready_while_the_function_cannot_be_loaded_and_ready_again_afterwards(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(): return 1\n")
    with serving(f"{file}:f", "--idle-s", "0.2") as server, plain(server) as client:
        until(lambda: client.get("/health").json()["processes"] == 0)
        file.rename(tmp_path / "away.py")
        assert problem(client.post("/", json={}))[0] == 500
        assert client.get("/ready").status_code == 503
        assert "is no Python file" in client.get("/ready").json()["why"]
        (tmp_path / "away.py").rename(file)
        assert client.get("/ready").json() == {"ready": True}


def test_a_signal_lets_running_calls_finish_and_turns_new_ones_away(tmp_path):
    path = tmp_path / "marks"
    with serving("mark", "--max-concurrency", "2") as server, plain(server) as client:
        answers = []
        call = threading.Thread(target=lambda: answers.append(client.post("/", json={"args": [str(path), 1.5]}).json()))
        call.start()
        until(path.exists)
        server.send_signal(signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json() == {"ready": False, "why": "draining"}
        assert client.get("/health").json()["alive"] is True
        assert problem(client.post("/", json={"args": [str(path)]}))[0] == 503
        assert server.wait(20) == 0
        call.join()
    assert answers == [{"result": 1.0}]
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("ended_by", ["two signals", "kill -9"])
def test_it_leaves_no_process_behind_in_the_middle_of_a_call(tmp_path, ended_by):
    path = tmp_path / "pids"
    with serving("with_children") as server, plain(server) as client:
        call = threading.Thread(target=lambda: asked(client, str(path)))
        call.start()
        until(lambda: path.exists() and len(path.read_text().split()) == 2)
        started = psutil.Process(server.pid).children(recursive=True)
        assert len(started) >= 2
        if ended_by == "kill -9":
            server.kill()
            server.wait()
        else:
            server.send_signal(signal.SIGTERM)
            until(lambda: client.get("/ready").status_code == 503)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 128 + signal.SIGTERM
        call.join()
        assert not psutil.wait_procs(started, timeout=10)[1]


def asked(client, path):
    with contextlib.suppress(httpx2.HTTPError):  # its server goes away
        client.post("/", json={"args": [path]})


def test_a_log_that_nobody_reads_disturbs_nothing():
    process = subprocess.Popen(
        [sys.executable, "-m", "rollart", "serve-reward", f"{MODULE}:echo", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().strip()
        process.stderr.close()
        process.stdout.close()
        with httpx2.Client(base_url=url, trust_env=False) as client:
            for number in range(3):
                assert client.post("/", json={"args": [number]}).json() == {"result": number}
    finally:
        process.terminate()
        assert process.wait(20) == 0


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_small_answers_do_not_wait_for_more():
    """asyncio turns Nagle's algorithm off for sockets that name their protocol; else each call costs 40 ms more."""
    with _listener(Settings(target="module:function", port=0), "") as listener:
        assert listener.proto == socket.IPPROTO_TCP
