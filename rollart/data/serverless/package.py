"""`rollart package-reward module:function --target ...`: a folder with what is needed to deploy a function.

    the function's modules (modules.py) + handler.py + templates/<target>/ + requirements.txt + README.txt

Invariants: what is written runs without rollart installed; a file that stands there already is replaced only with
`force`; nothing leaves this machine. What this file leaves out: sending it to a platform, which `next` names.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from msgspec import Struct

from rollart.data.serverless.modules import Closure, Source, closure, located
from rollart.errors import ConfigError, RunFolderError

OURS = "rollart_handler"


class Target(Struct, frozen=True):
    """A platform: the folders of templates, what they need, what they are called with, and the next command."""

    templates: tuple[str, ...]
    requirements: tuple[str, ...]
    next: str
    url: str


CONTAINER = ("functions-framework>=3.10,<4",)
TARGETS = {
    "docker": Target(
        ("container",),
        CONTAINER,
        "docker build -t $name $out && docker run --rm -p 8080:8080 $name",
        "http://localhost:8080",
    ),
    "knative": Target(
        ("container", "knative"),
        CONTAINER,
        "put your registry into $out/service.yaml, then: docker build -t REGISTRY/$name $out && "
        "docker push REGISTRY/$name && kubectl apply -f $out/service.yaml",
        "the URL that `kubectl get ksvc $name` shows",
    ),
    "lambda": Target(("lambda",), (), "cd $out && sam build && sam deploy --guided", "lambda://$name?region=REGION"),
    "fc": Target(("fc",), (), "cd $out && s build && s deploy", "fc://ACCOUNT_ID/$name?region=cn-hangzhou"),
}
README = """\
$target for $kind, written by rollart $version.

Next:  $next
Then, in a config, under [tasks.NAME]:  reward = "$url"
(In a Worker of your own the same URL is the serverless_url of @rdist.register_serverless.)

Assumed
- The function's modules are those that its imports name:
$files
  What it reads by path, or imports by a name that is computed, is not among them: add it to this folder.
- What it imports beyond them is in requirements.txt, in the versions that were installed here.
$missing- Memory, time limit and region in the manifest are a start; set them to what the function needs.
- Secrets are set at the platform, as environment variables; none is in this folder.

rollart_handler.py is the contract of every function: it takes {"args": [...], "kwargs": {...}} or {"batch": [...]},
and answers {"result": value}, {"error": {...}} or {"batch": [...]}.
"""


class Order(Struct, frozen=True):
    """What is to be packaged. `out`: the folder; None: the function's name and the target's."""

    function: str
    target: str
    out: Path | None = None
    options: dict[str, Any] = {}
    force: bool = False


def package(order: Order) -> str:
    """Write the folder; what to do next, for people. Raises ConfigError, RunFolderError."""
    source = located(order.function, order.options)
    found = closure(source)
    out = order.out or Path(f"{_name(order.function)}-{order.target}")
    files = _files(order, source, found, out)
    _write(out, files, order.force)
    target = TARGETS[order.target]
    words = {"name": _name(order.function), "out": str(out)}
    lines = [f"wrote {len(files)} files to {out}", f"next: {Template(target.next).substitute(words)}"]
    if found.missing:
        lines.insert(1, f"not found here, so not in requirements.txt: {', '.join(sorted(found.missing))}")
    return "\n".join(lines)


def _name(function: str) -> str:
    """A name that every platform takes: lower case, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", function.rpartition(":")[2].lower()).strip("-")[:50] or "reward"


def _files(order: Order, source: Source, found: Closure, out: Path) -> dict[str, bytes]:
    """What is written, by path in the folder. Raises ConfigError."""
    target = TARGETS[order.target]
    words = {
        "target": f"{source.module}:{source.attribute}",
        "options": repr(order.options),
        "name": _name(order.function),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    made = {"rollart_handler.py": (_here() / "handler.py").read_bytes()}
    for folder in target.templates:
        for each in (_here() / "templates" / folder).iterdir():
            made[each.name.removesuffix(".in")] = Template(each.read_text("utf-8")).substitute(words).encode()
    requirements = sorted({*target.requirements, *found.requirements})
    made["requirements.txt"] = "".join(f"{line}\n" for line in requirements).encode()
    made["README.txt"] = _readme(order, found, words, out)
    if taken := made.keys() & found.files.keys():
        raise ConfigError(f"{order.function}: {', '.join(sorted(taken))} is a file of the package itself; rename yours")
    return made | {path: file.read_bytes() for path, file in found.files.items()}


def _readme(order: Order, found: Closure, words: dict[str, str], out: Path) -> bytes:
    from rollart import __version__

    target = TARGETS[order.target]
    missing = ", ".join(sorted(found.missing))
    more = {
        "kind": order.target,
        "version": __version__,
        "next": Template(target.next).substitute(words, out=str(out)),
        "url": Template(target.url).substitute(words),
        "files": "\n".join(f"    {path}" for path in sorted(found.files)),
        "missing": f"- Not found where this was written, so not in requirements.txt: {missing}.\n" if missing else "",
    }
    return Template(README).substitute(words | more).encode()


def _here() -> Any:
    return resources.files("rollart.data.serverless")


def _write(out: Path, files: dict[str, bytes], force: bool) -> None:
    try:
        if not force and out.exists() and any(out.iterdir()):
            raise ConfigError(f"--out {out}: this folder is not empty; name another, or --force replaces its files")
        for path, content in files.items():
            file = out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except NotADirectoryError as error:
        raise ConfigError(f"--out {out}: this is no folder") from error
    except OSError as error:
        raise RunFolderError(f"--out {out} cannot be written: {error.strerror or error}") from error
