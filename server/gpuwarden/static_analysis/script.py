"""Read a training script's facts from its text, without running or importing it.

The header is inline script metadata (PEP 723).
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gpuwarden.core.errors import BadRequest
from gpuwarden.static_analysis.bundle import (
    PACKAGE,
    Bundle,
    bundled,
    holds_package,
    missing_module,
    split,
    with_package,
)
from gpuwarden.static_analysis.ecosystem_tables import COLUMNS
from gpuwarden.static_analysis.grammar_rewriting import Construct
from gpuwarden.static_analysis.hub_references import flagged_repos, is_repo_id, text_or_none
from gpuwarden.static_analysis.newer_grammar import NEWEST, described, newest
from gpuwarden.static_analysis.parsing import parse
from gpuwarden.static_analysis.script_usage import Push, Setting, Uses, analyse
from gpuwarden.static_analysis.static_eval import Program, flags

MAX_HEADER, MAX_HEADER_LINE = 32_000, 2_000
"""Maximum number of characters in a header and in one line. tomllib's memory use grows with the square of a dotted
key's length."""
_RELEASES = tuple((3, minor) for minor in range(6, 31))
_PATCHES = range(40)
_START = re.compile(r"# /// ([a-zA-Z0-9-]+)")


@dataclass(frozen=True)
class Header:
    """A script's inline metadata. `configured` is true if it contains settings for uv, such as package indexes."""

    dependencies: tuple[str, ...] = ()
    requires_python: str | None = None
    configured: bool = False


@dataclass(frozen=True)
class ScriptFacts:
    """The facts about a script. `error` is the reason why the text can't be parsed; `uses` is then empty.

    `grammar` is the construct that needs the latest Python, or None if Python 3.11 can parse the script. `newer` is
    true if the header requires a Python release whose grammar is not supported. `fetched` is the digest of a script
    that was downloaded.
    """

    header: Header | None = None
    third_party: tuple[str, ...] = ()
    error: str | None = None
    newer: bool = False
    grammar: Construct | None = None
    uses: Uses = field(default_factory=Uses)
    fetched: str = ""


def read_script(
    text: str, env: Mapping[str, str] | None = None, args: Sequence[str] = (), files: Sequence[str] = ()
) -> ScriptFacts:
    """Analyze a script as it would run with these variables, arguments and files in its working folder.

    Errors are returned in `error`, never raised.
    """
    header = None
    try:
        header = read_header(text)
        bundle, tree, constructs = parse_bundle(text)
        grammar = newest(constructs)
        if header is not None and (misfit := _misfit(bundle.script, header, grammar)):
            return ScriptFacts(header, error=misfit, grammar=grammar)
        if bundle.sources and (lacking := missing_module(tree, bundle)):
            return ScriptFacts(header, error=f"the script imports {lacking}, which is not in its package {PACKAGE}")
        uses = analyse(Program(with_package(tree, bundle), env, args), files)
        if bundle.sources and not bundle.shipped:
            uses = replace(uses, unseen=(*uses.unseen, f"the changed package {PACKAGE}"))
    except BadRequest as broken:
        if header is not None and versions_allowed(header)[:1] > [NEWEST]:
            message = (
                f"{broken.message}; the header requires Python {header.requires_python}, whose grammar may allow it"
            )
            return ScriptFacts(header, error=message, newer=True, uses=Uses(unseen=("a script that was not read",)))
        return ScriptFacts(error=broken.message)
    except RecursionError:
        return ScriptFacts(error="the script can't be analyzed: it nests too deeply")
    names = {name.partition(".")[0] for name, _ in uses.imports}
    own = {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
    own |= {PACKAGE} if bundle.sources else set()
    own |= {path.removeprefix("./").partition("/")[0] for path in uses.local}  # a package that the script downloads
    return ScriptFacts(header, tuple(sorted(names - sys.stdlib_module_names - own)), grammar=grammar, uses=uses)


def parse_bundle(text: str) -> tuple[Bundle, ast.Module, tuple[Construct, ...]]:
    """Return a script's bundle, the tree without the package, and the constructs that Python 3.11 does not support.

    Raises BadRequest for text that can't be parsed, and for a package that is not in the form that `bundled` writes;
    for example, if the loader was changed, or if code follows the package.
    """
    bundle = split(text)
    if bundle.sources:
        tree, constructs = parse(bundle.script)
        if bundled(bundle.script, tree, bundle.sources) == text:
            return bundle, tree, constructs
    if holds_package(text):
        raise BadRequest(
            f"the package {PACKAGE} at the end of the script or its loader was changed, or lines were added after it",
            "Change only the lines of the script itself, or pass the script without the package.",
        )
    return Bundle(text), *parse(text)


def read_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> ScriptFacts:
    """Return the facts that follow from a command line alone: from trl's commands, and from flags that name repos."""
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
    """Decode a script file with the encoding that it declares. Raises BadRequest if it is not text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise BadRequest(
            f"the script can't be decoded in its declared encoding: {error}",
            "Save it as UTF-8, without an encoding declaration.",
        ) from None


def read_header(text: str) -> Header | None:
    """Return the PEP 723 header, or None if the script has none. Raises BadRequest for an invalid header."""
    text = text.replace("\r\n", "\n")
    blocks = [content for kind, content in header_blocks(text.split("\n")) if kind == "script"]
    if not blocks:
        if re.search(r"(?m)^#[ \t]*///[ \t]*script[ \t]*$", text):
            raise BadRequest(
                "the script's `# /// script` header is not closed, or one of its lines does not start with '# '",
                "Close the header with a line `# ///`, and start each of its lines with '# '.",
            )
        return None
    if len(blocks) > 1:
        raise BadRequest("the script has more than one `# /// script` header", "Keep only one header.")
    lines = [line[2:] if line.startswith("# ") else line[1:] for line in blocks[0]]
    content = "\n".join(lines)
    if len(content) > MAX_HEADER or max(map(len, lines)) > MAX_HEADER_LINE:
        raise BadRequest(
            f"the script's header exceeds {MAX_HEADER:,} characters, or one of its lines exceeds {MAX_HEADER_LINE:,}",
            "Put each requirement on its own line.",
        )
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"the script's header is not valid TOML: {error}", "Fix the `# /// script` block.") from error
    listed, python = table.get("dependencies", []), table.get("requires-python")
    if not isinstance(listed, list) or not all(isinstance(d, str) for d in listed):
        raise BadRequest("the header's `dependencies` is not a list of strings", 'Write dependencies = ["torch"].')
    if python is not None and not isinstance(python, str):
        raise BadRequest("the header's `requires-python` is not a string", 'Write requires-python = ">=3.11".')
    tools = table.get("tool")
    return Header(tuple(listed), python, isinstance(tools, dict) and bool(tools.get("uv")))


def header_blocks(lines: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the type and lines of each PEP 723 block, as the regular expression in PEP 723 does, but in linear time."""
    at = 0
    while at < len(lines):
        begin, at = at, at + 1
        if start := _START.fullmatch(lines[begin]):
            end = begin + 1
            while end < len(lines) and (lines[end] == "#" or lines[end].startswith("# ")):
                end += 1
            closed = next((n for n in range(end - 1, begin + 1, -1) if lines[n] == "# ///"), None)
            at = end if closed is None else closed + 1
            if closed is not None:
                yield start[1], lines[begin + 1 : closed]


def with_grammar(header: Header | None, grammar: Construct | None) -> Header | None:
    """Return a header, extended so that it requires a Python release that can parse the script."""
    if grammar is None or versions_allowed(header or Header())[:1] >= [grammar.version]:
        return header
    asked = [header.requires_python] if header and header.requires_python else []
    return replace(header or Header(), requires_python=",".join([*asked, ">={}.{}".format(*grammar.version)]))


def start_header(text: str) -> Header | None:
    """Return a script's header, extended so that it requires a Python release that can parse the script. Raises
    BadRequest for an invalid header.
    """
    header = read_header(text)
    try:
        return with_grammar(header, newest(parse(text)[1]))
    except BadRequest:
        return header


def versions_allowed(header: Header) -> list[tuple[int, int]]:
    """Return the Python 3 releases that a header allows, oldest first; empty if its `requires-python` is invalid."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not header.requires_python:
        return list(_RELEASES)
    try:
        wanted = SpecifierSet(header.requires_python)
    except InvalidSpecifier:
        return []
    return [v for v in _RELEASES if any(wanted.contains(f"{v[0]}.{v[1]}.{patch}") for patch in _PATCHES)]


def _misfit(text: str, header: Header, grammar: Construct | None) -> str | None:
    """Return the reason why the Python releases that a header allows can't parse a script; None if one of them can."""
    allowed = versions_allowed(header)
    if not allowed:
        return None
    last = allowed[-1]
    if grammar is not None and last < grammar.version:
        return f"{described(grammar)}, and the header's requires-python is {header.requires_python!r}"
    if grammar is None and last < sys.version_info[:2]:
        try:
            ast.parse(text.removeprefix("\ufeff"), feature_version=last)
        except SyntaxError as error:
            return (
                f"the script is not valid Python {last[0]}.{last[1]}, the latest that its requires-python "
                f"{header.requires_python!r} allows: {error.msg} (line {error.lineno})"
            )
    return None
