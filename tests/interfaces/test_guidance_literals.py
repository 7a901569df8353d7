"""Outside the interfaces, next steps are values: no sentence names a tool, a command, or an argument."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from gpuwarden.core.guidance import Action
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.cli.main import cli
from gpuwarden.interfaces.mcp.wording import TOOLS
from paths import ROOT

PACKAGE = ROOT / "server" / "gpuwarden"
COMMANDS = "|".join(sorted(cli.commands))
ARGUMENTS = sorted(
    {name for name in JobSpec.model_fields if "_" in name} | {"job_id", "dry_run", "log_cursor", "log_bytes"}
)
FORBIDDEN = re.compile(
    rf"\b(?:{'|'.join(TOOLS.values())})\b"
    rf"|\bgpuwarden (?:{COMMANDS})\b"
    rf"|(?<![\w./-])(?:{'|'.join(ARGUMENTS)})\b(?![/.=]?\w|/)"
    r"|`(?:env|inputs?|outputs?|secrets?|gpu|receipt|platform|script|command|args)`"
)
ALLOWED = {
    "rules/page.py": "names the command that writes the page, in the page",
    "profiles.py": "names the command that writes the generated blocks, in a page",
}


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the string literals of more than one word that aren't docstrings. An f-string's parts are joined."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if " " in text.strip() and id(node) not in documents | bare:
            yield node.lineno, text


@pytest.mark.slow
def test_only_interfaces_name_tools_commands_or_arguments() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{number}: {named[0]!r} in {text!r}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if "interfaces" not in file.relative_to(PACKAGE).parts and str(file.relative_to(PACKAGE)) not in ALLOWED
        for number, text in sentences(ast.parse(file.read_text("utf-8")))
        if (named := FORBIDDEN.search(text))
    ]
    assert not found, "\n".join(found)


def test_scan_catches_tool_command_and_argument_names() -> None:
    caught = [
        "Call check_job.",
        "Run gpuwarden check.",
        "Set timeout_s.",
        "Put it into `outputs`.",
        "job_id is not known",
    ]
    assert all(FORBIDDEN.search(text) for text in caught)
    assert not any(FORBIDDEN.search(text) for text in ("/data/check_jobs", "gpuwarden checks", "/x/timeout_s.py"))


def test_tools_are_actions_and_action_commands_exist() -> None:
    from gpuwarden.interfaces.cli import wording

    assert {*TOOLS, *wording.COMMANDS} <= set(Action)
    assert {name.split()[0] for name in wording.COMMANDS.values()} <= set(cli.commands)
