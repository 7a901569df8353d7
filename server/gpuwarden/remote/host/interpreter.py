"""Compare a script's header with an interpreter, and choose whether to start the script directly or with `uv`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.core.readiness import Needs, Readiness, Uv
from gpuwarden.core.sanitize import line
from gpuwarden.remote.host import start_agent
from gpuwarden.static_analysis.ecosystem_tables import canonical_name
from gpuwarden.static_analysis.script import Header, read_header, start_header

_MOST_ASKED: Final = 5_000
"""The maximum number of requirements from extras that are checked for one requirement in a header."""


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Package(_Lenient):
    version: str = Field(max_length=200)
    requires: tuple[str, ...] = Field(default=(), max_length=5_000)


class _Gpus(_Lenient):
    list: tuple[str, ...] | None = Field(default=None, max_length=256)
    why: str = ""


class Installed(_Lenient):
    """The start agent's reply about one interpreter."""

    python: str = Field(max_length=200)
    markers: dict[str, str] = Field(max_length=32)
    packages: dict[str, _Package] = Field(default_factory=dict, max_length=5_000)
    uv: bool = False
    program: bool = True
    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    modules_why: str = ""
    gpus: _Gpus = _Gpus()

    def package(self, name: str) -> _Package | None:
        """Return the package with this name, in any spelling; None if it is not installed."""
        return self._by_name.get(canonical_name(name))

    @cached_property
    def _by_name(self) -> dict[str, _Package]:
        return {canonical_name(key): found for key, found in self.packages.items()}


def request_of(needs: Needs) -> dict[str, Any]:
    """Return the request to the start agent. Requirements that can't be parsed are omitted; `unmet` reports them."""
    names: set[str] = set()
    for text in needs.dependencies:
        if match := start_agent.NAME.match(text):
            names.add(match.group(0))
    return {
        "names": sorted(names), "gpu": needs.gpu, "program": needs.program, "files": list(needs.files),
        "modules": list(needs.modules), "env": dict(needs.env),
    }  # fmt: skip


def readiness(needs: Needs, answer: Mapping[str, Any], uv: Uv | None = None, *, network: bool = True) -> Readiness:
    """Compare a job's needs with the start agent's reply, and return the target's readiness.

    Raises BadReply for an invalid reply.
    """
    try:
        there = Installed.model_validate(dict(answer))
    except ValidationError as error:
        raise BadReply(f"the start agent's reply has invalid fields: {error.error_count()}", "Try again.") from None
    lacking: tuple[str, ...] = ()
    trouble = ""
    try:
        lacking = tuple(unmet(Header(needs.dependencies, needs.requires_python or None), there))
    except BadRequest as unclear:
        trouble = unclear.message
    return Readiness(
        python=line(there.python, 40),
        unmet=lacking,
        trouble=trouble,
        uv=uv or (Uv.THERE if there.uv else Uv.MISSING),
        network=network,
        gpus=None if there.gpus.list is None else tuple(line(name, 100) for name in there.gpus.list),
        gpus_why=line(there.gpus.why, 200),
        no_program=not there.program,
        no_modules=tuple(name for name in needs.modules if name in there.modules),
        no_files=tuple(name for name in needs.files if name in there.files),
    )


def installed_here(header: Header) -> Installed:
    """Return the start agent's reply about this interpreter and the packages that a header requires."""
    return Installed.model_validate(start_agent.look(request_of(needs_of(header))))


def needs_of(header: Header | None) -> Needs:
    """Return a header's requirements."""
    return Needs(header.requires_python or "", header.dependencies) if header else Needs()


def interpreter_for(script: str) -> tuple[str, ...]:
    """Return the part of a script's command line that precedes the script's path.

    Raises BadRequest if the header has unmet requirements and uv is not installed.
    """
    header = start_header(script)
    lacking = list(unmet(header, installed_here(header))) if header else []
    if not lacking:
        return (sys.executable,)
    uv = shutil.which("uv")
    if uv:
        return (uv, *uv_run(script))
    raise BadRequest(
        f"the script's header has requirements that gpuwarden's Python does not meet: {', '.join(lacking)}",
        "Install uv, which installs a header's requirements, or install these packages in gpuwarden's environment.",
    )


def uv_run(script: str) -> tuple[str, ...]:
    """Return uv's arguments for a script. Without `requires-python`, the script's syntax determines the Python
    version.
    """
    written, asked = read_header(script), start_header(script)
    python = ("--python", asked.requires_python or "") if asked is not None and asked != written else ()
    return ("run", "--quiet", *python, "--script")


def unmet(header: Header, there: Installed) -> Iterator[str]:
    """Yield the header's requirements that an interpreter does not meet. Raises BadRequest if one is invalid."""
    from packaging.requirements import InvalidRequirement
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        # the version of a Python that was built from a checkout ends with a plus sign
        if header.requires_python and not SpecifierSet(header.requires_python).contains(
            there.python.removesuffix("+"), True
        ):
            yield f"Python {header.requires_python}"
        for text in header.dependencies:
            if not _satisfied(text, there):
                yield text
    except (InvalidSpecifier, InvalidRequirement) as error:
        raise BadRequest(f"the script's header can't be parsed: {error}", "Fix the `# /// script` block.") from error


def _satisfied(text: str, there: Installed) -> bool:
    """Return whether one requirement is installed, including the requirements of its extras.

    The machine reports the requirements of the extras. If the reported list is invalid or too long, the requirement
    counts as not installed.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    waiting, seen, count = [(Requirement(text), "")], set[tuple[str, str]](), 0
    while waiting:
        wanted, extra = waiting.pop()
        if (str(wanted), extra) in seen or (
            wanted.marker and not wanted.marker.evaluate({**there.markers, "extra": extra})
        ):
            continue
        seen.add((str(wanted), extra))
        if wanted.url:  # an installed package's origin is not recorded reliably
            return False
        found = there.package(wanted.name)
        try:
            if found is None or not wanted.specifier.contains(found.version, prereleases=True):
                return False
            count += len(wanted.extras) * len(found.requires)
            if count > _MOST_ASKED:
                return False
            asked = [Requirement(r) for r in found.requires] if wanted.extras else []
        except (InvalidVersion, InvalidRequirement, RecursionError):
            return False
        waiting += [(r, e) for e in wanted.extras for r in asked]
    return True
