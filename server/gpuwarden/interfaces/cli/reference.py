"""Reference commands: history, search, diagnose, rules, profiles."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from gpuwarden.core.errors import NotFound
from gpuwarden.core.plural import counted
from gpuwarden.interfaces.cli.base import JSON, answer, cli, emit, open_context, redacted


@cli.command()
@click.argument("subject", required=False)
@JSON
def history(subject: str | None, as_json: bool) -> int:
    """Show the ledger's events.

    SUBJECT is a job (with its leases and teardowns), a ticket or a receipt; by default all events are shown.
    """
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.results.history import quoted_events
    from gpuwarden.lifecycle.records import story

    rows = [e.as_dict() for e in story(open_context().ledger, subject)]
    if subject and not rows:
        raise NotFound(f"this ledger has no event about {subject!r}", "gpuwarden history shows all events.")
    if as_json:
        emit({"ok": True, "code": "ok", "events": quoted_events(rows)})
    else:
        console.history(redacted(rows))
    return 0


@cli.command()
@click.argument("query", nargs=-1)
@click.option("--limit", type=click.IntRange(1, 10), default=5, show_default=True, help="Maximum number of results.")
@JSON
def search(query: tuple[str, ...], limit: int, as_json: bool) -> int:
    """Look up the cause and fix of a failure.

    QUERY is a symptom in your own words, a log line, or the id of an entry to show in full. If QUERY is `-`, or
    if it is omitted and input is piped, the query is read from standard input.
    """
    from gpuwarden.interfaces.results.references import LEAD, entry, look_up
    from gpuwarden.knowledge.log_lines import read_log

    words = " ".join(query).strip()
    if not query or query == ("-",):
        if not query and (sys.stdin is None or sys.stdin.isatty()):
            raise click.UsageError("Missing QUERY.", click.get_current_context())
        words = read_log(sys.stdin.buffer).strip()
    whole = entry(words)
    if whole is not None:
        return answer(whole, as_json, "entry")
    reply = look_up(words, limit)
    if reply.hits:  # only an MCP client can use a resource's URI
        reply.hint = f"{LEAD} `gpuwarden search ID` shows one full entry."
    return answer(reply, as_json, "found")


@cli.command()
@click.argument("file", type=click.File("rb"))
@click.option("--exit-code", type=click.IntRange(-64, 255), help="The run's exit code, if the log does not contain it.")
@click.option("--limit", type=click.IntRange(1, 10), default=3, show_default=True, help="Maximum number of entries.")
@JSON
def diagnose(file: BinaryIO, exit_code: int | None, limit: int, as_json: bool) -> int:
    """Diagnose a log: the failure, its location and known causes.

    FILE is a log of any size, or - for standard input. The exit code is 0 for every diagnosis.
    """
    from gpuwarden.interfaces.results.diagnosing import diagnose_log
    from gpuwarden.knowledge.log_lines import read_log

    return answer(diagnose_log(read_log(file), exit_code, limit), as_json, "diagnosed")


def _written(changed: int, as_json: bool) -> int:
    if as_json:
        emit({"ok": True, "code": "ok", "changed": changed})
    else:
        click.echo(f"{counted(changed, 'file')} changed")
    return 0


@cli.command()
@click.argument("rule_id", required=False)
@click.option("--write", is_flag=True, hidden=True, help="Regenerate the rules page.")
@JSON
def rules(rule_id: str | None, write: bool, as_json: bool) -> int:
    """List the rules of both gates, or show one with its reason."""
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.cli.wording import in_commands
    from gpuwarden.rules.catalog import all_rules
    from gpuwarden.rules.page import write_page

    if write:
        from gpuwarden.interfaces.mcp.wording import in_calls

        return _written(write_page(in_calls), as_json)
    found = [r for r in all_rules() if rule_id is None or r.id == rule_id.upper()]
    if not found:
        raise NotFound(f"unknown rule {rule_id!r}", "gpuwarden rules lists all rules.")
    rows = [
        {
            "id": r.id,
            "gate": r.gate,
            "severity": r.severity,
            "title": r.title,
            "why": " ".join(r.why.split()),
            "example": r.example,
            "instead": r.instead,
            "fix": in_commands(r.fix),
        }
        for r in found
    ]
    if as_json:
        emit({"ok": True, "code": "ok", "rules": rows})
    else:
        console.rules(rows, full=rule_id is not None)
    return 0


@cli.command()
@click.argument("name", required=False)
@click.option("--write", is_flag=True, hidden=True, help="Regenerate the generated blocks in the profiles.")
@JSON
def profiles(name: str | None, write: bool, as_json: bool) -> int:
    """List the platforms, or show one.

    A profile shows which storage survives a stop, which storage is billed after the stop, and the platform's automatic
    actions.
    """
    from gpuwarden.interfaces.cli import console
    from gpuwarden.profiles import profile_file, rewrite_blocks

    if write:
        return _written(rewrite_blocks(), as_json)
    ctx = open_context()
    if name is None:
        titles = {p: ctx.profile(p).title for p in ctx.platforms()}
        emit({"ok": True, "code": "ok", "platforms": titles}) if as_json else console.platforms(titles)
        return 0
    profile = ctx.profile(name) if "/" in name else ctx.family(name)
    noted = ctx.notes.of(name).model_dump(exclude_none=True)
    if as_json:
        emit({"ok": True, "code": "ok", "profile": profile.model_dump(mode="json"), "notes": noted})
    else:
        console.profile(profile_file(profile.id, ctx.own_profiles), noted)
    return 0
