"""A worker handle in this process: arguments and results take the way over msgpack, as between processes."""

import typing

import msgspec

from rollart.errors import RollartError, WorkerDied, by_name


class FakeHandle:
    def __init__(self, name, worker):
        self.name = name
        self.worker = worker
        self.calls = []
        self.dead = False

    async def call(self, method, *args, returns=typing.Any):
        self.calls.append((method, *args))
        if self.dead:
            raise WorkerDied(f"{self.name}: exit status 9")
        bound = getattr(self.worker, method)
        kinds = [kind for key, kind in typing.get_type_hints(bound).items() if key != "return"]
        moved = [_move(value, kind) for value, kind in zip(args, kinds, strict=True)]
        try:
            return _move(await bound(*moved), returns)
        except RollartError as error:
            raise by_name(type(error).__name__, str(error)) from None

    async def wait_dead(self):
        return "never"

    async def stop(self):
        self.dead = True


def _move(value, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
