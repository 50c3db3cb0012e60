"""A small server that speaks the wire format of OpenAI's chat completions, and answers as it is told."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]


def completion(content: Any, **message: Any) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return 200, {}, json.dumps(body).encode()


def verdict(score: Any) -> Reply:
    return completion(json.dumps({"reasoning": "because", "score": score}))


def refusal(status: int, message: str = "", **headers: str) -> Reply:
    return status, headers, json.dumps({"error": {"message": message}}).encode()


class Endpoint:
    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


@contextlib.contextmanager
def serving(*replies: Reply | Callable[[dict[str, Any]], Reply]) -> Iterator[Endpoint]:
    """The replies in order; the last one again and again."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            endpoint.bodies.append(body)
            endpoint.keys.append(self.headers["authorization"])
            reply = left.pop(0) if len(left) > 1 else left[0]
            status, headers, data = reply(body) if callable(reply) else reply
            if self.path != "/v1/chat/completions":
                status = 404
            self.send_response(status)
            for name, value in {
                **headers,
                "content-type": "application/json",
                "content-length": str(len(data)),
            }.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # who asked may have given up
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # so that closing waits for them, and no connection is left open
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()
