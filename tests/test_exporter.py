import urllib.request

import pytest

from rollart.data.serverless.meter import Usage
from rollart.errors import ConfigError
from rollart.exporter import Exporter, parse, serving

pytest.importorskip("prometheus_client")


def _scraped(exporter):
    with urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=5) as response:
        return response.read().decode()


def test_a_scrape_gets_the_figures_of_now():
    values, usage = (
        {"reward/frozenlake": 0.5},
        Usage(calls=3, busy_s=1.5, failures={"timeout": 2}, processes=2, cost=0.25),
    )
    usage.answered(0.003)
    usage.answered(100.0)
    exporter = Exporter("127.0.0.1:0", lambda: values, lambda: {"sorting": usage})
    try:
        text = _scraped(exporter)
        for line in (
            'rollart_metric{name="reward/frozenlake"} 0.5',
            'rollart_function_calls_total{task="sorting"} 3.0',
            'rollart_function_busy_seconds_total{task="sorting"} 1.5',
            'rollart_function_failures_total{cause="timeout",task="sorting"} 2.0',
            'rollart_function_processes{task="sorting"} 2.0',
            'rollart_function_cost_total{task="sorting"} 0.25',
            'rollart_function_latency_seconds_bucket{le="0.005",task="sorting"} 1.0',
            'rollart_function_latency_seconds_bucket{le="+Inf",task="sorting"} 2.0',
        ):
            assert line in text.splitlines(), line
        values["reward/frozenlake"] = 0.75
        assert 'rollart_metric{name="reward/frozenlake"} 0.75' in _scraped(exporter)
    finally:
        exporter.close()


def test_two_runs_cannot_take_one_address_and_the_second_is_told():
    first = Exporter("127.0.0.1:0", dict, dict)
    try:
        with pytest.raises(
            ConfigError, match=r"log.prometheus: 127\.0\.0\.1:\d+ cannot be opened: Address already in use"
        ):
            Exporter(first.address, dict, dict)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("9464", "is not host:port"),
        ("127.0.0.1:http", "is not host:port"),
        ("127.0.0.1:99999", "is not host:port"),
        ("0.0.0.0:9464", "0.0.0.0 can be reached from elsewhere"),
        ("example.org:9464", "example.org can be reached from elsewhere"),
    ],
)
def test_an_address_that_cannot_be_is_told(address, reason):
    with pytest.raises(ConfigError, match=f"log.prometheus: .*{reason}"):
        parse(address)


def test_addresses_of_this_machine():
    assert parse("127.0.0.1:1") == ("127.0.0.1", 1)
    assert parse("localhost:2") == ("localhost", 2)
    assert parse("[::1]:3") == ("::1", 3)
    assert parse(":0") == ("127.0.0.1", 0)


def test_without_an_address_nothing_is_served():
    said = []
    with serving("", dict, dict, said.append):
        assert not said
    with serving("127.0.0.1:0", dict, dict, said.append):
        assert said[0].startswith("figures for Prometheus at http://127.0.0.1:")
