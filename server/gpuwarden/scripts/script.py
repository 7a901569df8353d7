"""Read a training script's facts from its text. It is never run and never imported.

The header is inline script metadata as in PEP 723.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpuwarden.core.errors import BadRequest
from gpuwarden.scripts.ecosystem_tables import COLUMNS
from gpuwarden.scripts.hub_references import flagged_repos, is_repo_id, text_or_none
from gpuwarden.scripts.script_usage import Push, Setting, Uses, analyse
from gpuwarden.scripts.static_eval import Program, flags

# The reference expression of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


@dataclass(frozen=True)
class Header:
    """A script's inline metadata."""

    dependencies: tuple[str, ...] = ()
    requires_python: str | None = None


@dataclass(frozen=True)
class ScriptFacts:
    """The facts that rules read. `error` says why the text can't be parsed as Python; the rest is then empty."""

    header: Header | None = None
    third_party: tuple[str, ...] = ()
    error: str | None = None
    uses: Uses = field(default_factory=Uses)


def read_script(
    text: str, env: Mapping[str, str] | None = None, args: Sequence[str] = (), files: Sequence[str] = ()
) -> ScriptFacts:
    """Read a script as it would run with these variables, arguments and files in its working folder.

    Never raises for any content.
    """
    try:
        header = read_header(text)
        tree = parse(text)
        uses = analyse(Program(tree, env, args), files)
    except BadRequest as broken:
        return ScriptFacts(error=broken.message)
    except RecursionError:
        return ScriptFacts(error="the script can't be analysed: it nests too deeply")
    names = {name.partition(".")[0] for name, _ in uses.imports}
    own = {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
    return ScriptFacts(header, tuple(sorted(names - sys.stdlib_module_names - own)), uses=uses)


def read_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> ScriptFacts:
    """Return the facts of a command without its files: the commands of trl, and flags that name repos."""
    given = flags(argv)
    method = next((m for a, m in pairwise(argv) if a.rpartition("/")[2] == "trl" and m in COLUMNS), None)
    settings = {name: Setting(value, 0, "the command line") for name, value in given.items()} if method else {}
    push = (
        [Push(0, "--push_to_hub", text_or_none(given.get("hub_model_id")))] if given.get("push_to_hub") is True else []
    )
    uses = Uses(
        repos=tuple(u for u in flagged_repos(given) if is_repo_id(u.id)),
        methods=frozenset({method} if method else ()),
        settings=settings,
        pushes=tuple(push),
    )
    return ScriptFacts(uses=uses)


def decode(raw: bytes) -> str:
    """Return the text of a script file, by its own encoding line. Raises BadRequest when it is not text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise BadRequest(
            f"the script is not text in the encoding it claims: {error}", "Save it as UTF-8, without a declaration."
        ) from None


def read_header(text: str) -> Header | None:
    """Return the PEP 723 header, None without one. Raises BadRequest for a broken one."""
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
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"the script's header is not valid TOML: {error}", "Fix the `# /// script` block.") from error
    listed, python = table.get("dependencies", []), table.get("requires-python")
    if not isinstance(listed, list) or not all(isinstance(d, str) for d in listed):
        raise BadRequest("the header's `dependencies` is not a list of strings", 'Write dependencies = ["torch"].')
    if python is not None and not isinstance(python, str):
        raise BadRequest("the header's `requires-python` is not a string", 'Write requires-python = ">=3.11".')
    return Header(tuple(listed), python)


def parse(text: str) -> ast.Module:
    """Return the syntax tree. Raises BadRequest for anything that Python can't parse, however deep it nests."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about invalid escapes are not our concern
            return ast.parse(text)
    except SyntaxError as error:
        raise BadRequest(
            f"the script is not valid Python {sys.version_info.major}.{sys.version_info.minor}: "
            f"{error.msg} (line {error.lineno})",
            "Fix the syntax error in that line.",
        ) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise BadRequest(
            "the script can't be parsed: it nests too deeply or contains characters that Python does not allow",
            "Simplify it; a training script needs no such depth.",
        ) from error
