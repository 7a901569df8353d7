"""Name the person on whose behalf something is done. An event's actor is the interface and that person: `http/alice`.

A process acts for the user who runs it. Where it serves several people, each request acts for whoever sent it.
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
    """Let everything in this block, and in the tasks that it starts, be done on behalf of a person."""
    before = _PERSON.set(person)
    try:
        yield
    finally:
        _PERSON.reset(before)


def acting(process: str) -> str:
    """Return the actor of what is done now by a process whose actor is `process`."""
    person = _PERSON.get()
    return f"{process.partition('/')[0]}/{person}" if person else process


def person_of(actor: str) -> str:
    """Return the person of an event's actor; empty in a ledger of before that was recorded."""
    return actor.partition("/")[2]


def user_here() -> str:
    """Return the name of the user who runs this process: by the account, since anybody can set a variable."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except ImportError:  # Windows
        return os.environ.get("USERNAME", "unknown")
    except KeyError:  # an account without a name, as in a container
        return f"uid {os.getuid()}"
