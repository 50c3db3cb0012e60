"""The table `[engine_options]`, engine by engine, and what each engine cannot do with the rest of a config. PURE.

Invariant: what is refused here would end the run at its start, or drop every group. What this file leaves out: what
only this machine can tell, such as the arguments of the vLLM that is installed (`data/engines/installed.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from msgspec import field

from rollart.checks import check, nearest, not_a_choice
from rollart.errors import ConfigError
from rollart.sections import Count, Positive, RolloutConfig, Section, Whole

Published = Literal["float32", "bfloat16", "float16"]
"""In which the trainer publishes."""
Kind = Literal["vllm", "sglang"]
"""Of servers."""
COOLEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM takes as they are, besides 0."""
ENGINE_KEYS = {
    "slots": "rollout.engine_slots",
    "max_model_tokens": "rollout.max_model_tokens",
    "seed": "seed",
    "lora": "train.lora",
    "url": "engine_options.urls",
    "hands_over": "[roles.prefill]",
    "device": "pools.NAME.device",
    "device_class": "pools.NAME.device_class",
    "tensor_parallel_size": "roles.actor_gen.devices",
}
"""What an engine is told from elsewhere in the config."""
FOLLOWS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.name",
        "max_num_seqs": "rollout.engine_slots",
        "max_model_len": "rollout.max_model_tokens",
        "max_num_batched_tokens": "engine_options.prefill_tokens",
        "kv_transfer_config": "[roles.prefill]",
    }
)
"""Arguments of vLLM that follow from keys of the config."""
SET = frozenset(
    {
        "skip_tokenizer_init",
        "generation_config",
        "distributed_executor_backend",
        "logprobs_mode",
        "async_scheduling",
        "disable_log_stats",
        "weight_transfer_config",
        "worker_extension_cls",
    }
)
"""Arguments of vLLM that the engine stands on."""
SGLANG_REFUSED = "SGLang's log-probabilities are those before top_k and top_p; switch both off"


class EmbeddedOptions(Section, frozen=True, kw_only=True):
    """Of engine `embedded`."""

    prefill_tokens: Count = 2048
    kept_tokens: Whole | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class EmulatedOptions(Section, frozen=True, kw_only=True):
    """Of engine `emulated`: those of `embedded`, and its pace."""

    prefill_tokens: Count = 2048
    kept_tokens: Whole | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    params: Positive = 8.2e9
    slowdown: Positive = 5.0


class VLLMOptions(Section, frozen=True, kw_only=True):
    """Of engine `vllm`, besides arguments of vLLM's own."""

    prefill_tokens: Count = 2048
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    published_dtype: Published = "float32"
    enable_sleep_mode: bool = False


class HTTPOptions(Section, frozen=True, kw_only=True):
    """Of engine `http`."""

    kind: Kind = "vllm"
    """Has no default: what is left out is refused."""
    urls: list[str] = field(default_factory=list)
    token_env: str = ""
    weights_folder: str = ""
    timeout_s: Positive = 600.0
    patience_s: Positive = 10.0
    away_s: Positive = 300.0
    published_dtype: Published = "float32"


def check_engine_options(engine: str, options: Mapping[str, Any], rollout: RolloutConfig) -> None:
    """Names and values, and whether the engine can sample as `rollout` says. Raises ConfigError."""
    _check_elsewhere(options, ENGINE_KEYS)
    if engine == "vllm":
        check_vllm(options)
        _check_temperature("vLLM", rollout)
    elif engine == "http":
        _check_http(options, rollout)
    else:
        check(EmulatedOptions if engine == "emulated" else EmbeddedOptions, options, "engine_options.")


def check_vllm(options: Mapping[str, Any]) -> None:
    """The options that are ours, and arguments of vLLM that nobody may set. Raises ConfigError."""
    own = set(VLLMOptions.__struct_fields__)
    check(VLLMOptions, {name: value for name, value in options.items() if name in own}, "engine_options.")
    _check_elsewhere(options, FOLLOWS)
    for name in options:
        if name in SET:
            raise ConfigError(f"engine_options.{name}: rollart sets it itself; leave it out")
    if options.get("pipeline_parallel_size", 1) != 1:
        raise ConfigError(
            "engine_options.pipeline_parallel_size: rollart drives vLLM without pipelines; take tensor parallelism, "
            "which is roles.actor_gen.devices"
        )


def _check_elsewhere(options: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    for name in options:
        if name in keys:
            raise ConfigError(f"engine_options.{name}: follows from {keys[name]}; set that instead")


def unknown_argument(name: str, arguments: Iterable[str]) -> ConfigError:
    """Why an option is refused that is neither ours nor one of vLLM's `arguments`."""
    known = {*arguments, *VLLMOptions.__struct_fields__} - SET - set(FOLLOWS)
    return ConfigError(f"engine_options.{name}: not an argument of vLLM's EngineArgs{nearest(name, sorted(known))}")


def check_url(url: str) -> None:
    """Whether a server can be reached by it. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ConfigError(f"engine_options.urls: {url!r}: {error}") from error
    if not usable or parts.username is not None:
        raise ConfigError(f"engine_options.urls: {url!r}: write it as http://host:port; a token goes into token_env")


def _check_http(options: Mapping[str, Any], rollout: RolloutConfig) -> None:
    urls = options.get("urls")
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise ConfigError('engine_options.urls: name the servers, such as ["http://10.0.0.1:30000"]')
    if "kind" not in options:
        raise ConfigError("engine_options.kind: say what the servers are, 'vllm' or 'sglang'")
    if (kind := options["kind"]) not in get_args(Kind):
        raise ConfigError(f"engine_options.kind: {not_a_choice(kind, get_args(Kind))}")
    check(HTTPOptions, options, "engine_options.")
    for url in urls:
        check_url(url)
    if len(set(map(_server, urls))) < len(urls):
        raise ConfigError("engine_options.urls: a server is named twice; each has one inference worker")
    if kind == "vllm":
        _check_temperature("a server of vLLM", rollout)
    elif rollout.top_k or rollout.top_p < 1:
        key = "top_k" if rollout.top_k else "top_p"
        raise ConfigError(f"rollout.{key}: {SGLANG_REFUSED}")


def _server(url: str) -> tuple[str, int | None, str]:
    """What two ways to write one server's URL have in common."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return "127.0.0.1" if host in ("localhost", "::1") else host, port, parts.path.rstrip("/")


def _check_temperature(what: str, rollout: RolloutConfig) -> None:
    heat = rollout.temperature
    if not COOLEST <= heat <= HOTTEST:
        near = COOLEST if heat < COOLEST else HOTTEST
        raise ConfigError(
            f"rollout.temperature: {heat:g}, but {what} takes {COOLEST:g} to {HOTTEST:g}; take {near:g}, or another "
            "engine"
        )
