"""What a training script says about itself, read from its text. It is never run and never imported.

The header is inline script metadata as in PEP 723.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import warnings
from dataclasses import dataclass

from gpuwarden.core.errors import BadRequest

# The reference expression of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


@dataclass(frozen=True)
class Header:
    """A script's inline metadata."""

    dependencies: tuple[str, ...] = ()
    requires_python: str | None = None


@dataclass(frozen=True)
class ScriptFacts:
    """What the rules read. `error` says why the text is no usable Python; the rest is then empty."""

    header: Header | None = None
    third_party: tuple[str, ...] = ()
    error: str | None = None


def read_script(text: str) -> ScriptFacts:
    """Read a script. Never raises for what the text holds."""
    try:
        header = read_header(text)
        tree = parse(text)
    except BadRequest as broken:
        return ScriptFacts(error=broken.message)
    return ScriptFacts(header, tuple(sorted(_imports(tree) - sys.stdlib_module_names)))


def read_header(text: str) -> Header | None:
    """The PEP 723 header, None without one. Raises BadRequest for a broken one."""
    text = text.replace("\r\n", "\n")
    blocks = [m for m in _BLOCK.finditer(text + "\n") if m["type"] == "script"]
    if not blocks:
        if re.search(r"(?m)^#\s*///\s*script\s*$", text):
            raise BadRequest(
                "the script's `# /// script` header is not closed, or one of its lines does not start with '# '",
                "Close it with a line `# ///` and start every line of it with '# '.",
            )
        return None
    if len(blocks) > 1:
        raise BadRequest("the script has more than one `# /// script` header", "Keep one.")
    lines = blocks[0]["content"].splitlines()
    content = "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    return _header(content)


def _header(content: str) -> Header:
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"the script's header is no TOML: {error}", "Mend the `# /// script` block.") from error
    listed, python = table.get("dependencies", []), table.get("requires-python")
    if not isinstance(listed, list) or not all(isinstance(d, str) for d in listed):
        raise BadRequest("the header's `dependencies` is no list of texts", 'Write dependencies = ["torch"].')
    if python is not None and not isinstance(python, str):
        raise BadRequest("the header's `requires-python` is no text", 'Write requires-python = ">=3.11".')
    return Header(tuple(listed), python)


def parse(text: str) -> ast.Module:
    """The syntax tree. Raises BadRequest for anything that Python can't parse, however deep it nests."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape is the script's business
            return ast.parse(text)
    except SyntaxError as error:
        raise BadRequest(
            f"the script is no valid Python {sys.version_info.major}.{sys.version_info.minor}: "
            f"{error.msg} (line {error.lineno})",
            "Mend that line.",
        ) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise BadRequest(
            "the script can't be parsed: it nests too deeply or holds characters that Python does not allow",
            "Simplify it; a training script needs no such depth.",
        ) from error


def _imports(tree: ast.Module) -> set[str]:
    """The top-level names that a script imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found
