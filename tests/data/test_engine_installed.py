"""What this machine has for an engine is looked at without importing it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rollart.config import parse
from rollart.data.engines.installed import arguments_of, check_arguments, check_engine, missing, vllm_folder
from rollart.errors import ConfigError
from tests.data.serverless.invoke_engine import environ

SOURCE = """
import what_is_not_here

@config
class Other:
    never: bool = False

class EngineArgs:
    \"\"\"Arguments.\"\"\"
    model: str = ModelConfig.model
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    block_size: int | None = None
    runner: RunnerOption = (
        "auto"
    )
    def method(self) -> None:
        local: int = 3
"""
SERVERS = "engine='http'\nengine_options={kind='vllm', urls=['http://a:1'], token_env='NOT_SET'}\n[tasks.sorting]"


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    return arguments_of(tmp_path)


def test_arguments_are_read_from_the_source(arguments: dict[str, str], tmp_path: Path) -> None:
    assert list(arguments) == ["model", "gpu_memory_utilization", "block_size", "runner"]
    assert arguments["block_size"] == "int | None"
    assert arguments_of(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"gpu_memory_utilisation": 0.5},
            "engine_options.gpu_memory_utilisation: not an argument of vLLM's EngineArgs; did you mean "
            "'gpu_memory_utilization'?",
        ),
        ({"prefil_tokens": 5}, "did you mean 'prefill_tokens'"),
        ({"never": True}, "engine_options.never: not an argument"),
        ({"block_size": "many"}, "engine_options.block_size: Expected `int`, got `str`"),
        ({"gpu_memory_utilization": True}, "engine_options.gpu_memory_utilization: Expected `float`, got `bool`"),
    ],
)
def test_what_vllm_does_not_take_is_named(arguments: dict[str, str], options: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(options, arguments)
    assert line in str(caught.value)


def test_what_vllm_takes_passes_and_so_does_all_where_its_source_says_nothing(arguments: dict[str, str]) -> None:
    check_arguments({"block_size": 32, "runner": "x", "dtype": "float32", "gpu_memory_utilization": 1}, arguments)
    check_arguments({"anything": 1}, {})


def test_a_token_that_is_not_there_is_named_unless_other_machines_need_it() -> None:
    with (
        environ(NOT_SET=None),
        pytest.raises(ConfigError, match=r"^engine_options\.token_env: NOT_SET is not set; "),
    ):
        check_engine(parse(SERVERS))
    check_engine(parse(f"runtime='ray'\n{SERVERS}"))
    with environ(NOT_SET="secret"):
        check_engine(parse(SERVERS))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_vllm_that_is_installed_says_its_arguments() -> None:
    folder = vllm_folder()
    assert folder is not None
    assert {"gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager"} <= arguments_of(folder).keys()
    with pytest.raises(ConfigError, match="did you mean 'gpu_memory_utilization'"):
        check_engine(parse("engine='vllm'\nengine_options.gpu_memory_utilisation=0.5\n[tasks.sorting]"))
    assert "vllm" not in sys.modules


def test_packages_that_a_run_needs_and_this_machine_lacks_are_known() -> None:
    everything = "runtime='ray'\nengine='vllm'\nweights={store='mooncake'}\n[tasks.sorting]"
    lacking = [name for name in ("ray", "vllm", "mooncake") if importlib.util.find_spec(name) is None]
    assert missing(parse(everything)) == lacking
    assert missing(parse("[tasks.sorting]")) == []
