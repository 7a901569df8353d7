"""Read credentials and endpoints of services from an environment, so that no client can quote one in an error.

A token that was read from a file often ends in a line break. HTTP clients refuse such a header and quote it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuwarden.core.errors import AuthFailed

_LOGIN = re.compile(r"(?s)^((?:[A-Za-z][A-Za-z0-9+.-]*:)?//)?.*@")


def credential(env: Mapping[str, str], name: str) -> str | None:
    """Return the value of a variable without white space around it, None where it is empty. Raises AuthFailed."""
    return sendable(name, env.get(name, "").strip()) or None


def sendable(name: str, value: str) -> str:
    """Return a credential that can be sent in a header. Raises AuthFailed that has its name and not its value."""
    if not value.isascii() or not value.isprintable():
        raise AuthFailed(
            f"{name} has control characters or characters outside of ASCII, so it can't be sent",
            f"Set {name} again, without line breaks or quotes around it.",
        )
    return value


def without_login(url: str) -> str:
    """Return an endpoint without white space around it and without a user and password in it."""
    return _LOGIN.sub(r"\1", url.strip())
