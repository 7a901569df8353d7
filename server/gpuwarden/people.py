"""Identify the user on whose behalf an action is taken. An event's actor is the interface and the user: `http/alice`.

A process acts on behalf of the user who runs it. If the process serves several users, each request acts on behalf of
its sender.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_PERSON: Final[ContextVar[str]] = ContextVar("gpuwarden_person", default="")


@contextlib.contextmanager
def acting_as(person: str) -> Iterator[None]:
    """Attribute all actions in this block, and in the tasks that it starts, to a user."""
    before = _PERSON.set(person)
    try:
        yield
    finally:
        _PERSON.reset(before)


def acting(process: str) -> str:
    """Return the current actor: `process`, with the user if actions are attributed to one."""
    person = _PERSON.get()
    return f"{process.partition('/')[0]}/{person}" if person else process


def user_of(actor: str) -> str:
    """Return the user in an event's actor; empty for events from older versions, which did not record the user."""
    return actor.partition("/")[2]


def current_user() -> str:
    """Return this process's user name from the account database, because any program can set a variable."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except ImportError:  # Windows
        return os.environ.get("USERNAME", "unknown")
    except KeyError:  # an account without a name, as in a container
        return f"uid {os.getuid()}"
