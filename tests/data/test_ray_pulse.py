"""Whether a server lives is heard at once when it dies, and one that comes back in time has not been away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollart.data.ray_pulse import RECONNECT, Home, patience_s, silence


class Server:
    """Takes connections at a port of its own, or a socket, and says nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._port = 0
        self._connected: list[asyncio.StreamWriter] = []
        self.heard = asyncio.Event()

    async def start(self) -> None:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._take, self._path)
        else:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected.append(writer)
        self.heard.set()

    def die(self) -> None:
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close what is connected, and go on listening."""
        self.heard.clear()
        for writer in self._connected:
            writer.close()
        self._connected.clear()

    @property
    def address(self) -> str:
        return f"unix:{self._path}" if self._path is not None else f"127.0.0.1:{self._port}"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_silence_is_heard_when_the_server_dies_and_not_when_it_hangs_up(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        server = Server(tmp_path / "s" if kind == "unix" else None)
        await server.start()
        waiting = asyncio.create_task(silence(server.address))
        await server.heard.wait()
        server.hang_up()
        await server.heard.wait()
        assert not waiting.done()
        server.die()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(main())


def test_a_server_that_comes_back_in_time_has_not_been_away() -> None:
    async def main() -> None:
        server = Server()
        await server.start()
        waiting = asyncio.create_task(silence(server.address, patience_s=60.0))
        await server.heard.wait()
        server.die()
        await asyncio.sleep(0.2)
        await server.start()
        await server.heard.wait()
        assert not waiting.done()
        server.die()
        waiting.cancel()
        await asyncio.wait_for(silence(server.address, patience_s=0.3), 20)

    asyncio.run(main())


def test_what_has_died_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()

    async def main() -> tuple[str, str]:
        home = Home.of({"RayletSocketName": f"{tmp_path}/sockets/raylet"}, "127.0.0.1:1")
        return await home.raylet_lost(), await home.gcs_lost(0.0)

    raylet, gcs = asyncio.run(main())
    assert "raylet on this machine has died" in raylet
    assert f"{tmp_path}/logs/raylet.out" in raylet
    assert "the GCS at 127.0.0.1:1 is gone" in gcs
    assert f"{tmp_path}/logs/gcs_server.out" in gcs


@pytest.mark.parametrize(("value", "seconds"), [(None, 20.0), ("12", 4.0), ("soon", 20.0)])
def test_patience_is_a_third_of_rays_own(value: str | None, seconds: float) -> None:
    assert patience_s({} if value is None else {RECONNECT: value}) == seconds
