"""Bundle the runner's modules into one file, so that an upload never lacks a module.

The bundle is not a zip file, because Python compiles the modules in a zip file at every start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpuwarden.remote.runner.crash import HEADING

MODULES: Final = Path(__file__).with_name("runner")
_LAST: Final = "verbs"  # imports all others, directly or indirectly
_FUTURE: Final = "from __future__ import annotations\n"
_NEAR = re.compile(r"^from gpuwarden\.remote\.runner\.(\w+) import (?:\([^)]*\)|[^(\n]*)$", re.MULTILINE)


def one_file() -> bytes:
    """Return the modules as one file, each after the modules that it imports. The result is deterministic.

    All modules share one namespace. Imports between modules are replaced with blank lines, so that line 7 of a module
    is the 7th line after its heading.
    """
    texts: dict[str, str] = {}
    _gather(_LAST, texts)
    parts = [(MODULES / "__init__.py").read_text("utf-8"), "\n", _FUTURE]
    for module, text in texts.items():
        plain = _NEAR.sub(lambda found: "\n" * found.group().count("\n"), text).replace(_FUTURE, "\n", 1)
        parts.append(f"\n\n{HEADING}{module}\n{plain}")
    return "".join(parts).encode()


def _gather(module: str, texts: dict[str, str]) -> None:
    text = (MODULES / f"{module}.py").read_text("utf-8")
    for near in _NEAR.findall(text):
        if near not in texts:
            _gather(near, texts)
    texts[module] = text
