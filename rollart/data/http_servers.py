"""The wire formats of inference servers: those of vLLM and of SGLang.

    what          vLLM, with VLLM_SERVER_DEV_MODE=1               SGLang
    generate      POST /v1/completions                            POST /generate
    log-probs     ... with prompt_logprobs                        ... with logprob_start_len = 0
    end one       POST /abort_requests                            POST /abort_request
    end all       POST /pause?mode=abort&clear_cache=false        POST /pause_generation {"mode": "abort"}
    go on         POST /resume                                    POST /continue_generation
    weights       POST /start_weight_update, then /update_weights POST /update_weights_from_disk, which also empties
                  per file, /finish_weight_update                 the cache
    their name    GET /weight_info                                with every answer
    empty cache   POST /reset_prefix_cache                        POST /flush_cache
    alive         GET /health                                     GET /health

What is ended answers its own call with the tokens that it has. Weights travel through files that the server can read.

Invariant: the token of the server's access comes from an environment variable and stands in no error; proxies of the
environment are not used. What this file leaves out: which requests there are (`http_inference.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import httpx2

from rollart.engine_options import SGLANG_REFUSED, check_url
from rollart.errors import ConfigError, GenerationError
from rollart.types import Sampling

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""Servers close connections that were idle for 5 s, and a call must not meet that."""
HINTS = {
    401: "set the environment variable that engine_options.token_env names",
    403: "the token is not accepted there",
    404: "is engine_options.kind the server's kind, and was it started as docs/engines.md says?",
}
ENDS = ("stop", "length", "abort")
ROUNDING = 0.01
"""By which a log-probability may be above 0."""
SCORED = "rollart-logprobs"
UNFINISHED = "rollart: an update that was broken off"
"""The name of weights that are of no one version."""


class Answer(NamedTuple):
    """What a server generated. `cached`: tokens of the prompt that it did not compute, 0 where it does not say;
    `weights`: the name of those that it used, "" where it generated nothing.
    """

    tokens: list[int]
    logprobs: list[float | None]
    ended: Literal["stop", "length", "abort"]
    cached: int = 0
    weights: str = ""


def check_answer(answer: Answer, vocabulary: int, most: int) -> None:
    """Raise ValueError unless it is one that a server can mean: what is no number at all is a fault of its own.

    `vocabulary`: tokens that the model knows; `most`: tokens that were asked for.
    """
    tokens, logprobs, ended, *_ = answer
    if ended not in ENDS or (ended != "abort" and not tokens):
        raise ValueError(f"it ended as {ended!r} after {len(tokens)} tokens")
    if len(tokens) > most or len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities; asked for were {most}")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"{token!r} is no token of the model's vocabulary of {vocabulary}")
    for logprob in logprobs:
        if logprob is not None and (type(logprob) not in (int, float) or logprob > ROUNDING):
            raise ValueError(f"{logprob!r} is no log-probability")


class Server(Protocol):
    """One inference server. Everything raises GenerationError where the server refuses, fails or is away."""

    @property
    def refused(self) -> str:
        """Why it cannot serve top-k and top-p; "" where it can."""
        ...

    async def alive(self) -> None:
        """Raise unless it answers."""
        ...

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, max_tokens: int, seed: int
    ) -> Answer:
        """Generate, until it ends or is ended. `seed`: of the trajectory, however often it is sent."""
        ...

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; an unknown one is nothing to do."""
        ...

    async def pause(self) -> None:
        """End all requests and begin no others."""
        ...

    async def go_on(self) -> None:
        """Begin requests again."""
        ...

    async def load(self, name: str, files: Sequence[Path]) -> None:
        """Load weights from the safetensors files of a folder in Hugging Face format, and empty the cache."""
        ...

    async def leave(self) -> None:
        """Leave it as it can be used by others: no update of ours is open, and requests begin."""
        ...

    async def forget(self) -> None:
        """Empty the cache."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class Wire:
    """JSON over HTTP to one server. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str, token_env: str = "", timeout_s: float = 600.0) -> None:
        check_url(url)
        headers = {}
        if token_env:
            if not (token := os.environ.get(token_env)):
                raise ConfigError(f"engine_options.token_env: {token_env} is not set")
            headers["Authorization"] = f"Bearer {token}"
        self._url = url.rstrip("/")
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
            follow_redirects=False,
        )

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """What the server answers; None where that is no JSON."""
        return await self._call("POST", path, json=body or {}, params=query)

    async def get(self, path: str) -> Any:
        """What the server answers; None where that is no JSON."""
        return await self._call("GET", path)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, **arguments: Any) -> Any:
        where = f"{self._url}{path}"
        try:
            response = await self._client.request(method, where, **arguments)
        except httpx2.TimeoutException as error:
            raise GenerationError(f"{where} did not answer in time ({type(error).__name__})") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError) as error:  # the last once it is closed
            raise GenerationError(f"{where} cannot be reached: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            said = response.content[:300].decode(errors="replace")
            hint = f"; {HINTS[response.status_code]}" if response.status_code in HINTS else ""
            raise GenerationError(f"{where} answered {response.status_code} {response.reason_phrase}: {said!r}{hint}")
        try:
            return response.json() if response.content else None
        except ValueError:
            return None


class VLLMServer:
    """`Server` for `vllm serve`."""

    refused = ""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._updating = wire, False

    async def alive(self) -> None:
        """Raise unless it answers."""
        await self._wire.get("/health")

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, max_tokens: int, seed: int
    ) -> Answer:
        """Generate, until it ends or is ended."""
        choice, cached = await self._complete(
            request_id=request_id,
            prompt=list(tokens),
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed + len(tokens) if sampling.temperature else None,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            skip_special_tokens=False,
            logprobs=0,
        )
        came = choice["token_ids"]
        # Asked afterwards: no other load brings the name of ours back.
        weights = (await self._wire.get("/weight_info"))["weight_version"] if came else ""
        return Answer(came, choice["logprobs"]["token_logprobs"], choice["finish_reason"], cached, weights)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first."""
        choice, _ = await self._complete(
            request_id=SCORED, prompt=list(tokens), max_tokens=1, temperature=0.0, prompt_logprobs=0
        )
        rows = choice["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]

    async def _complete(self, **body: Any) -> tuple[Any, int]:
        answer = await self._wire.post("/v1/completions", {**body, "return_token_ids": True})
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0], details.get("cached_tokens") or 0

    async def abort(self, request_id: str) -> None:
        """End a request. vLLM calls it by a name that it makes of ours."""
        await self._wire.post("/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]})

    async def pause(self) -> None:
        """End all requests and begin no others."""
        await self._wire.post("/pause", mode="abort", clear_cache="false")

    async def go_on(self) -> None:
        """Begin requests again."""
        await self._wire.post("/resume")

    async def load(self, name: str, files: Sequence[Path]) -> None:
        """Load the files, one after the other."""
        await self._begin()
        try:
            for file in files:
                await self._wire.post("/update_weights", {"update_info": {"file": str(file)}})
        except GenerationError:
            await self._break_off()  # where the fault is vLLM's, it has ended the update itself
            raise
        await self._wire.post("/finish_weight_update", {"weight_version": name})
        self._updating = False
        await self.forget()

    async def _begin(self) -> None:
        """Open an update, instead of one that somebody has left open by dying in it."""
        self._updating = True
        try:
            await self._wire.post("/start_weight_update")
        except GenerationError:
            await self._break_off()
            self._updating = True
            await self._wire.post("/start_weight_update")

    async def _break_off(self) -> None:
        """End an update that may be open."""
        self._updating = False
        with contextlib.suppress(GenerationError):
            await self._wire.post("/finish_weight_update", {"weight_version": UNFINISHED})

    async def leave(self) -> None:
        """Leave it as it can be used by others: no update of ours is open, and requests begin."""
        if self._updating:
            await self._break_off()
        await self.go_on()

    async def forget(self) -> None:
        """Empty the cache."""
        if not (await self._wire.post("/reset_prefix_cache"))["success"]:
            raise GenerationError("vLLM's prefix cache cannot be emptied while requests run")

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()


class SGLangServer:
    """`Server` for `sglang.launch_server`."""

    refused = SGLANG_REFUSED

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def alive(self) -> None:
        """Raise unless it answers."""
        await self._wire.get("/health")

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, max_tokens: int, seed: int
    ) -> Answer:
        """Generate, until it ends or is ended. The seed counts where the server infers deterministically."""
        meta = await self._generate(
            request_id,
            tokens,
            temperature=sampling.temperature,
            max_new_tokens=max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            skip_special_tokens=False,
            no_stop_trim=True,
            sampling_seed=seed,
        )
        pairs = meta.get("output_token_logprobs") or []
        return Answer(
            [pair[1] for pair in pairs],
            [pair[0] for pair in pairs],
            meta["finish_reason"]["type"],
            meta.get("cached_tokens", 0),
            meta["weight_version"] if pairs else "",
        )

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first."""
        meta = await self._generate(SCORED, tokens, logprob_start_len=0, temperature=0.0, max_new_tokens=1)
        return [pair[0] for pair in meta["input_token_logprobs"][1:]]

    async def _generate(
        self, request_id: str, tokens: Sequence[int], logprob_start_len: int = -1, **sampling: Any
    ) -> Any:
        body = {
            "rid": request_id,
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": logprob_start_len,
        }
        return (await self._wire.post("/generate", body))["meta_info"]

    async def abort(self, request_id: str) -> None:
        """End a request."""
        await self._wire.post("/abort_request", {"rid": request_id})

    async def pause(self) -> None:
        """End all requests and begin no others."""
        await self._wire.post("/pause_generation", {"mode": "abort"})

    async def go_on(self) -> None:
        """Begin requests again."""
        await self._wire.post("/continue_generation")

    async def load(self, name: str, files: Sequence[Path]) -> None:
        """Load their folder."""
        body = {"model_path": str(files[0].parent), "weight_version": name, "flush_cache": True}
        answer = await self._wire.post("/update_weights_from_disk", body)
        if not answer["success"]:
            raise GenerationError(f"SGLang did not load {name}: {answer.get('message', '')}")

    async def leave(self) -> None:
        """Leave it as it can be used by others: requests begin."""
        await self.go_on()

    async def forget(self) -> None:
        """Empty the cache."""
        await self._wire.post("/flush_cache")

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()


SERVERS: dict[str, type[VLLMServer] | type[SGLangServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}
"""By `engine_options.kind`."""
