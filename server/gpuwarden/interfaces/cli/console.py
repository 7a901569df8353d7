"""Print replies at a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import plain, unfenced, unquoted
from gpuwarden.interfaces.cli.drawing import auto_teardown_lines, local, progress_of, sparkline, zone
from gpuwarden.interfaces.results.base import RefusalReply

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.checkpoints.budget import ByteCount
    from gpuwarden.interfaces.cli.knowledge_maintenance import (
        DraftReply,
        IssuesReply,
        LessonReply,
    )
    from gpuwarden.interfaces.cli.notes_service import NotesReply
    from gpuwarden.interfaces.cli.policy_choice import PolicyReply
    from gpuwarden.interfaces.cli.tokens import TokensReply
    from gpuwarden.interfaces.hooks.install import HooksReply
    from gpuwarden.interfaces.results import (
        AlertReply,
        CheckReply,
        ErrorReply,
        FindingReply,
        InstancesReply,
        MeterReply,
        MetricsReply,
        OffersReply,
        PullReply,
        Result,
        SubmitReply,
        TeardownReply,
        WatchReply,
    )
    from gpuwarden.interfaces.results.check import DiagnosisReply
    from gpuwarden.interfaces.results.decisions import DecisionReply
    from gpuwarden.interfaces.results.diagnosing import DiagnoseReply
    from gpuwarden.interfaces.results.nodes import NodesReply
    from gpuwarden.interfaces.results.references import EntryReply, SearchReply
    from gpuwarden.interfaces.results.rehearsal import RehearsalReply
    from gpuwarden.interfaces.results.version_skew import SkewReply
    from gpuwarden.interfaces.setup.use_case import SetupReply
    from gpuwarden.remote.transfer.receive import Progress

PIPED = 160


def _console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or wide enough not to break names if the output is a pipe or a file."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=PIPED if piped else None)


out = _console()
err = _console(stderr=True)

COLORS = {
    "error": "red", "unknown": "magenta", "warning": "yellow", "info": "cyan",
    "succeeded": "green", "running": "green", "failed": "red", "refuted": "red", "proven": "green",
}  # fmt: skip


def shown(text: str) -> str:
    """Return text that is safe to print: without cursor movements, markup or the marks around quoted text."""
    return escape(unquoted(plain(text)))


def colored(word: str) -> str:
    """Return a word in its color, or unchanged if it has no color."""
    color = COLORS.get(word)
    return f"[{color}]{escape(word)}[/]" if color else escape(word)


def when(at: float | None) -> str:
    """Format a time in the local time zone, to the second."""
    return local(at, "%Y-%m-%d %H:%M:%S")


def failed(reply: ErrorReply) -> None:
    """Print an error: its code, message, findings and next step."""
    err.print(f"[red bold]{shown(reply.code)}[/] {shown(reply.message)}")
    if isinstance(reply, RefusalReply):
        _findings(reply.findings, err)
    _hint(reply, err)


def _findings(findings: list[FindingReply], console: Console = out) -> None:
    if not findings:
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for f in findings:
        fix = f"\n[dim]{shown(f.fix)}[/]" if f.fix else ""
        table.add_row(colored(f.severity), f"[bold]{f.rule}[/]", shown(f.message) + fix)
    console.print(table)


def _hint(reply: Result | AlertReply, console: Console = out) -> None:
    if reply.hint:
        console.print(f"[dim]next:[/] {shown(reply.hint)}", soft_wrap=True)


def warnings(reply: Result) -> None:
    """Print a reply's warnings, before the rest of the reply."""
    for text in getattr(reply, "warnings", ()):
        out.print(f"[yellow]warning[/] {shown(text)}", soft_wrap=True)


def message(reply: Result) -> None:
    """Print a reply's message and its hint."""
    if reply.message:
        out.print(shown(reply.message))
    _hint(reply)


def submitted(reply: SubmitReply) -> None:
    """Print the reply to a submission."""
    _findings(reply.findings)
    if reply.price_usd_per_hour is not None:
        source = shown(reply.price_source or "")
        bound = at_most(reply.worst_cost_usd, reply.automatic_teardown)
        out.print(f"price {usd_per_hour(reply.price_usd_per_hour)} ({source}), {bound}")
    for choice in reply.choices:
        where = f"{choice.platform} {choice.gpu or ''}".strip()
        worst = at_most(choice.worst_cost_usd, reply.automatic_teardown)
        out.print(f"  on {shown(where)}: {usd_per_hour(choice.price_usd_per_hour)}, {worst}")
    if reply.receipt:
        out.print(f"receipt [bold]{reply.receipt}[/], valid until {when(reply.receipt_expires_at)} {zone()}")
    message(reply)


def rehearsal(reply: RehearsalReply) -> None:
    """Print a rehearsal's result: the stages reached, the substitutes, and the failed line."""
    out.print(" ".join(["[dim]reached[/]", *(f"[green]{shown(stage)}[/]" for stage in reply.reached)]))
    for text in reply.substitutes:
        out.print(f"[dim]substitute[/] {shown(text)}")
    if reply.lacking:
        out.print(f"[dim]not installed here[/] {shown(', '.join(reply.lacking))}")
    if reply.log:
        out.print(shown(unfenced(reply.log)), style="dim", soft_wrap=True)
    if reply.source:
        out.print(f"line {reply.line}: {shown(reply.source)}")
    if reply.seconds:
        out.print(f"[dim]{reply.seconds:.0f} s, {reply.cpu_s:.0f} s of CPU time, {reply.peak_mb:,.0f} MB[/]")
    message(reply)


def nodes(reply: NodesReply) -> None:
    """Print the result and the details of each check of several nodes, and the variables for every rank."""
    colors = {"yes": "green", "no": "red", "unknown": "yellow", "note": "dim"}
    for check, found in reply.checks.items():
        out.print(f"[{colors[found]}]{found:8}[/]{check.replace('_', ' ')}")
        for one in (f for f in reply.details if f.check == check):
            where = f"{shown(one.node)}: " if one.node else ""
            out.print(f"          [{colors[one.answer]}]{one.answer}[/] {where}{shown(one.message)}", soft_wrap=True)
    if reply.environment:
        pairs = " ".join(f"{name}={value}" for name, value in reply.environment.items())
        out.print(f"for every rank: {shown(pairs)}", soft_wrap=True)
    if reply.meeting_place:
        out.print(f"rendezvous: {shown(reply.meeting_place)}")
    for name, key in reply.new_host_keys.items():
        out.print(f"[yellow]first contact[/] with {shown(name)}: verify its host key {shown(key)}")
    message(reply)


def reported(reply: MetricsReply) -> None:
    """Print the metrics that a job reported, one per line, then its alerts."""
    for one in reply.metrics:
        step = f"step {one.step:,}" if one.step is not None else "no steps"
        value = "not finite" if one.last is None else f"{one.last:.4g}"
        odd = f" [yellow]{one.odd:,} not finite[/]" if one.odd else ""
        curve = sparkline(list(one.curve)) if "utf" in (out.encoding or "").lower() else ""
        out.print(f"{shown(one.name)} {value} [dim]({step}, {one.points:,} points)[/]{odd} {curve}".rstrip())
    for alert in reply.alerts:
        out.print(f"  [yellow]{shown(alert)}[/]")
    message(reply)


FIGURES: Final = 52
"""Width of the numeric part of a fan-out's table, in terminal columns."""


def fanned_out(reply: SubmitReply) -> None:
    """Print a fan-out: a row for each configuration with its spread, then the cells with a problem."""
    _findings(reply.findings)
    if reply.receipt:
        out.print(f"receipt [bold]{reply.receipt}[/], valid until {when(reply.receipt_expires_at)} {zone()}")
    fan = reply.fan_out
    assert fan is not None
    if fan.table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        metric = next((row.metric for row in fan.table if row.metric), "objective")
        axes = list(fan.table[0].settings)
        wide = sum(max(len(name), *(len(row.settings.get(name, "")) for row in fan.table)) + 2 for name in axes)
        apart = bool(axes) and wide <= out.width - FIGURES  # if the table would be too wide, use one column that wraps
        for name in axes if apart else ["settings"]:
            table.add_column(shown(name), overflow="fold")
        for head in ("proven", shown(metric), "std", "lowest", "highest"):
            table.add_column(head, no_wrap=True, justify="right")
        for row in fan.table:
            values = ("-" if v is None else f"{v:.4g}" for v in (row.mean, row.std, row.low, row.high))
            whole = " ".join(f"{k}={v}" for k, v in row.settings.items()) or "all"
            settings = [row.settings.get(name, "-") for name in axes] if apart else [whole]
            table.add_row(*map(shown, settings), f"{row.proven}/{row.cells}", *values)
        out.print(table)
    if fan.states:
        out.print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in fan.states.items()))
    for cell in fan.odd:
        out.print(
            f"  [yellow]cell {cell.index}[/] {cell.state.replace('_', ' ')} after {counted(cell.tries, 'try', 'tries')}"
            f" {shown(cell.problem)}".rstrip()
        )
    for job, why in fan.unknown.items():
        out.print(f"  [magenta]{job}[/] {shown(why)}")
    message(reply)


def checked(reply: CheckReply) -> None:
    """Print the reply to a check or a cancellation."""
    whole = f"/{reply.total_steps:,}" if reply.total_steps else ""
    step = f", step {reply.step:,}{whole}" if reply.step is not None else ""
    why = f" [dim]({shown(reply.why)})[/]" if reply.why else ""
    out.print(f"[bold]{reply.job_id}[/] {colored(reply.state)}{step}{why}")
    if reply.metrics:
        out.print("  " + "  ".join(f"{shown(k)} {v:g}" for k, v in reply.metrics.items()))
    for text in progress_of(reply):
        out.print(f"  {shown(text)}")
    for alert in reply.alerts:
        out.print(f"  [yellow]{shown(alert)}[/]")
    if reply.meter:
        out.print("  " + _meter(reply.meter))
    if reply.ending:
        for text in auto_teardown_lines(reply.ending):
            out.print(f"  {shown(text)}")
    if reply.artifact_store:
        what = (
            f"{counted(reply.artifact_store.files, 'file')}, {reply.artifact_store.bytes:,} bytes"
            if reply.artifact_store.files
            else "unknown"
        )
        out.print(f"  uploaded to [bold]{shown(reply.artifact_store.store)}[/]: {what}")
        for text in (*reply.artifact_store.newest, *([reply.artifact_store.why] if reply.artifact_store.why else ())):
            out.print(f"    [dim]{shown(text)}[/]")
    if reply.log:
        out.print(shown(unfenced(reply.log)), style="dim")
    _skew(reply.skew)
    _diagnoses(reply.diagnoses)
    if reply.checks:
        from gpuwarden.interfaces.results.decisions import outcome_line
    for outcome in reply.checks:
        out.print(f"  [dim]checked[/] {shown(outcome_line(outcome))}")
    message(reply)


def _decision(decision: DecisionReply | None) -> None:
    if decision is not None:
        from gpuwarden.interfaces.results.decisions import steps_of

        out.print(f"[bold]{shown(decision.title)}[/] [dim]has several causes; check in this order[/]")
        for text in steps_of(decision):
            out.print(f"  {shown(text)}")


def _skew(skew: SkewReply | None) -> None:
    if skew is not None:
        from gpuwarden.interfaces.results.version_skew import sentence_of

        out.print(f"[yellow]{skew.certainty}[/] [bold]{shown(skew.package)}[/]: {shown(sentence_of(skew))}")


def _diagnoses(rows: list[DiagnosisReply]) -> None:
    for found in rows:
        title = f"[bold]{found.id}[/] {shown(found.title)}"
        out.print(f"[yellow]{found.certainty}[/] {title} [dim]({shown(found.why)})[/]")
        if found.lines:
            out.print(shown(textwrap.indent(unfenced(found.lines), "  > ")), style="dim")
        out.print(f"  [dim]fix:[/] {shown(found.fix)}")


def diagnosed(reply: DiagnoseReply) -> None:
    """Print how the logged run ended, and the entries that match the log."""
    failure = reply.failure
    raised = failure.exception
    where = f"{raised.package} {raised.version}".strip() if raised else ""
    parts = {
        "outcome": failure.outcome,
        "exception": f"{raised.type}: {raised.message}" if raised else "",
        "raised at": f"{raised.frame}{f' ({where})' if where else ''}" if raised and raised.frame else "",
        "rank": raised.rank if raised else "",
        "caused by": "\n".join(f"{one.type}: {one.message}" for one in failure.chain),
        "message from": reply.origin.releases if reply.origin else "",
        "does not exist": " ".join(failure.missing.values()),
        "exit": " ".join(str(part) for part in (failure.exit_code, failure.signal) if part not in (None, "")),
        "last progress": failure.last_progress,
        "device": "\n".join(failure.device),
        "recovered from": "\n".join(f"{one.type}: {one.message}" for one in failure.recovered),
    }
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in parts.items():
        if text:
            table.add_row(label, shown(text))
    out.print(table)
    _skew(reply.skew)
    _diagnoses(reply.diagnoses)
    _decision(reply.decision)
    if reply.query:
        out.print(f"[dim]search for:[/] {shown(reply.query)}")
    for text in reply.collect:
        out.print(f"  [dim]collect:[/] {shown(text)}")
    message(reply)


def _meter(meter: MeterReply) -> str:
    mark = {True: "[yellow]billed[/]", False: "[green]not billed[/]", None: "[magenta]may be billed[/]"}[meter.billing]
    price = f" at {usd_per_hour(meter.price_usd_per_hour)}" if meter.billing is not False else ""
    return f"machine: {mark}{price}, cost so far {usd(meter.cost_usd, meter.cost_estimated)} [dim]({meter.state})[/]"


def pulled(reply: PullReply) -> None:
    """Print the reply to a pull."""
    sent = f"{reply.bytes_sent:,} transferred"
    out.print(f"{counted(reply.files, 'file')}, {reply.bytes:,} bytes in [bold]{shown(reply.dest)}[/] ({sent})")
    for name in reply.missing:
        out.print(f"  [yellow]does not exist on the machine:[/] {shown(name)}")
    for problem in reply.problems:
        out.print(f"  [red]{shown(problem)}[/]")
    message(reply)


def torn_down(reply: TeardownReply) -> None:
    """Print the reply to a teardown request or an approval."""
    out.print(f"[bold]{reply.ticket}[/] {shown(reply.state)}: {reply.verb} the machine of {reply.job_id}")
    _findings(reply.findings)
    if reply.deletes:
        out.print(f"  deletes on the machine: {shown(', '.join(reply.deletes))}")
    if reply.copy_at:
        out.print(f"  last pulled to: {shown(reply.copy_at)}")
    out.print("  " + _meter(reply.meter))
    message(reply)


def listed(reply: InstancesReply) -> None:
    """Print the inventory, narrow enough for 80 columns: related values share a cell."""
    if reply.instances:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for head in ("machine", f"state ({zone()})", "billing", "cost"):
            table.add_column(head, no_wrap=True)
        table.add_column("job", overflow="fold")
        for row in reply.instances:
            off = f"\n[dim]off {when(row.stopped_at)[5:16]}[/]" if row.stopped_at else ""
            rest = f"\n[dim]{usd_per_hour(row.stopped_usd_per_hour)} off[/]" if row.stopped_usd_per_hour else ""
            its_job = f"{row.job_id} {colored(row.job_state or '')}\n" if row.job_id else ""
            clocks = "".join(f"\n[yellow]{when(c.at)[:16]}[/] {shown(c.effect)}" for c in row.clocks)
            table.add_row(
                f"{shown(row.platform)}\n{shown(row.instance_id or 'id unknown')}",
                f"{shown(row.state)}\n[dim]since {when(row.since)[5:16]}[/]{off}",
                {True: "[yellow]yes[/]", False: "no", None: "[magenta]unknown[/]"}[row.billing],
                f"{usd(row.cost_usd, row.cost_estimated)}\n[dim]{usd_per_hour(row.price_usd_per_hour)}[/]{rest}",
                f"{its_job}[dim]{shown(row.note)}[/]{clocks}",
            )
        out.print(table)
    for account in reply.accounts:
        name, note = shown(account.platform), shown(account.note)
        if account.balance is None:
            out.print(f"[magenta]unknown[/] {name}: {note}")
        elif clock := account.clock:
            out.print(f"[yellow]{when(clock.at)[:16]}[/] {name}: {shown(clock.trigger)}; {shown(clock.effect)}")
        else:
            note = f" [dim]({note})[/]" if note else ""
            out.print(f"{name}: balance {account.balance:.2f} {shown(account.currency or '')}{note}")
    for job in reply.jobs:
        out.print(f"{job['job_id']} {colored(job['state'])} on {shown(job['platform'])}")
    for what, why in reply.unknown.items():
        out.print(f"[magenta]unknown[/] {shown(what)}: {shown(why)}")
    message(reply)


_CAPACITY = {"available": "green", "unknown": "magenta", "none": "yellow", "not_sold": "dim"}


def offered(reply: OffersReply) -> None:
    """Print the offers, cheapest first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("platform", "price", "capacity"):
        table.add_column(head, no_wrap=True)
    table.add_column("kept by a stop", overflow="fold")
    table.add_column("", overflow="fold")
    for row in reply.offers:
        kept = shown(", ".join(row.survives_stop or ()) or "nothing")
        if row.survives_stop is None:
            kept = "[dim]unknown[/]" if row.capacity == "unknown" else "[dim]no stop[/]"
        table.add_row(
            shown(row.platform),
            usd_per_hour(row.price_usd_per_hour),
            f"[{_CAPACITY[row.capacity]}]{row.capacity.replace('_', ' ')}[/]",
            kept + (" [dim](still billed)[/]" if row.bills_when_stopped else ""),
            f"[dim]{shown(row.note)}[/]",
        )
    if reply.offers:
        out.print(table)
    message(reply)


def hooks(reply: HooksReply) -> None:
    """Print the state of the guard in each client, and the guard's limits."""
    for client, state in reply.clients.items():
        out.print(f"{client:8} {shown(state):15} [dim]{shown(reply.files.get(client, ''))}[/]")
    message(reply)


def tokens(reply: TokensReply) -> None:
    """Print the HTTP server's valid tokens."""
    table = Table(box=None, pad_edge=False)
    for head in ("id", "name", "scopes", "until"):
        table.add_column(head, overflow="fold")
    for row in reply.tokens:
        table.add_row(row.id, shown(row.name), " ".join(row.scopes), row.expires_at)
    out.print(table)
    message(reply)


def setup(reply: SetupReply) -> None:
    """Print the lines to add to each file, and the state of each client and its guard."""
    for change in reply.changes:
        out.print(f"[bold]{shown(change.file)}[/], after line {change.after_line}:", soft_wrap=True)
        for row in change.added:
            out.print(f"[green]+ {shown(row)}[/]", soft_wrap=True)
    for client in dict.fromkeys((*reply.clients, *reply.guards)):
        state = reply.clients.get(client, "")
        guard = f"guard: {reply.guards[client]}" if client in reply.guards else ""
        tried = f"rehearsal: {reply.tried[client]}" if client in reply.tried else ""
        out.print(f"{client:8} {shown(state):22} [dim]{shown(guard)}[/] {shown(tried)}".rstrip(), soft_wrap=True)
    for file, text in reply.paste.items():
        out.print(f"To add the server to {shown(file)} by hand:", soft_wrap=True)
        out.print(shown(text), soft_wrap=True)
    if reply.policy:
        out.print(shown(reply.policy), soft_wrap=True)
    message(reply)


def plain_line(text: str) -> None:
    """Print one line of text unchanged."""
    out.print(shown(text), soft_wrap=True)


def watched(reply: WatchReply) -> None:
    """Print a watch round's new alerts."""
    for alert in reply.news:
        color = "red" if alert.state == "raised" else "green"
        out.print(
            f"[dim]{when(alert.at)} {zone()}[/] [{color}]{alert.state}[/] {shown(alert.kind)}: {shown(alert.text)}"
        )
        _hint(alert)
    for what, why in reply.unknown.items():
        out.print(f"[magenta]unknown[/] {shown(what)}: {shown(why)}")


def watch_round(reply: WatchReply) -> None:
    """Print a full watch round: new alerts, then older open ones."""
    watched(reply)
    fresh = {(a.about, a.kind) for a in reply.news}
    for alert in (a for a in reply.standing if (a.about, a.kind) not in fresh):
        out.print(f"[dim]{when(alert.at)} {zone()}[/] [yellow]open[/] {shown(alert.kind)}: {shown(alert.text)}")
        _hint(alert)
    message(reply)


def history(rows: list[dict[str, Any]]) -> None:
    """Print the ledger's events as a timeline, with each reason below its event."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in (f"when ({zone()})", "subject"):
        table.add_column(head, no_wrap=True)
    table.add_column("event", overflow="fold")
    for row in rows:
        state = row["state"]
        reached = f" -> {state}" if state and not row["kind"].endswith(f".{state}") else ""
        why = plain(str(row["body"].get("why") or ""))
        reason = f"\n[dim]{shown(why)}[/]" if why else ""
        table.add_row(when(row["at"])[5:], shown(row["subject"]), f"{shown(row['kind'])}{reached}{reason}")
    out.print(table)


def rules(rows: list[dict[str, Any]], *, full: bool) -> None:
    """Print the rules, as a list or in full."""
    if full:
        for r in rows:
            out.print(f"[bold]{r['id']}[/] {colored(r['severity'])} ({r['gate']} gate)\n{shown(r['title'])}\n")
            out.print(f"Why: {shown(r['why'])}\n\nExample:\n{escape(textwrap.indent(r['example'], '    '))}\n")
            out.print(f"Instead:\n{escape(textwrap.indent(r['instead'], '    '))}\n\nFix: {shown(r['fix'])}")
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for r in rows:
        table.add_row(r["id"], colored(r["severity"]), shown(r["title"]))
    out.print(table)


def found(reply: SearchReply) -> None:
    """Print search results."""
    _skew(reply.skew)
    for hit in reply.hits:
        out.print(f"[bold]{shown(hit.id)}[/] {shown(hit.title)} [dim]({shown(hit.why)})[/]")
        out.print(f"  {shown(hit.summary)}")
        if hit.fix:
            out.print(f"  [dim]fix:[/] {shown(hit.fix)}")
        out.print(f"  [dim]{shown(hit.uri)}[/]")
    _decision(reply.decision)
    message(reply)


def entry(reply: EntryReply) -> None:
    """Print one known failure: symptom, cause, fix, log lines, source."""
    out.print(f"[bold]{reply.id}[/] {shown(reply.title)}\n")
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    parts = {
        "symptom": reply.symptom,
        "cause": reply.cause,
        "fix": reply.fix,
        "log lines": "\n".join(reply.examples),
        "see also": "\n".join(f"{other} {title}" for other, title in reply.see.items()),
        "scope": ", ".join(reply.scope),
        "source": "\n".join(reply.source) + f"\nverified in {reply.verified}; page {reply.uri}",
    }
    for label, text in parts.items():
        if text:
            table.add_row(label, shown(text.strip()))
    out.print(table)
    message(reply)


def issues(reply: IssuesReply) -> None:
    """Print the issues in the format of compiler errors, one per line."""
    for row in reply.issues:
        mark = "[red]urgent[/] " if row.urgent else ""
        out.print(f"{shown(row.file)}:{row.line}: {mark}{shown(row.message)} [dim]({row.kind})[/]", soft_wrap=True)
    message(reply)


def draft(reply: DraftReply) -> None:
    """Print a draft entry, formatted for its page."""
    out.print(shown(reply.text), soft_wrap=True)
    message(reply)


def lesson(reply: LessonReply) -> None:
    """Print the evidence from a failed job, the gaps in the evidence, and a draft entry."""
    out.print(f"[bold]{shown(reply.job)}[/] on {shown(reply.platform)} [dim]{shown(', '.join(reply.versions))}[/]")
    again = f"failed the same way: {', '.join(reply.again)}" if reply.again else ""
    worked = f"worked: {reply.fixed_by}" if reply.fixed_by else ""
    for text in (reply.lines, again, worked, reply.changes, reply.text):
        if text:
            out.print(shown(plain(text)), soft_wrap=True)
    for label, words in (("missing", reply.missing), ("gap", reply.doubts)):
        for word in words:
            out.print(f"[yellow]{label}:[/] {shown(word)}", soft_wrap=True)
    message(reply)


def platforms(titles: dict[str, str]) -> None:
    """Print the platforms' names."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, title in titles.items():
        if not name.startswith("rehearsal/"):
            table.add_row(f"[bold]{shown(name)}[/]", shown(title))
    if any(name.startswith("rehearsal/") for name in titles):
        table.add_row("[bold]rehearsal/NAME[/]", "Any rented platform, simulated on this machine")
    out.print(table)
    out.print("[dim]next:[/] `gpuwarden profiles NAME` shows one platform.")


def profile(file: Path, user_notes: dict[str, str]) -> None:
    """Print a profile's page and the user's notes on the platform."""
    from rich.markdown import Markdown

    from gpuwarden.frontmatter import read_front_matter

    body = read_front_matter(file.read_text("utf-8"), name=file.name).body
    noted = "".join(f"- {key}: {value}\n" for key, value in user_notes.items())
    page = re.sub(r"<!--.*?-->\n", "", body) + (f"\n## Your notes\n{noted}" if noted else "")
    out.print(Markdown(_TABLE.sub(_as_list, page)))


_TABLE = re.compile(r"^\|.*\n\| ---.*\n(?:\|.*\n)+", re.MULTILINE)


def _as_list(table: re.Match[str]) -> str:
    """Return a wide table as a list, because a terminal would truncate its cells."""
    head, _, *rows = (re.split(r" ?(?<!\\)\| ?", row)[1:-1] for row in table[0].split("\n")[:-1])
    if len(head) <= 3:
        return table[0]
    entries = (
        (name, "; ".join(f"{h}: {c}" for h, c in zip(head[1:], cells, strict=False) if c)) for name, *cells in rows
    )
    return "".join(f"- **{name}** ({facts})\n" for name, facts in entries)


def notes(reply: NotesReply) -> None:
    """Print the notes, one per line, each with its key."""
    for key, value in _flat(reply.notes):
        out.print(f"[bold]{shown(key)}[/] {shown(str(value))}", soft_wrap=True)
    out.print(f"[dim]{shown(reply.path)}[/]", soft_wrap=True)
    message(reply)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield key, item
    else:
        yield key, value


def doctor(reply: Any) -> None:
    """Print the effective settings and the checks."""
    _settings(reply)
    for check in reply.checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]"
        out.print(f"{mark} {escape(check.what)}: {escape(check.found)}")
    message(reply)


def policy(reply: PolicyReply) -> None:
    """Print the active policy file and its values."""
    _settings(reply)
    since = f", unchanged since {when(reply.since)} {zone()}" if reply.since else ""
    out.print(f"[bold]{escape(reply.file)}[/] {reply.digest}{since}", soft_wrap=True)
    message(reply)


def _settings(reply: Any) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("setting", "value", "from"):
        table.add_column(head, overflow="fold")
    for row in reply.settings:
        table.add_row(shown(row.setting), shown(row.value), shown(row.origin))
    out.print(table)


@contextlib.contextmanager
def transfer_bar(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show a progress bar for a transfer if standard error is a terminal."""
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("pulling"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=err
    ) as bar:
        task = bar.add_task("pull", total=None)
        yield lambda p: bar.update(task, completed=p.bytes_done, total=p.bytes_total)


@contextlib.contextmanager
def count_bar(quiet: bool, what: str) -> Iterator[ByteCount | None]:
    """Show the number of processed bytes, and the total once it is known, if standard error is a terminal.

    The bar is thread-safe.
    """
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from gpuwarden.checkpoints.budget import ByteCount

    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield ByteCount(lambda done, total: bar.update(task, completed=done, total=total))
