"""Define the two kinds of plug-ins that examine checkpoints, and their interfaces. Standard library only.

A format reads one file. It has `NAME`, `LOAD`, `claims(name, head)` and `read(source, limits)`, which returns an
`Anatomy` or raises `Broken` or `Doubtful`. `LOAD` is "parsed" if `read` parses the complete file, "tensors" if a
separate process loads the file's tensors, and "" if gpuwarden has no loader for the format. A layout checks one folder.
It has `NAME`, `claims(folder)` and `judge(folder, found)`, which returns a `Judgement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuwarden.checkpoints import formats, layouts
from gpuwarden.core.contract import TEXT, Contract, one_of
from gpuwarden.core.registry import Registry


def _name_taken(module: Any, name: str) -> Iterator[str]:
    built_in = FORMATS.built_in()
    if name not in built_in and module.NAME in {FORMATS.load(n).NAME for n in built_in}:
        yield f"its NAME {module.NAME!r} is also the name of a built-in format"


FORMATS = Registry(
    "format",
    formats,
    Contract(
        home=__name__,
        values={"NAME": TEXT, "LOAD": one_of("parsed", "tensors", "")},
        functions={"claims": ("name", "head"), "read": ("source", "limits")},
        rest=_name_taken,
    ),
)
LAYOUTS = Registry(
    "layout",
    layouts,
    Contract(home=__name__, values={"NAME": TEXT}, functions={"claims": ("folder",), "judge": ("folder", "found")}),
)
