"""What the lifecycle tests need of one emulated platform, declared at the end of the emulator's own file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import clouds
from clouds.base import Emulator
from clouds.boxes import Machines
from gpuwarden.providers._http import Api


@dataclass(frozen=True)
class Platform:
    """One platform: its account, its interface, what is asked for, and which requests create and end.

    `taken` is what becomes of a machine that the platform takes: it comes back by itself (`resumed`), it lies stopped
    until somebody starts it (`stopped`), or it is `gone`. `durable` is an output on the storage that has to be asked
    for, None where there is none.
    """

    name: str
    account: type[Emulator]
    api: Api
    gpu: str
    creates: str
    ends: str
    taken: Literal["resumed", "stopped", "gone"]
    spot: bool = False
    durable: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    take_key: Callable[[Any, Machines], None] = lambda account, machines: None
    """Give the account the key of the machines' owner, where the platform takes none with an order."""


def platforms() -> tuple[Platform, ...]:
    """Return the `PLATFORM` of every emulator, by name; no list is edited."""
    modules = [importlib.import_module(f"clouds.{m.name}") for m in pkgutil.iter_modules(clouds.__path__)]
    return tuple(sorted((m.PLATFORM for m in modules if hasattr(m, "PLATFORM")), key=lambda p: p.name))
