"""Fixtures of the tests that need the back ends of production: `make test-production` has an environment for them.

A test whose package is not installed is skipped, and says which.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from rollart.data.engines.vllm import VLLMEngine
from rollart.data.engines.vllm_seam import Core, start_here
from tests.data.tiny_models import TinyModel, make_tiny_models
from tests.e2e.conftest import lab  # noqa: F401 - a fixture

pytest.register_assert_rewrite("tests.data.engine_contract", "tests.data.handoff_contract")

NEEDS = {"test_vllm": "vllm", "test_lora": "peft", "test_megatron": "megatron"}
"""Beginning of a file's name -> the package that its tests need."""
HERE = Path(__file__).parent
SMALL = {"kv_cache_memory_bytes": 8 << 20, "block_size": 32, "hands_over": True}
"""vLLM has one KV connector for a process: where one engine has it, all have. Whole runs show those without."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why nothing runs where a package is not installed; warnings of others are not ours to fix."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.timeout(600))
        for beginning, package in NEEDS.items():
            if item.path.name.startswith(beginning) and importlib.util.find_spec(package) is None:
                reason = f"{package} is not installed; run them with: make test-production"
                item.add_marker(pytest.mark.skip(reason=reason))


class Cores:
    """vLLM's engines, which take seconds to start: each is lent to one test at a time, and comes back as it was."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Core]] = {}
        self._all: list[Core] = []  # when one is thrown away, vLLM tears down what all in a process share
        self._lent: list[tuple[str, str, Core, VLLMEngine]] = []

    def engine(self, folder: str, **options: Any) -> VLLMEngine:
        """An engine as good as new."""
        lent: list[tuple[str, Core]] = []

        def start(model_folder: str, **arguments: Any) -> Core:
            key = json.dumps([model_folder, arguments], sort_keys=True)
            idle = self._idle.setdefault(key, [])
            core = idle.pop() if idle else start_here(model_folder, **arguments)
            self._all.append(core)
            lent.append((key, core))
            return core

        made = VLLMEngine(folder, start=start, **{**SMALL, **options})
        self._lent.append((folder, *lent[0], made))
        return made

    def take_back(self) -> None:
        """Nothing runs in what comes back; its weights are those of its folder, and its cache is empty."""
        lent, self._lent = self._lent, []
        for folder, key, core, engine in lent:
            engine.check()
            assert core.num_requests == 0
            if engine.stats().version:
                engine.update(0, safetensors.torch.load_file(Path(folder) / "model.safetensors").items())
            core.forget(clean=True)
            self._idle[key].append(core)


@pytest.fixture(scope="session")
def all_cores() -> Cores:
    """Those of the whole session."""
    return Cores()


@pytest.fixture
def cores(all_cores: Cores) -> Iterator[Cores]:
    """Those of one test."""
    yield all_cores
    all_cores.take_back()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """`llama` (untied head) and `qwen3` (tied head), with heads as wide as vLLM wants them at least."""
    return make_tiny_models(tmp_path_factory.mktemp("models"), head_dim=32)
