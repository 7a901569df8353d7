"""The usual terminal screens, rendered from fixed data."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from gpuwarden.core.errors import Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Finding
from gpuwarden.interfaces.cli import console, screen
from gpuwarden.interfaces.cli.approval import open_spending, spending_facts
from gpuwarden.interfaces.cli.main import cli
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import costs_of, error_reply, jobs_of, status_of, worded
from gpuwarden.lifecycle.monitoring.overview import cached_overview, job_page
from gpuwarden.lifecycle.monitoring.spending import charges, month_start
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from page_kit import World, busy_world
from wording import Wording


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A busy week, with this computer's time zone set to UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield busy_world(tmp_path / "home")
    time.tzset()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Collect all printed output, 120 columns wide."""
    text = io.StringIO()
    for name in ("out", "err"):
        monkeypatch.setattr(console, name, Console(width=120, file=text, highlight=False))
    return text


def test_overview_screens_have_the_expected_wording(world: World, printed: io.StringIO, wording: Wording) -> None:
    ctx = world.ctx
    since = month_start(world.clock.now())
    screen.status(worded(status_of(cached_overview(ctx, {"vastai": "no answer"})), in_commands))
    screen.jobs(worded(jobs_of(job_page(ctx, limit=5)), in_commands))
    screen.costs(worded(costs_of(charges(ctx, since), since, "platform"), in_commands))
    for text in screen.pending(what_waits(ctx)):
        console.out.print(text)
    shown = printed.getvalue()
    assert "gpuwarden approve r7mixt" in shown and "gpuwarden approve t4kz9q" in shown
    wording(shown)


def test_question_and_refusal_have_the_expected_wording(world: World, printed: io.StringIO, wording: Wording) -> None:
    facts = spending_facts(open_spending(world.ctx, "r7mixt").data, None)
    assert "$23.92/h" in facts[0]
    wording("\n".join(facts))
    step = do(Action.PULL, "to copy what exists", job_id="j1")
    finding = Finding(rule="TD-COPY-001", severity="error", message="what a rule found", fix=(step,))
    console.failed(worded(error_reply(Refused("what was refused", step, [finding])), in_commands))
    assert "TD-COPY-001" in printed.getvalue()
    wording(printed.getvalue())


def test_each_command_has_a_one_line_help(wording: Wording) -> None:
    shown = {name: command for name, command in cli.commands.items() if not command.hidden}
    assert {"submit", "check", "approve", "status"} <= shown.keys()
    wording("\n".join(f"{name}: {command.get_short_help_str(200)}" for name, command in sorted(shown.items())))
