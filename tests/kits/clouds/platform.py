"""Declaration of an emulated platform for the lifecycle tests, found at the end of each emulator's module."""

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
    """One platform: its account, its API, the requested instance, and the requests that create and end an instance.

    `taken` is the state of a machine after a preemption: it restarts by itself (`resumed`), it is stopped until a
    request starts it (`stopped`), or it is `gone`; if the platform never interrupts machines, `gone`. `priced` is false
    if its API reports no price before an order. `durable` is an output on storage that must be requested; None if
    the platform has no such storage.
    """

    name: str
    account: type[Emulator]
    api: Api
    gpu: str
    creates: str
    ends: str
    taken: Literal["resumed", "stopped", "gone"]
    spot: bool = False
    priced: bool = True
    durable: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    take_key: Callable[[Any, Machines], None] = lambda account, machines: None
    """Add the owner's key to the account, if orders can't include a key."""


def platforms() -> tuple[Platform, ...]:
    """Return the `PLATFORM` of every emulator, sorted by name. New modules are found automatically."""
    modules = [importlib.import_module(f"clouds.{m.name}") for m in pkgutil.iter_modules(clouds.__path__)]
    return tuple(sorted((m.PLATFORM for m in modules if hasattr(m, "PLATFORM")), key=lambda p: p.name))
