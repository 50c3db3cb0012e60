"""Callables behind a URL: what `@register_serverless` puts in place of an attribute.

    local://module:function     called here, in this process

Invariant: an unknown scheme or a function that does not exist is a ConfigError when the worker is built, before any
call. What this file leaves out: remote schemes, elastic pools and retries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rollart.checks import not_a_choice
from rollart.data.targets import named
from rollart.declarations import declared_methods
from rollart.errors import ConfigError

SCHEMES: dict[str, Callable[[str], Callable[..., Any]]] = {"local": partial(named, what="serverless_url local://")}


def open_function(url: str) -> Callable[..., Any]:
    """The callable of a URL. Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(f"serverless_url {url!r}: scheme {not_a_choice(scheme, list(SCHEMES))}")
    return SCHEMES[scheme](rest)


def attach(worker: object) -> None:
    """Set the attributes that a worker's declarations name, unless it has set them itself. Raises ConfigError."""
    for declaration in declared_methods(type(worker)).values():
        if declaration.url and declaration.attribute not in vars(worker):
            setattr(worker, declaration.attribute, open_function(declaration.url))
