"""Read credentials and endpoints, and reject any credential that an HTTP client would quote in an error message.

A token read from a file often ends with a line break. HTTP clients reject a header with a line break, and their
error message quotes the full header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuwarden.core.errors import AuthFailed

_LOGIN = re.compile(r"(?s)^((?:[A-Za-z][A-Za-z0-9+.-]*:)?//)?.*@")


def credential(env: Mapping[str, str], name: str) -> str | None:
    """Return a variable's value without surrounding white space, or None if it is empty.

    Raises AuthFailed if the value can't be sent in a header.
    """
    return sendable(name, env.get(name, "").strip()) or None


def sendable(name: str, value: str) -> str:
    """Return a credential if it can be sent in a header.

    Otherwise raise AuthFailed, which names the credential but does not contain its value.
    """
    if not value.isascii() or not value.isprintable():
        raise AuthFailed(
            f"{name} contains control or non-ASCII characters, so it can't be sent",
            f"Set {name} again, without line breaks or quotes around it.",
        )
    return value


def without_login(url: str) -> str:
    """Return an endpoint without its user name and password, and without surrounding white space."""
    return _LOGIN.sub(r"\1", url.strip())
