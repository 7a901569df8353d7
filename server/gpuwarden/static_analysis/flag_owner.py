"""Decide whether a script declares a command-line flag, without running the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuwarden.core.errors import BadRequest
from gpuwarden.static_analysis.package_checks import Libraries
from gpuwarden.static_analysis.parsing import parse
from gpuwarden.static_analysis.script import ScriptFacts, read_script

_READS_WORDS = re.compile(r"argv|[Pp]ars|\b(absl|click|fire|typer|tyro|hydra|draccus|cyclopts|docopt|argh|plac)\b")


@dataclass(frozen=True)
class ScriptFlags:
    """The flags in one script's text, and the facts about the script (None if it can't be parsed)."""

    text: str = ""
    literal: frozenset[str] = frozenset()
    facts: ScriptFacts | None = None

    def declares(self, word: str) -> bool | None:
        """Return whether the script declares an argument's flag, without abbreviation; None if that is unknown."""
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if {flag, name} & self.literal:
            return True
        if self.facts is None:
            return None
        if self.facts.uses.typed is not None:
            return name in self.facts.uses.typed.declared
        if _READS_WORDS.search(self.text) is None:
            return False
        line, header = self.facts.uses.command_line, self.facts.header
        if line is None:
            return None
        uses = self.facts.uses
        given = header.dependencies if header else None
        return Libraries(given, uses.package_use, uses.imports).declares(line, name)


def flags_of(text: str, words: Sequence[str]) -> ScriptFlags:
    """Return the flags of a script that is called with these arguments."""
    try:
        tree, _ = parse(text)
    except BadRequest:
        return ScriptFlags(text)
    literal = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    fields = {
        field.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    facts = read_script(text, {}, [*words, "--help"])  # a command line without flags is not analyzed
    return ScriptFlags(text, frozenset(w for w in literal if w.startswith("-")) | fields, facts)
