"""Generate the page that lists all rules, `references/rules.md`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gpuwarden.core.guidance import NextStep
from gpuwarden.core.rules import Rule
from gpuwarden.data import data_dir
from gpuwarden.rules.catalog import built_in_rules

Words: TypeAlias = Callable[[Sequence[NextStep]], str]
HEAD = """\
---
title: Rules for the two gates
summary: Every preflight and teardown rule with its id, severity, reason and fix.
sources:
  - server/gpuwarden/rules
---
<!-- Written by `gpuwarden rules --write` from server/gpuwarden/rules/. Change the rule, not this page. -->

`PF` rules check a submission, and `TD` rules check a teardown. An *error* closes the gate. *Unknown* means that a
check could not be completed, and also closes the gate. A *warning* is shown but does not close the gate. The severity
of a finding may differ from its rule's usual severity. Ids are never reused.

| rule | severity | requirement |
|---|---|---|
"""


def render_page(words: Words) -> str:
    """Return the text of the page. `words` renders the fixes for one interface."""
    rules = built_in_rules()
    rows = "".join(f"| {r.id} | {r.severity} | {r.title} |\n" for r in rules)
    return HEAD + rows + "".join(render_rule(r, words) for r in rules)


def render_rule(rule: Rule[Any], words: Words) -> str:
    """Return a rule's section: its reason and fix, wrapped to 120 columns, and its two examples as code."""
    why, way_out = (
        textwrap.fill(f"{label}: {' '.join(text.split())}", 120, break_long_words=False, break_on_hyphens=False)
        for label, text in (("Why", rule.why), ("Fix", words(rule.fix)))
    )
    example, instead = (
        f"{label}:\n\n```python\n{code}\n```" for label, code in (("Example", rule.example), ("Instead", rule.instead))
    )
    title = f"## {rule.id}: {rule.title.rstrip('.')}"
    return "\n" + f"{title}\n\n{why}\n\n{example}\n\n{instead}\n\n{way_out}" + "\n"


def page_file() -> Path:
    """Return the path of the page."""
    return data_dir("references") / "rules.md"


def write_page(words: Words) -> int:
    """Write the page; return the number of changed files, 0 or 1."""
    file, text = page_file(), render_page(words)
    if file.exists() and file.read_text("utf-8") == text:
        return 0
    file.write_text(text, "utf-8")
    return 1
