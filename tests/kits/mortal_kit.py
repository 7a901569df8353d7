"""A ledger and calls that can die at any write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpuwarden.ledger.store import Ledger
from gpuwarden.rehearsal.model import Settings

SETTLE_S = 30.0
PACE = Settings(boot_s=10, stop_s=5, resume_s=20, settle_s=SETTLE_S, default_usd_per_hour=36, catalog={})


class Died(BaseException):
    """The process is dead; no code after this line runs."""


class Fuse:
    """Count down before and after every commit and call, and kill the process at zero.

    `errand` is a count and a function that stands for another process's work: it runs once, after that many ticks.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self.errand: tuple[int, Callable[[], object]] | None = None

    def burn(self) -> None:
        if self.errand is not None:
            count, errand = self.errand
            self.errand = (count - 1, errand) if count else None
            if not count:
                errand()
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Died


class MortalLedger(Ledger):
    """A ledger whose process may die before or after each commit."""

    fuse: Fuse

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        fuse = getattr(self, "fuse", Fuse())
        fuse.burn()
        with super()._transaction():
            yield
        fuse.burn()


class Mortal:
    """A provider or a backend whose caller may die before or after each call."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found) or name in {"read", "key_digest"}:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.fuse.burn()
            value = await found(*args, **kwargs)
            self.fuse.burn()
            return value

        return call
