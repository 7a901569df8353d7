"""Render the pages: fill templates with escaped values, and format values as readable text.

A view is a dictionary of strings, lists of rows, and numbers. The first response renders it as HTML. Later responses
send it as JSON, and the page's script writes the strings into the same elements. Both show the same content, and no
string is interpreted as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from gpuwarden.core.guidance import Action, NextStep
from gpuwarden.core.sanitize import plain, scrubbed, unquoted
from gpuwarden.interfaces.cli.wording import COMMANDS, command, in_command
from gpuwarden.lifecycle.context import Context

Row: TypeAlias = dict[str, str]
View: TypeAlias = dict[str, Any]
HERE: Final = Path(__file__).resolve().parent
NAVIGATION: Final = (
    ("/", "Now"),
    ("/jobs", "Jobs"),
    ("/money", "Money"),
    ("/platforms", "Platforms"),
    ("/knowledge", "Knowledge"),
)
ACTIVE: Final = frozenset(
    {"accepted", "provisioning", "submitting", "queued", "running", "preempted", "paused", "unknown"}
)
"""States of a job that has not ended."""


def shown(text: object) -> str:
    """Return untrusted text for display: without escape sequences, invisible characters and quotation markers."""
    return unquoted(plain(str(text)))


def size(count: float | None) -> str:
    """Format a number of bytes: `3.2 GiB`."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def step_rows(steps: Sequence[NextStep]) -> list[Row]:
    """Return next steps as rows: a command to copy with its purpose, or a sentence."""
    return [
        {"key": str(n), "command": command(step), "text": shown(step.purpose.lstrip("; "))}
        if step.action in COMMANDS
        else {"key": str(n), "command": "", "text": shown(in_command(step))}
        for n, step in enumerate(steps)
    ]


def first_command(steps: Sequence[NextStep]) -> str:
    """Return the command of the first step that has one, ready to paste; empty if no step has a command."""
    return next((command(step) for step in steps if step.action in COMMANDS and step.action != Action.MANUAL), "")


def clean(ctx: Context, view: View) -> View:
    """Return a view without the secrets of this process and its jobs."""
    found: View = scrubbed(view, ctx.hidden(view))
    return found


@cache
def environment() -> Environment:
    """Return the template environment. A missing name is an error, and every value is escaped."""
    loader = FileSystemLoader(HERE / "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals["navigation"] = NAVIGATION
    return made


def page(template: str, view: View, *, status: int = 200, **more: Any) -> HTMLResponse:
    """Render a page from a template and a view."""
    text = environment().get_template(template).render(view=view, **more)
    return HTMLResponse(text, status_code=status, headers={"cache-control": "no-store"})
