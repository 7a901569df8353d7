"""A job's requirements for a machine, and the result of checking them: interpreter, packages, GPUs and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Uv(StrEnum):
    """How uv gets onto a machine.

    BROUGHT: gpuwarden copies uv to the machine, as the policy allows. UNUSED: the backend does not use uv.
    """

    THERE = "there"
    BROUGHT = "brought"
    MISSING = "missing"
    UNUSED = "unused"


@dataclass(frozen=True)
class Needs:
    """A job's requirements for the machine. `requires_python` and `dependencies` come from its script's header.

    `program` is the first word of its command, `modules` lists modules that its Python must be able to import, and
    `files` lists absolute paths in the command. `image` is the job's container image.
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
        """Return whether the script's header has requirements."""
        return bool(self.requires_python or self.dependencies)

    @property
    def any(self) -> bool:
        """Return whether the job has any requirement to check."""
        return bool(self.asks_header or self.gpu or self.program or self.files or self.image)


@dataclass(frozen=True)
class Readiness:
    """The requirements that a machine does not meet, and the machine's GPUs.

    `python` is the version of its interpreter; `unmet` lists the header's requirements that are not installed for it.
    `trouble` is the reason why the header can't be parsed; `network` states whether uv can download packages there.
    `gpus` lists the names of its GPUs, or is None if they can't be read, in which case `gpus_why` is the reason.
    `no_python` is true if the machine has no Python at all, not even for the runner.

    `where` names the machine that was checked instead of the job's own, such as a cluster's login node. A program
    or a file that is missing on the checked machine may exist on the job's machine, and the GPUs are counted by the
    engine.
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
        """Return whether the header's requirements are installed, or uv can install them."""
        return not self.unmet or (self.uv in (Uv.THERE, Uv.BROUGHT) and self.network)
