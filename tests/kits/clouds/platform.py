"""Declaration of an emulated platform for the lifecycle tests, found at the end of each emulator's module."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import clouds
from clouds.base import Emulator
from clouds.boxes import Machines
from gpuwarden.providers._rented import HttpProvider


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One platform: its emulator, its provider, its requests, and the facts that its documentation states.

    `creates`, `lists`, `gets`, `ends` and `gets_balance` match the lines of these requests (`POST /pods`);
    `gets_balance` is None if the API reports no balance. `reports_no_instances` returns whether a reply, its status and
    its JSON object, reports that there are no instances, or that the instance does not exist.
    """

    name: str
    account: type[Emulator]
    provider: type[HttpProvider]
    gpu: str = "H100"
    creates: str
    lists: str
    gets: str
    ends: str
    gets_balance: str | None = None
    reports_no_instances: Callable[[int, dict[str, Any]], bool]
    names_account: bool = True
    """Whether the API identifies the account of a key."""
    ident: str = "abc123"
    """An id in the platform's format, of an instance that does not exist."""
    spec: tuple[str, str] | None = None
    """The published API description: its file, and the prefix of its paths."""
    gaps: tuple[str, ...] = ()
    """Known replies in which the platform deviates from its description."""
    env: tuple[tuple[str, str], ...] = ()
    """Further variables that the provider needs."""
    taken: Literal["resumed", "stopped", "gone"]
    """The state of a machine after a preemption: it restarts by itself (`resumed`), it is stopped until a request
    starts it (`stopped`), or it is `gone`; if the platform never interrupts machines, `gone`."""
    spot: bool = False
    priced: bool = True
    """Whether the API reports a price before an order."""
    durable: str | None = None
    """An output on storage that must be requested; None if the platform has no such storage."""
    take_key: Callable[[Any, Machines], None] = lambda account, machines: None
    """Add the owner's key to the account, if orders can't include a key."""
    facts: Mapping[str, Any]
    """Expected consequences, in the format of `tests/profile_facts`: the verbs that stop compute billing (`rests`),
    the verbs after which something is still billed, the verbs that can be undone, and for each path whether its files
    survive a stop, a terminate, an interruption and the end of a job, in this order (`y`; `n` if not, or unknown)."""
    hasty: tuple[str, ...] = ()
    """Commands that a hasty agent might run and that the guard blocks."""
    innocent: tuple[str, ...] = ()
    """Similar commands that the guard allows."""


def platforms() -> tuple[Platform, ...]:
    """Return the `PLATFORM` of every emulator, sorted by name. New modules are found automatically."""
    modules = [importlib.import_module(f"clouds.{m.name}") for m in pkgutil.iter_modules(clouds.__path__)]
    return tuple(sorted((m.PLATFORM for m in modules if hasattr(m, "PLATFORM")), key=lambda p: p.name))
