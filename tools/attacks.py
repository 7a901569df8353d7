"""Run every attack test, and every platform's own client against its emulator, and print the outcomes in Markdown.

    python tools/attacks.py [PYTEST ARGUMENTS...]

A test declares its attack with a marker: `@pytest.mark.attack("boundary", "reads the server's key from /proc")`.
Figures that a test records with `record_property("figure", ...)` are shown in its row. The client tests are the tests
in files `test_*clients*.py` that need the real client. The exit code is 1 if an attack succeeded or a client failed,
and 2 if a test was skipped.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

AREAS = {
    "spending": "Money: submits, caps, prices, receipts",
    "ending": "Teardown of machines, and providers that send false replies",
    "person": "Decisions that only the user may make",
    "boundary": "Jobs on this machine",
    "text": "Untrusted text",
    "secrets": "Secrets and private files",
    "files": "Files and paths",
    "ledger": "The ledger",
    "guard": "The shell guard",
    "http": "The server over HTTP",
    "page": "The page",
}


@dataclass
class Attack:
    """The outcomes of all cases of one attack."""

    area: str
    what: str
    held: int = 0
    broke: list[str] = field(default_factory=list)
    skipped: int = 0
    figures: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """Return the outcome as a short phrase, with counts if the attack has several cases."""
        if self.broke:
            return f"**broke** in {len(self.broke)} of {self.held + len(self.broke)}"
        if not self.held:
            return "not tried here"
        return "held" if self.held == 1 else f"held, {self.held} cases"


class Outcomes:
    """A pytest plugin that collects the outcome of each attack."""

    def __init__(self) -> None:
        self.attacks: dict[tuple[str, str], Attack] = {}
        self.clients: dict[tuple[str, str], Attack] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select the tests that declare an attack or a client."""
        chosen = [item for item in items if {"attack", "client"} & {name for name, _ in item.user_properties}]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test from any worker. `tests/conftest.py` copies the marker to the test's properties."""
        declared = next(((n, value) for n, value in report.user_properties if n in {"attack", "client"}), None)
        if declared is None or (report.passed and report.when != "call"):
            return
        rows = self.attacks if declared[0] == "attack" else self.clients
        attack = rows.setdefault(tuple(declared[1]), Attack(*declared[1]))
        if report.failed:
            attack.broke.append(report.nodeid)
        elif report.skipped:
            attack.skipped += 1
        else:
            attack.held += 1
            attack.figures += [str(value) for name, value in report.user_properties if name == "figure"]


def main(arguments: list[str]) -> int:
    """Run the attacks and print the table."""
    outcomes = Outcomes()
    code = pytest.main(["-q", "-o", "addopts=--strict-markers --import-mode=importlib", *arguments], plugins=[outcomes])
    attacks, clients = list(outcomes.attacks.values()), list(outcomes.clients.values())
    print(table(attacks))
    print(table_of_clients(clients))
    if any(row.broke for row in (*attacks, *clients)):
        return 1
    return 2 if code or not all(row.held for row in (*attacks, *clients)) else 0


def table(attacks: list[Attack]) -> str:
    """Return the table: for each area, a title and a row for each attack in alphabetical order."""
    areas: dict[str, list[Attack]] = defaultdict(list)
    for attack in attacks:
        areas[attack.area].append(attack)
    lines = [f"{len(attacks)} attacks, {sum(a.held + len(a.broke) for a in attacks)} cases"]
    for area, title in AREAS.items():
        found = sorted(areas.pop(area, []), key=lambda a: a.what)
        if found:
            lines += ["", f"### {title}", "", "| the attacker | outcome | measured |", "|---|---|---|"]
        for attack in found:
            lines.append(f"| {attack.what} | {attack.outcome} | {'; '.join(attack.figures)} |")
    assert not areas, f"no title for {sorted(areas)}"
    return "\n".join(lines)


def table_of_clients(clients: list[Attack]) -> str:
    """Return a row for each platform and client, with the number of tests that passed."""
    lines = [
        "",
        "### The platforms' own clients",
        "",
        "| emulated platform | client | tests that pass |",
        "|---|---|---|",
    ]
    for row in sorted(clients, key=lambda c: (c.area, c.what)):
        tried = row.held + len(row.broke)
        lines.append(f"| {row.area} | {row.what} | {f'{row.held} of {tried}' if tried else 'not tried here'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
