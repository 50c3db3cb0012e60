"""Environments and rewards that misbehave, as a user might write them. `gate` lets the hung ones go."""

import queue
import threading

gate = threading.Event()
closed: queue.SimpleQueue[str] = queue.SimpleQueue()


class Naughty:
    """Does what `action` says; `reset` does what `on_reset` says; `close` says its label."""

    def __init__(self, on_reset: str = "", label: str = ""):
        self.on_reset = on_reset
        self.label = label
        self.resets = 0

    def reset(self, seed=None):
        self.resets += 1
        if self.on_reset:
            self._do(self.on_reset)
        return f"seed {seed}", {"resets": self.resets}

    def step(self, action):
        answer = self._do(action)
        return answer if action == "none" else (action, 1.0, action == "end", False, {})

    def close(self):
        if self.label:
            closed.put(self.label)

    def _do(self, what):
        if what == "raise":
            raise KeyError("no such page")
        if what == "exit":
            raise SystemExit(1)
        if what == "hang":
            gate.wait()


def reward(request):
    answer = request.responses[0]
    if answer == "hang":
        gate.wait()
    if answer == "raise":
        raise KeyError("no such key")
    return {"none": None, "nan": float("nan"), "text": "1"}.get(answer, len(request.prompts) / 2)
