"""Base class for providers that don't rent machines in advance.

`create` makes a reservation, and the job itself is the instance.

A reservation is a private file named after its token. The label that contains the token may contain any string in
another program's job. A string that is not a valid file name can't be a reservation's token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuwarden.core.clock import Clock
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Place, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.private import private_folder, write_private


class ReservingProvider:
    """Read and write the records of reservations. Subclasses supply the provider's methods."""

    def __init__(self, profile: Profile, state: Path, clock: Clock) -> None:
        self.profile = profile
        self.settle_s = profile.limits.settle_s
        self._state, self._clock = state, clock

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return the current state of a reservation's instance."""
        raise NotImplementedError

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return the reservation for a token."""
        answer = await self.get(token)
        return answer if isinstance(answer, Unknown) else Known((answer.value,) if answer.value else ())

    def _tokens(self) -> Iterator[str]:
        """Yield the tokens of all reservations made on this machine, including ended ones."""
        return (file.stem for file in sorted(self._state.glob("*.json")))

    def _file(self, token: str) -> Path:
        return self._state / f"{token}.json"

    def _has(self, token: str) -> bool:
        """Return whether this machine has a reservation for the token."""
        return re.fullmatch(r"[\w-][\w.-]{0,199}", token) is not None and self._file(token).is_file()

    def _read(self, token: str) -> dict[str, Any]:
        return dict(json.loads(self._file(token).read_text())) if self._has(token) else {}

    def _write(self, token: str, body: Mapping[str, Any]) -> None:
        private_folder(self._state)
        write_private(self._file(token), json.dumps(dict(body)))

    def _place(self, token: str) -> Place:
        return Place(platform=self.profile.id, instance_id=token, run_root=self.profile.run_root)

    def _reserved(self, token: str) -> Instance:
        noted = self._read(token)
        return Instance(
            id=token,
            token=token,
            state=InstanceState.RUNNING,
            place=self._place(token),
            meter=False,
            price_usd_per_hour=noted.get("usd"),
            created_at=noted.get("at"),
            why="reserved; no job has started yet",
        )
