"""Define the nodes of the tree that represents a pickle. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuwarden.checkpoints.file_model import short


@dataclass(frozen=True)
class Global:
    """A name that unpickling the file would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return short(f"{self.module}.{self.name}", 100)


@dataclass(eq=False)
class Call:
    """A call to `func` with `args` that unpickling the file would make; `state` would be set on the result.

    `new` is true if the opcode creates an instance with `__new__` without calling `__init__`.
    """

    func: Any
    args: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    new: bool = False

    def __repr__(self) -> str:
        """Return only the name, because the arguments may be enormous or contain the call itself."""
        return f"a call of {self.func}" if isinstance(self.func, Global) else "a call"


@dataclass(frozen=True, eq=False)
class Persistent:
    """A reference to an object outside the pickle, such as a torch storage."""

    pid: Any

    def __repr__(self) -> str:
        """Return fixed text without any part of the reference, because the reference may contain anything."""
        return "a reference"


@dataclass
class Tree:
    """The result of reading a pickle.

    `named` contains the imported globals, `odd` the calls and changes that are not known to be harmless, and `opcodes`
    the opcodes that torch never writes.
    """

    root: Any = None
    named: dict[Global, None] = field(default_factory=dict)
    persistent: list[Persistent] = field(default_factory=list)
    odd: dict[str, None] = field(default_factory=dict)
    opcodes: dict[int, None] = field(default_factory=dict)
    end: int = 0
