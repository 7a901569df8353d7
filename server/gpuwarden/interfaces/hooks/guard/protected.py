"""Read the protected paths from the file that `gpuwarden hooks install` writes, and from the ledger."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path

from gpuwarden.interfaces.hooks.guard.calls import Rules
from gpuwarden.interfaces.hooks.guard.patterns import Patterns


def rules_from(config: str, client: str) -> Rules:
    """Read the rules. Raises OSError, ValueError or KeyError if the file is missing or has an unknown format."""
    table = json.loads(Path(config).read_text("utf-8"))
    home = str(table["home"])
    return Rules(
        home=home,
        files=tuple(table["files"]),
        runs=live_runs(home),
        settings=tuple(table["settings"]),
        typing=client == "codex",
        patterns=Patterns.of(table["patterns"]),
    )


def live_runs(home: str) -> tuple[str, ...]:
    """Return the run folders of live jobs from the ledger; none if the ledger can't be read."""
    with contextlib.suppress(sqlite3.Error, OSError, ValueError, TypeError):
        uri = (Path(home) / "ledger.db").resolve().as_uri() + "?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2)) as db:
            found = {os.path.normpath(row[0]) for row in db.execute("SELECT run_dir FROM live_runs").fetchall()}
            return tuple(found)
    return ()
