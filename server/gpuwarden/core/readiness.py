"""What a place has of what a job needs to start: an interpreter, packages, a GPU, programs and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Uv(StrEnum):
    """The way uv comes to a place.

    BROUGHT: gpuwarden copies it there, as the policy allows. UNUSED: no script uses it.
    """

    THERE = "there"
    BROUGHT = "brought"
    MISSING = "missing"
    UNUSED = "unused"


@dataclass(frozen=True)
class Needs:
    """What a job needs there. `requires_python` and `dependencies` are those of its script's header.

    `program` is the first word of its command, `modules` are what the Python that it starts has to import, and `files`
    are absolute paths that it names. `image` is the container that it names to run in.
    """

    requires_python: str = ""
    dependencies: tuple[str, ...] = ()
    gpu: bool = False
    program: str = ""
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def asks_header(self) -> bool:
        """Return whether a header asks for anything."""
        return bool(self.requires_python or self.dependencies)

    @property
    def any(self) -> bool:
        """Return whether anything has to be looked for."""
        return bool(self.asks_header or self.gpu or self.program or self.files or self.image)


@dataclass(frozen=True)
class Readiness:
    """What the place lacks. `python` is its interpreter's version, `unmet` what of the header that interpreter lacks.

    `trouble` says why the header can't be understood, `network` whether uv can fetch packages there. `gpus` are the
    names of its GPUs, None where they can't be seen, as `gpus_why` says.

    `no_python`: it has none, not even for the runner. `where` names what was looked at in place of the machine that the
    job gets, such as the login node of a cluster: a program or a file that it lacks may be on that machine, and its
    GPUs are the engine's to count.
    """

    python: str = ""
    unmet: tuple[str, ...] = ()
    trouble: str = ""
    uv: Uv = Uv.MISSING
    network: bool = True
    gpus: tuple[str, ...] | None = None
    gpus_why: str = ""
    no_program: bool = False
    no_modules: tuple[str, ...] = ()
    no_files: tuple[str, ...] = ()
    no_python: bool = False
    where: str = ""

    @property
    def starts_header(self) -> bool:
        """Return whether what the header asks for is there, or comes with uv."""
        return not self.unmet or (self.uv in (Uv.THERE, Uv.BROUGHT) and self.network)
