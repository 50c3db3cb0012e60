"""A place where functions run: what each scheme of a URL provides, and how a call there can fail.

    EndpointError      it could not be reached or died under the call: worth another try
    EndpointBusy       it turned the call away for being one too many: worth another try, and fewer at once
    FunctionError      the function itself raised, or what it returned cannot be used: the same again would do the same
    FunctionTimeout    it did not answer in time

Invariant: `invoke` ends with an answer or one of these, and leaves nothing running when it is cancelled or out of
time, as far as the place can be told to stop. What this file leaves out: tries, limits and fallbacks (`function.py`).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct, field

Media = Literal["json", "msgpack"]
REPLY_BYTES = 64 << 20
"""No reply is larger: a function that goes wrong must not fill the memory of its caller."""


class Answer(Struct):
    """The encoded reply of one call. Seconds: waiting for capacity, and running as far as the endpoint can tell."""

    body: bytes
    cold: bool = False
    queue_s: float = 0.0
    run_s: float | None = None
    """None: the endpoint does not say; the caller takes what passed."""
    billed_s: float | None = None


class Capacity(Struct):
    """What an endpoint holds in this moment and has held so far; zero where somebody else's machines do the work."""

    processes: int = 0
    allocated_s: float = 0.0
    """Seconds of all processes together, from their start to their end."""


class EndpointOptions(Struct, frozen=True, kw_only=True):
    """What an endpoint may need to know beyond its URL."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments, where the function is a class."""
    max_concurrency: int = 0
    """0: what suits the endpoint."""
    idle_s: float = 30.0
    """After this time without a call a process ends."""
    memory_bytes: int = 0
    """Limit on the data of one process; 0: none."""
    media: Media = "json"
    """How events travel over HTTP; every function reads JSON."""
    token_env: str = ""
    """Environment variable that holds the endpoint's bearer token."""


class Endpoint(Protocol):
    """One function at one place. Used from one event loop."""

    media: Media
    """How events and replies are encoded."""

    @property
    def concurrency(self) -> int:
        """Calls that may be there at once."""
        ...

    remote: bool
    """Whether it can be away: behind a network, on machines of somebody else."""

    async def invoke(self, body: bytes, key: str, timeout_s: float) -> Answer:
        """Call the function with an encoded event. `key`: equal for every delivery of one call.

        Raises EndpointError, FunctionError (FunctionTimeout).
        """
        ...

    def capacity(self) -> Capacity:
        """What it holds and has held."""
        ...

    async def close(self) -> None:
        """End everything that it started."""
        ...
