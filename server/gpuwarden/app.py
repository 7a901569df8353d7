"""The composition root: config becomes a warden with a ledger, a policy and a clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpuwarden.config import Config, load_config
from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import LedgerError
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.private import private_folder


def open_context(
    actor: str, *, env: Mapping[str, str] | None = None, clock: Clock | None = None, config: Config | None = None
) -> Context:
    """A warden over the user's ledger and policy. `actor` names the door in the ledger: cli, mcp, demo.

    Raises BadRequest for a broken policy, LedgerError for a ledger that can't be used.
    """
    env = os.environ if env is None else env
    config = config or load_config(env)
    clock = clock or _clock(env)
    try:
        private_folder(config.home)
    except OSError as error:
        raise LedgerError(
            f"the folder {config.home} can't be made: {error.strerror or error}",
            "Set GPUWARDEN_HOME to a folder of yours.",
        ) from error
    own = config.policy_file.parent / "profiles"
    return Context(
        ledger=Ledger(config.home / "ledger.db", clock, actor),
        policy=config.policy,
        clock=clock,
        home=config.home,
        env=env,
        own_profiles=own if own.is_dir() else None,
        notes_file=config.notes_file,
    )


def _clock(env: Mapping[str, str]) -> Clock:
    """The machine's clock; in a pretend world the one that the world sets forward, which no real platform is met by."""
    file = env.get("GPUWARDEN_REHEARSAL_CLOCK")
    if not file:
        return SystemClock()
    from gpuwarden.rehearsal.clock import ShiftedClock

    return ShiftedClock(Path(file))
