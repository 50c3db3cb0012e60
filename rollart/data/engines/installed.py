"""What only this machine can judge of a config's engine: the vLLM that is installed, and an environment variable.

Invariant: looking imports and starts nothing; vLLM's arguments are read from its source. What this file leaves out:
what is wrong on every machine (`rollart/engine_options.py`).
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from rollart.config import Config
from rollart.engine_options import VLLMOptions, unknown_argument
from rollart.errors import ConfigError

SOURCE = Path("engine", "arg_utils.py")
PLAIN: Mapping[str, type] = MappingProxyType({each.__name__: each for each in (bool, int, float, str)})
"""Types of vLLM's arguments that are checked here; the others vLLM checks when it starts."""


def check_engine(config: Config) -> None:
    """What the engine of a run will meet here. Raises ConfigError that begins with the key."""
    if config.engine == "vllm" and (folder := vllm_folder()) is not None:
        check_arguments(config.engine_options, arguments_of(folder))
    variable = config.engine_options.get("token_env") if config.engine == "http" else ""
    if variable and config.runtime != "ray" and not os.environ.get(variable):
        raise ConfigError(f"engine_options.token_env: {variable} is not set; export it with the servers' token")


def missing(config: Config) -> list[str]:
    """Packages that a run of this config needs where it works, and that are not here."""
    wanted = {
        "ray": config.runtime == "ray",
        "vllm": config.engine == "vllm",
        "mooncake": config.weights.store == "mooncake",
    }
    return [name for name, needed in wanted.items() if needed and importlib.util.find_spec(name) is None]


def vllm_folder() -> Path | None:
    """Where vLLM is installed; None where it is not."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def arguments_of(folder: Path) -> dict[str, str]:
    """The fields of vLLM's `EngineArgs` and their types, from its source; none where that says nothing of them."""
    try:
        source = ast.parse((folder / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    kinds = (each for each in source.body if isinstance(each, ast.ClassDef) and each.name == "EngineArgs")
    lines = [line for kind in kinds for line in kind.body if isinstance(line, ast.AnnAssign)]
    return {ast.unparse(line.target): ast.unparse(line.annotation) for line in lines}


def check_arguments(options: Mapping[str, Any], arguments: Mapping[str, str]) -> None:
    """Options that are not ours must be arguments of vLLM, of its types. Raises ConfigError."""
    for name, value in options.items():
        if not arguments or name in VLLMOptions.__struct_fields__:
            continue
        if name not in arguments:
            raise unknown_argument(name, arguments)
        if (kind := PLAIN.get(arguments[name].removesuffix(" | None"))) is not None:
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"engine_options.{name}: {error}") from error
