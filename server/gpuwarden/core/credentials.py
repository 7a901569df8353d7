"""Read credentials and endpoints from an environment, so that HTTP clients never quote a credential in an error.

A token that was read from a file often ends in a line break. HTTP clients reject a header with a line break, and their
error message quotes the full header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuwarden.core.errors import AuthFailed

_LOGIN = re.compile(r"(?s)^((?:[A-Za-z][A-Za-z0-9+.-]*:)?//)?.*@")


def credential(env: Mapping[str, str], name: str) -> str | None:
    """Return the value of a variable without surrounding white space, or None if it is empty.

    Raises AuthFailed if the value can't be sent in a header.
    """
    return sendable(name, env.get(name, "").strip()) or None


def sendable(name: str, value: str) -> str:
    """Return a credential if it can be sent in a header.

    Otherwise raise AuthFailed, with the name of the credential but not its value.
    """
    if not value.isascii() or not value.isprintable():
        raise AuthFailed(
            f"{name} has control or non-ASCII characters, so it can't be sent",
            f"Set {name} again, without line breaks or quotes around it.",
        )
    return value


def without_login(url: str) -> str:
    """Return an endpoint without surrounding white space, user name and password."""
    return _LOGIN.sub(r"\1", url.strip())
