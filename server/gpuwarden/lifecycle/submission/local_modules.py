"""Find modules that a program imports from local files. The machine has these files only if they are job inputs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.lifecycle.submission.inputs import real_path, script_in
from gpuwarden.static_analysis.ecosystem_tables import KNOWN, closure, distributions, listed
from gpuwarden.static_analysis.parsing import parse
from gpuwarden.static_analysis.script import ScriptFacts

MAX_MODULES: Final = 100


def local_modules(
    root: Path, spec: JobSpec, script: ScriptFacts | None, files: Sequence[InputFile]
) -> tuple[tuple[str, str], ...]:
    """Return each imported module that is a file or a folder in `root` but not an input, with its path.

    Modules are looked up where Python finds them: next to the program that a command starts, or in the working folder
    for a script. Names declared in the script's header are packages, so they are not looked up. Imports in the found
    modules are followed.
    """
    if script is None or script.error:
        return ()
    program = next((f.path for word in spec.command for f in files if f.path == word.removeprefix("./")), "")
    base = "" if spec.script is not None else str(PurePosixPath(program).parent)
    there = {file.path for file in files}
    declared = closure(listed(script.header.dependencies if script.header else ()))
    waiting, found = [name.partition(".")[0] for name, _ in script.uses.imports], dict[str, str]()
    waiting += [name for path in there if path.endswith(".py") for name in _imported(root, path)]
    seen = set(sys.stdlib_module_names)
    while waiting and len(found) < MAX_MODULES:
        name = waiting.pop(0)
        if name in seen or declared & set(distributions(name)):
            continue
        seen.add(name)
        path, text = next(_homes(root, base, name), ("", ""))
        if path and not any(path == f or f.startswith(path + "/") for f in there):
            found[name] = path
            waiting += _imported(root, text)
    return tuple(sorted(found.items()))


def _homes(root: Path, base: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path of a module in `root` and the path of its code; "" for a folder without `__init__.py`."""
    folder = PurePosixPath(base) / name
    if _exists(root, f"{folder}/__init__.py"):
        yield str(folder), f"{folder}/__init__.py"
    if _exists(root, f"{folder}.py"):
        yield f"{folder}.py", f"{folder}.py"
    # An installed package takes precedence over a folder with the same name but no __init__.py.
    if not set(distributions(name)) & KNOWN and _exists(root, str(folder)) and any((root / folder).glob("*.py")):
        yield str(folder), ""


def _exists(root: Path, path: str) -> bool:
    try:
        return real_path(root, path).exists()
    except BadRequest:
        return False


def _imported(root: Path, path: str) -> Iterable[str]:
    """Return the top-level names that a file imports; empty for a file that can't be read."""
    if not path:
        return ()
    try:
        tree, _ = parse(script_in(root, path))
    except (BadRequest, OSError):
        return ()
    plain = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names]
    plain += [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.module and not n.level]
    return [name.partition(".")[0] for name in plain]
