"""Draw the overview to fit the terminal's width: running jobs, open approvals and billing."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.interfaces.cli import console
from gpuwarden.interfaces.cli.drawing import billing_now, local, progress_parts, zone
from gpuwarden.interfaces.cli.wording import command
from gpuwarden.interfaces.results.overview import (
    CostsReply,
    JobLineReply,
    JobsReply,
    StatusReply,
    WaitingReply,
    WaitsReply,
)
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.waiting import Waiting

MIN_ROWS = 3
KINDS = {
    "teardown": "to approve", "ordered": "ends", "unseen_end": "end not confirmed", "blocked": "blocked",
    "unasked": "ended, billed", "spending": "to approve", "price": "the price rose",
}  # fmt: skip
"""A short label for each kind of decision that is waiting for the user."""


def status(reply: StatusReply) -> None:
    """Print the overview."""
    console.out.print(drawn(reply, console.out.height if console.out.is_terminal else None))
    console.message(reply)
    if not (reply.running or reply.waiting or reply.ended):
        console.out.print(
            "[dim]next:[/] `gpuwarden demo` shows a full job at no cost; `gpuwarden --help` lists all commands."
        )


@contextlib.contextmanager
def live_overview(
    ctx: Context, clean: Callable[[StatusReply], StatusReply]
) -> Iterator[Callable[[dict[str, str]], None]]:
    """Show the overview, and yield a function that redraws it in place.

    The function's argument maps each failed poll to its reason. `clean` removes secrets from a reply.
    """
    from rich.live import Live

    from gpuwarden.interfaces.results.overview import status_of
    from gpuwarden.lifecycle.monitoring.overview import cached_overview

    def now(unknown: dict[str, str]) -> Group:
        return drawn(clean(status_of(cached_overview(ctx, unknown))), console.out.height)

    with Live(now({}), console=console.out, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda unknown: live.update(now(unknown), refresh=True)


def drawn(reply: StatusReply, height: int | None = None) -> Group:
    """Return the overview for printing, shortened to `height` lines: open approvals and running jobs come first."""
    parts: list[RenderableType] = []
    asked = {waiting.job_id for waiting in reply.waiting}
    rows = 40 if height is None else max(MIN_ROWS, (height - 12) // 2)
    if reply.waiting:
        parts += [Text("Waiting for you", style="bold yellow"), _waiting(reply.waiting[:rows])]
    ended = [line for line in reply.ended if line.job_id not in asked]
    for title, lines in (("Running", reply.running), ("Ended", ended)):
        if lines:
            parts += [Text(title, style="bold"), _jobs(lines[:rows])]
        if len(lines) > rows:
            parts.append(Text(f"and {len(lines) - rows:,} more: gpuwarden jobs", style="dim"))
    parts += [Text.from_markup(line) for line in _money(reply)]
    parts += [Text.from_markup(f"[red]alert[/] {console.shown(text)}") for text in reply.alerts[:rows]]
    unseen = reply.unknown.items()
    parts += [Text.from_markup(f"[magenta]unknown[/] {console.shown(k)}: {console.shown(v)}") for k, v in unseen]
    return Group(*parts)


def _waiting(waiting: list[WaitingReply]) -> Table:
    """Return one line for each decision: the job, its machine's cost, and the commands for the decision.

    On a narrow terminal, only the names are shortened, not the commands.
    """
    costs, answers = [], []
    for w in waiting:
        ends = f" at {local(w.expires_at)}" if w.kind == "ordered" and w.expires_at else ""
        rate = "" if w.price_usd_per_hour is None else f"[yellow]{usd_per_hour(w.price_usd_per_hour)}[/] "
        costs.append(Text.from_markup(f"{rate}{usd(w.cost_usd, w.cost_estimated)} [dim]{KINDS[w.kind]}{ends}[/]"))
        commands = " ".join(console.shown(command(step)) for step in w.next)
        answers.append(Text.from_markup(f"[bold]{commands}[/]"))
    taken = sum(max(text.cell_len for text in column) for column in (costs, answers))
    table = _plain_table()
    for _ in range(2):
        most = (console.out.width - taken - 8) // 2  # the width without gaps and indent
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(most, 6))
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for w, cost, answer in zip(waiting, costs, answers, strict=True):
        table.add_row(f"  {console.shown(w.name or w.job_id or w.ticket)}", console.shown(w.platform), cost, answer)
    return table


def _jobs(lines: list[JobLineReply]) -> Table:
    table = _plain_table()
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column()
    for line in lines:
        bills = f"[yellow]billed {usd_per_hour(line.price_usd_per_hour)}[/] " if line.billing else ""
        cost = usd(line.cost_usd, line.cost_estimated) if line.cost_usd or line.billing else ""
        stays = f" [yellow]{console.shown(' and '.join(line.storage))} still billed[/]" if line.storage else ""
        clocks = "".join(f" [yellow]{local(c.at, '%m-%d %H:%M')} {console.shown(c.effect)}[/]" for c in line.clocks[:1])
        ending, plan = "", line.ending
        if plan and plan.automatic_teardown is not None and plan.objected_at is None:
            at = f" at {local(plan.ends_at)}" if plan.ends_at is not None else " once proven"
            ending = f" [cyan]{plan.automatic_teardown}s{at} automatically[/]"
        table.add_row(
            f"  [bold]{line.job_id}[/]",
            f"{console.colored(line.state)} {local(line.since)}",
            console.shown(line.platform),
            " ".join(
                [console.shown(line.name), *progress_parts(line), f"{bills}{cost}{clocks}{ending}{stays}"]
            ).rstrip(),
        )
    return table


def _money(reply: StatusReply) -> list[str]:
    """Return the lines about costs and deadlines: spending, billing, machines that gpuwarden did not rent, and account
    deadlines.
    """
    spent = reply.spending
    cap = f" of {usd(spent.per_day_cap_usd)}" if spent.per_day_cap_usd > 0 else " (no cap: all spending needs approval)"
    lines = [
        f"[bold]Spent[/] today {usd(spent.today_usd)}{cap}, this month {usd(spent.month_usd)}, {billing_now(reply)}"
    ]
    if spent.rehearsed_today_usd:
        lines.append(f"[dim]simulated rehearsal costs today: {usd(spent.rehearsed_today_usd)}[/]")
    for other in reply.others:
        bills = "[yellow]billed[/]" if other.billing else "[magenta]may be billed[/]"
        named = f"{console.shown(other.platform)} {console.shown(other.instance_id or 'id unknown')}"
        lines.append(f"{bills} {named} {usd_per_hour(other.price_usd_per_hour)} [dim]{console.shown(other.note)}[/]")
    for clock in (account.clock for account in reply.accounts if account.clock):
        when = local(clock.at, "%Y-%m-%d %H:%M")
        lines.append(f"[yellow]{when}[/] {console.shown(clock.trigger)}; {console.shown(clock.effect)}")
    return [*lines, f"[dim]{local(reply.at, '%Y-%m-%d %H:%M:%S')} {zone()}[/]"]


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))


def jobs(reply: JobsReply) -> None:
    """Print a page of jobs."""
    if reply.jobs:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for head in ("job", f"state since ({zone()})", "platform"):
            table.add_column(head, no_wrap=True)
        table.add_column("what")
        table.add_column("cost", justify="right", no_wrap=True)
        people = {line.person for line in reply.jobs}
        for line in reply.jobs:
            what = f"{line.project}/{line.name}" if line.project else line.name
            what = f"{what} ({line.person})" if line.person and len(people) > 1 else what
            bills = "[yellow]billed[/] " if line.billing else ""
            table.add_row(
                f"[bold]{line.job_id}[/]",
                f"{console.colored(line.state)} {local(line.since, '%m-%d %H:%M')}",
                console.shown(line.platform),
                " ".join([console.shown(what), *progress_parts(line)]),
                f"{bills}{usd(line.cost_usd, line.cost_estimated)}" if line.cost_usd or line.billing else "-",
            )
        console.out.print(table)
    console.message(reply)
    if reply.after:
        console.out.print(f"[dim]older jobs:[/] gpuwarden jobs --after {reply.after}")


def costs(reply: CostsReply) -> None:
    """Print costs as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(reply.by, no_wrap=True)
    for head in ("cost", "jobs"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in reply.rows:
        doubt = f" [magenta]and {row.unknown} unknown[/]" if row.unknown else ""
        cap = "" if row.per_day_cap_usd is None else f" [dim](cap per day {usd(row.per_day_cap_usd)})[/]"
        table.add_row(console.shown(row.key), f"{usd(row.usd)}{doubt}{cap}", str(row.machines))
    table.add_row("[bold]total[/]", f"[bold]{usd(reply.total_usd)}[/]", "")
    console.out.print(table)
    console.out.print(
        f"[dim]since {local(reply.since, '%Y-%m-%d %H:%M')} {zone()}, excluding simulated rehearsal costs[/]"
    )
    console.message(reply)


def costs_csv(reply: CostsReply) -> str:
    """Return costs as CSV. Text that a spreadsheet would evaluate is prefixed with an apostrophe."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow([reply.by, "usd", "jobs", "jobs_of_unknown_cost"])
    for row in reply.rows:
        key = f"'{row.key}" if row.key[:1] in "=+-@" else row.key
        rows.writerow([key, f"{row.usd:.4f}", row.machines, row.unknown])
    return out.getvalue()


def waits(reply: WaitsReply) -> None:
    """Print each open approval in full, followed by a line with the commands for it."""
    if reply.waiting:
        table = _plain_table()
        table.add_column(no_wrap=True)
        table.add_column()
        for w in reply.waiting:
            ends = f" [dim](until {local(w.expires_at)} {zone()})[/]" if w.expires_at else ""
            way = " ".join(f"[bold]{console.shown(command(step))}[/]" for step in w.next)
            table.add_row(f"  {w.ticket or w.job_id}", f"{console.shown(w.text)}{ends}\n{way}")
        console.out.print(table)
    console.message(reply)


def pending(waiting: Sequence[Waiting]) -> list[str]:
    """Return the lines to print after other commands: open approvals, and machines about to be torn down."""
    lines = []
    ordered, asked = ([w for w in waiting if (w.kind == "ordered") is wanted] for wanted in (True, False))
    for found, text in (
        (asked, f"{counted(len(asked), 'approval')} {'is' if len(asked) == 1 else 'are'} waiting for you:"),
        (ordered, f"{counted(len(ordered), 'machine')} will be torn down automatically; to cancel:"),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            lines.append(f"[yellow]{text}[/] [bold]{console.shown(command(found[0].next_steps[0]))}[/]{more}")
    return lines
