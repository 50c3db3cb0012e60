"""`rollart serve-reward` as a process of its own, as users start it."""

import contextlib
import os
import subprocess
import sys

MODULE = "tests.data.serverless.user_functions"


@contextlib.contextmanager
def serving(name, *words, env=None, log=subprocess.DEVNULL, module=MODULE, port=0):
    """A server of one function: its process, with `url`. It has ended afterwards."""
    target = name if ":" in name else f"{module}:{name}"
    process = subprocess.Popen(
        [sys.executable, "-m", "rollart", "serve-reward", target, "--port", str(port), *words],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        process.url = process.stdout.readline().strip()
        assert process.url.startswith("http://"), "it did not start"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Servers:
    """Servers that several tests share, one per function and its options."""

    def __init__(self):
        self._open = contextlib.ExitStack()
        self._urls = {}

    def url(self, name, *words):
        if (name, words) not in self._urls:
            self._urls[name, words] = self._open.enter_context(serving(name, *words)).url
        return self._urls[name, words]

    def close(self):
        self._urls.clear()
        self._open.close()
