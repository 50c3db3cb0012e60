"""A model folder's chat template, rendered to text as Hugging Face renders it, in a sandbox and without transformers.

What this file leaves out: tools, documents and pictures, which a template sees as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollart.errors import ConfigError

Message = dict[str, str]


class ChatTemplate:
    """`chat_template.jinja` of a folder, else the entry `chat_template` of its `tokenizer_config.json`."""

    def __init__(self, folder: Path) -> None:
        settings = read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(settings) | _special_tokens(read_json(folder / "special_tokens_map.json"))
        self._folder = folder
        try:
            self._template = _environment().from_string(_source(folder, settings))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template cannot be read: {error}") from error

    def render(self, messages: list[Message]) -> str:
        """The conversation as text, ending where the assistant begins to write. Raises ConfigError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"{self._folder}: the chat template refuses the roles {roles}: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file. Raises ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _source(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ConfigError(
            f"{folder}: no chat template; put a chat_template.jinja into the folder, "
            "or take an instruction-tuned model that has one"
        )
    return template


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    dump = cast(Callable[..., str], json.dumps)
    return dump(value, ensure_ascii=ensure_ascii, indent=indent, **options)
