"""The figures of a run for Prometheus, on an address of this machine.

    rollart_metric{name="reward/frozenlake"}      the numbers of metrics.jsonl, as of the last step
    rollart_function_*{task="sorting"}            what reward functions took and cost (`serverless.meter.Usage`)

Invariant: it only reads, on a thread of its own; without `log.prometheus` nothing listens. It binds to loopback alone,
as it asks nobody for a token. What this file leaves out: how figures come about.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollart.data.serverless.meter import BOUNDS_S, Usage
from rollart.errors import ConfigError, to_install

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

COUNTED = {
    "calls": "Calls asked for",
    "results": "Calls answered with a value",
    "tries": "Deliveries to the endpoint",
    "hedged": "Second deliveries of stragglers",
    "fallbacks": "Calls that the fallback answered",
    "repeated": "Calls answered from a known key",
    "cold_starts": "Processes or instances that a call waited for",
    "allocated_s": "Seconds that capacity existed",
    "busy_s": "Seconds that functions ran",
    "billed_s": "Seconds that are billed",
    "queue_s": "Seconds of waiting for a place",
    "cost": "By the prices in the config",
}


@contextlib.contextmanager
def serving(
    address: str,
    metrics: Callable[[], Mapping[str, float]],
    functions: Callable[[], Mapping[str, Usage]],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Serve while the block runs; with an empty address nothing is served. Raises ConfigError."""
    if not address:
        yield
        return
    exporter = Exporter(address, metrics, functions)
    say(f"figures for Prometheus at http://{exporter.address}/metrics")
    try:
        yield
    finally:
        exporter.close()


class Exporter:
    """Serves from construction until `close`. `address`: host:port, 0 for any free port. Raises ConfigError."""

    def __init__(
        self, address: str, metrics: Callable[[], Mapping[str, float]], functions: Callable[[], Mapping[str, Usage]]
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(f"log.prometheus needs one more package; {to_install('prometheus')}") from error
        host, port = parse(address)
        self._metrics, self._functions = metrics, functions
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"log.prometheus: {address} cannot be opened: {error.strerror or error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        values = GaugeMetricFamily("rollart_metric", "Figures of the last step", labels=["name"])
        for name, value in dict(self._metrics()).items():
            values.add_metric([name], value)
        yield values
        functions = dict(self._functions())
        for key, what in COUNTED.items():
            counter = CounterMetricFamily(f"rollart_function_{_unit(key)}", what, labels=["task"])
            for task, usage in functions.items():
                counter.add_metric([task], getattr(usage, key))
            yield counter
        failures = CounterMetricFamily("rollart_function_failures", "Failures by cause", labels=["task", "cause"])
        processes = GaugeMetricFamily("rollart_function_processes", "Processes alive", labels=["task"])
        latency = HistogramMetricFamily("rollart_function_latency_seconds", "Of answered deliveries", labels=["task"])
        for task, usage in functions.items():
            for cause, count in usage.failures.items():
                failures.add_metric([task, cause], count)
            processes.add_metric([task], usage.processes)
            latency.add_metric([task], _buckets(usage), sum_value=usage.busy_s + usage.queue_s)
        yield from (failures, processes, latency)

    def close(self) -> None:
        """Nobody listens any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def parse(address: str) -> tuple[str, int]:
    """Host and port of this machine. Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"log.prometheus: {address!r} is not host:port, such as 127.0.0.1:9464")
    host = host.strip("[]") or "127.0.0.1"
    if not _is_loopback(host):
        raise ConfigError(
            f"log.prometheus: {host} can be reached from elsewhere, and figures are given to whoever asks; "
            "take 127.0.0.1 and let a proxy that asks for a token forward to it"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unit(key: str) -> str:
    return f"{key[:-2]}_seconds" if key.endswith("_s") else key


def _buckets(usage: Usage) -> list[Any]:
    total, buckets = 0, []
    for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], usage.latency, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
