"""The composition root: build a context (ledger, policy and clock) from the configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from gpuwarden.config import Config, load_config, policy_reader
from gpuwarden.core.clock import Clock, ShiftedClock, SystemClock
from gpuwarden.core.errors import LedgerError
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.people import current_user
from gpuwarden.policy_record import Record, write_record
from gpuwarden.private import private_folder


def open_context(
    actor: str, *, env: Mapping[str, str] | None = None, clock: Clock | None = None, config: Config | None = None
) -> Context:
    """Return a context for the user's ledger and policy. `actor` is the interface to record, such as cli.

    Raises BadRequest for an invalid policy, and LedgerError for an unusable ledger.
    """
    env = os.environ if env is None else env
    config = config or load_config(env)
    if clock is None:
        # A shifted clock is used only in rehearsals, never with a real platform.
        shifted = env.get("GPUWARDEN_REHEARSAL_CLOCK")
        clock = ShiftedClock(Path(shifted)) if shifted else SystemClock()
    try:
        private_folder(config.home)
    except OSError as error:
        raise LedgerError(
            f"the folder {config.home} can't be created: {error.strerror or error}",
            "Set GPUWARDEN_HOME to a folder that you can write to.",
        ) from error
    record_policy(config, clock.now())
    own = config.policy_file.parent / "profiles"
    return Context(
        ledger=Ledger(config.home / "ledger.db", clock, f"{actor}/{current_user()}"),
        source=policy_reader(config, env),
        clock=clock,
        home=config.home,
        env=env,
        own_profiles=own if own.is_dir() else None,
        notes_file=config.notes_file,
    )


def record_policy(config: Config, now: float) -> None:
    """Record the policy file that this ledger uses: at first use, and again after the user edits the file.

    Nothing is written while a variable names a policy file or ledger that differs from the record. Raises LedgerError.
    """
    known = config.recorded
    if any(notice.question for notice in config.notices) or (known and known.digest == config.digest):
        return
    if known is None:
        write_record(config.home, Record(path=str(config.policy_file), digest=config.digest, at=now))
        return
    with contextlib.suppress(LedgerError):  # on a full disk, the old digest remains; only the path is required
        write_record(config.home, known.model_copy(update={"digest": config.digest, "at": now}))
