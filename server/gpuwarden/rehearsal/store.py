"""Manage the simulated cloud's files, and the lock for the processes that share one cloud.

`cloud.json` is the configuration (profile, settings, faults), and `state.json` is the state. Each is replaced by a
rename, so a killed process leaves either the old or the new content. The files are not synced to disk, because
power loss is not simulated.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.models import Frozen
from gpuwarden.core.profile import Profile
from gpuwarden.private import private_folder, write_private
from gpuwarden.rehearsal.model import Faults, Settings, State

LOCK_S = 15.0
M = TypeVar("M", bound=BaseModel)


class Config(Frozen):
    """A cloud's configuration."""

    profile: Profile
    settings: Settings = Settings()
    faults: Faults = Faults()


class Store:
    """One cloud's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def lock(self, *, make: bool = False) -> Iterator[None]:
        """Lock the cloud; the kernel releases the lock if the process dies. `make` creates a new cloud.

        Raises Unreachable if the lock is held too long or the cloud's folder is gone.
        """
        if make:
            private_folder(self.root)
        elif not self.root.is_dir():
            raise Unreachable(f"the rehearsal cloud in {self.root} is gone: its folder was moved or deleted")
        try:
            with FileLock(self.root / "lock", timeout=LOCK_S, mode=0o600):
                yield
        except Timeout as busy:
            raise Unreachable(f"the rehearsal cloud in {self.root} was busy for {LOCK_S:.0f} s") from busy

    def config(self) -> Config | None:
        """Return the configuration; None if the cloud is new."""
        return self._read(Config, "cloud.json")

    def state(self) -> State:
        """Return the state. A new cloud's state has a new nonce, which makes the cloud's ids unique on this machine."""
        return self._read(State, "state.json") or State(nonce=secrets.token_hex(4))

    @property
    def begun(self) -> bool:
        """Return whether the state has been saved."""
        return (self.root / "state.json").exists()

    def save(self, model: Config | State) -> None:
        """Atomically replace the configuration or state file."""
        path = self.root / ("cloud.json" if isinstance(model, Config) else "state.json")
        write_private(path, model.model_dump_json())

    def _read(self, kind: type[M], name: str) -> M | None:
        path = self.root / name
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise BadReply(
                f"{path} is not a valid rehearsal cloud file: {error.error_count()} problems, the first: "
                f"{error.errors()[0]['msg'][:200]}",
                "Move the folder away to start a new simulated cloud; until then, this cloud's processes keep running.",
            ) from error
