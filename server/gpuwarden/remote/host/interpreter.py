"""Choose the interpreter for a script on this machine: the current one when it satisfies the header, else `uv`."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator

from gpuwarden.core.errors import BadRequest
from gpuwarden.scripts.script import Header, read_header


def interpreter_for(script: str) -> tuple[str, ...]:
    """Return the argument list before the script's path. Raises BadRequest naming what is missing."""
    header = read_header(script)
    lacking = list(unmet(header)) if header else []
    if not lacking:
        return (sys.executable,)
    uv = shutil.which("uv")
    if uv:
        return (uv, "run", "--quiet", "--script")
    raise BadRequest(
        f"the script's header asks for what this Python does not have: {', '.join(lacking)}",
        "Install uv, which brings what a header asks for, or install these packages next to gpuwarden.",
    )


def unmet(header: Header) -> Iterator[str]:
    """Yield the header's requirements that this interpreter lacks. Raises BadRequest for an unreadable one."""
    from packaging.requirements import InvalidRequirement
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        if header.requires_python and not SpecifierSet(header.requires_python).contains(
            platform.python_version(), True
        ):
            yield f"Python {header.requires_python}"
        for text in header.dependencies:
            if not _satisfied(text, frozenset()):
                yield text
    except (InvalidSpecifier, InvalidRequirement) as error:
        raise BadRequest(
            f"the script's header can't be understood: {error}", "Fix the `# /// script` block."
        ) from error


def _satisfied(text: str, seen: frozenset[str], extra: str = "") -> bool:
    """Return whether one requirement is installed here, with everything that its extras ask for."""
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
        return True
    if wanted.url:  # the origin of an installed package is not recorded reliably
        return False
    try:
        found = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if not wanted.specifier.contains(found.version, prereleases=True):
        return False
    key = str(wanted)
    if key in seen:
        return True
    return all(_satisfied(r, seen | {key}, e) for e in wanted.extras for r in found.requires or ())
