"""Which files a function consists of: its module and, through imports, those of the same source tree.

    module -> its imports -> the standard library: nothing | installed: a requirement | else: a file, and its imports

Invariants: an import counts wherever it stands, except under `if TYPE_CHECKING`; rollart's own modules count as files,
as they are few and rollart as a whole is large; imports are read, not run, beyond the function's own. What this file
leaves out: data files, and imports whose name is computed.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from rollart.data.targets import named
from rollart.errors import ConfigError
from rollart.imports import check_arguments


class Source(Struct, frozen=True):
    """A function by module and attribute, and the file of its module."""

    module: str
    attribute: str
    file: Path


class Closure(Struct):
    """Files by path in the package, requirements as pip reads them, and modules that nobody here knows."""

    files: dict[str, Path] = field(default_factory=dict)
    requirements: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


def located(target: str, options: dict[str, Any]) -> Source:
    """The function at `module:name` or `file.py:name`. Raises ConfigError when there is none."""
    found = named(target, "function")
    check_arguments(found, options, "--options", target)
    module, _, attribute = target.rpartition(":")
    if module.endswith(".py"):
        return Source(Path(module).stem, attribute, Path(module).resolve())
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"function: {target} is Python's own; package a function of yours that calls it")
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not file.endswith(".py"):
        raise ConfigError(f"function: {module} has no Python source, so it cannot be copied: {file}")
    return Source(module, attribute, Path(file))


def closure(source: Source) -> Closure:
    """Everything that the function needs."""
    found = Closure()
    todo = [(source.module, source.file)]
    while todo:
        module, file = todo.pop()
        path = _place(module, file)
        if path in found.files:
            continue
        found.files[path] = file
        parents = [module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)]
        sorted_out = {name: _sort(name, found) for name in {*_imports(module, file), *parents}}
        todo.extend((name, local) for name, local in sorted_out.items() if local is not None)
    return found


def _sort(name: str, found: Closure) -> Path | None:
    """The file of a module that travels along; others become a requirement, or are missing."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    file = _file(name)
    if _travels(name):
        return file if file is not None and file.suffix == ".py" else None
    if distributions := _distributions().get(top):
        found.requirements.update(f"{each}=={version(each)}" for each in set(distributions))
    elif _spec(top) is None:
        found.missing.add(top)
    return None


def _travels(name: str) -> bool:
    """Whether a module, or for what is no module the one that holds it, is copied, however it came to be here."""
    parts = name.split(".")
    holders = (_file(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    file = next((each for each in holders if each is not None), None)
    return file is not None and (parts[0] == "rollart" or not _installed(file))


def _file(name: str) -> Path | None:
    """A module's file; None for what is no module, such as the function of `from module import function`."""
    spec = _spec(name)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _installed(file: Path) -> bool:
    roots = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")}
    return "site-packages" in file.parts or any(file.is_relative_to(root) for root in roots)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _place(module: str, file: Path) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if file.name == "__init__.py" else f"{path}.py"


def _imports(module: str, file: Path) -> Iterator[str]:
    """The modules that a file imports, by their full names."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in _nodes(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name(f"{'.' * node.level}{node.module or ''}", package or None)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All that runs: not what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for each in node.orelse:
                yield each
                yield from _nodes(each)
            continue
        yield node
        yield from _nodes(node)
