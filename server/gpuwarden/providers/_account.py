"""The user's account settings for a provider: the API key, the API address, the public SSH key.

| variable | meaning |
|---|---|
| `<PLATFORM>_API_KEY` or similar | the account's key itself |
| the same name + `_FILE` | a file that contains the key; refused if other users can read it |
| `GPUWARDEN_<PROVIDER>_URL` | a different API address, https or loopback only |
| `GPUWARDEN_SSH_PUBLIC_KEY` | the public key, or its file, that new machines accept; default: the key in `~/.ssh` |
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gpuwarden.core.errors import AuthFailed, BadRequest

MAX_KEY_BYTES = 8192
SSH_KEY_VARIABLE = "GPUWARDEN_SSH_PUBLIC_KEY"
_USUAL = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
_PUBLIC = re.compile(
    r"(ssh-(?:ed25519|rsa)|ecdsa-sha2-nistp\d+|sk-[a-z0-9-]+@openssh\.com) ([A-Za-z0-9+/]{40,}={0,2})(?: .*)?"
)
_KEY = re.compile(r"[\x21-\x7e]{8,4096}")


def read_key(variable: str, platform: str, env: Mapping[str, str]) -> str:
    """Return the account's key from `variable` or from the file that `<variable>_FILE` names.

    Raises AuthFailed if no valid key is set. The message never contains the key.
    """
    file = env.get(f"{variable}_FILE")
    text = env.get(variable)
    if text:
        return _plausible(text.strip(), variable, platform)
    if file:
        return _plausible(_private_text(Path(file).expanduser(), platform), f"{variable}_FILE", platform)
    raise AuthFailed(
        f"no API key is set for {platform}", f"Set {variable}, or {variable}_FILE to a file that only you may read."
    )


def _plausible(key: str, variable: str, platform: str) -> str:
    if not _KEY.fullmatch(key):
        raise AuthFailed(
            f"the value of {variable} can't be a {platform} key: it is empty, too short, too long, or contains spaces",
            "Copy the key again.",
        )
    return key


def _private_text(file: Path, platform: str) -> str:
    """Return the text of a file that only its owner may read. The mode is checked on the open file."""
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise AuthFailed(f"the {platform} key file {file} is not a regular file", "Specify a regular file.")
            if os.name == "posix" and mode & 0o077:
                raise AuthFailed(
                    f"the {platform} key file {file} is readable by other users (mode {mode & 0o777:04o})",
                    f"Run `chmod 600 {file}`, and consider replacing the key: another user may have read it.",
                )
            return stream.read(MAX_KEY_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise AuthFailed(
            f"the {platform} key file {file} can't be read: {error.strerror or error}", "Check the path."
        ) from None


def text_of_key_file(name: str) -> str:
    """Return the content of a key file, regardless of its mode; "" if it can't be read or is not a regular file."""
    try:
        end = os.open(
            Path(name).expanduser(), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        )  # open() must not block if the file is a pipe
    except (OSError, ValueError, RuntimeError):
        return ""
    try:
        plain = stat.S_ISREG(os.fstat(end).st_mode)
        return os.read(end, MAX_KEY_BYTES).decode("utf-8", "replace").strip() if plain else ""
    except OSError:
        return ""
    finally:
        os.close(end)


def salted(salt: str, *words: str) -> str:
    """Return a digest of the words, keyed with `salt`."""
    return hmac.new(salt.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()[:32]


def base_url(variable: str, default: str, env: Mapping[str, str]) -> str:
    """Return the API address, without a trailing slash. Raises BadRequest if it would leak the key."""
    url = (env.get(variable) or default).rstrip("/")
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or 0 < parts.port < 65536
    except ValueError:
        raise BadRequest(f"{variable} is not a valid address", "Write it as https://host[:port][/path].") from None
    plain = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
    if not (plain and parts.hostname and port_is_fine) or parts.username or parts.query or parts.fragment:
        raise BadRequest(
            f"{variable} must be an https address, or an http address on this machine, without user, query or fragment",
            "Correct the address: the account's key is sent to it.",
        )
    return url


def is_loopback(host: str | None) -> bool:
    """Return whether an address's host is this machine."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return False


def public_key(env: Mapping[str, str]) -> str | None:
    """Return the user's public SSH key as `<type> <base64>`, without its comment, or None.

    Raises BadRequest if the variable contains something else, such as a private key.
    """
    given = env.get(SSH_KEY_VARIABLE, "").strip()
    if given:
        text = given if _PUBLIC.fullmatch(given) else _first_line(Path(given).expanduser())
        if (key := same_key(text)) is None:
            raise BadRequest(
                f"{SSH_KEY_VARIABLE} does not contain a public SSH key",
                "Set it to a .pub file, such as ~/.ssh/id_ed25519.pub.",
            )
        return key
    home = Path(env.get("HOME") or "~").expanduser()
    return next((key for name in _USUAL if (key := same_key(_first_line(home / ".ssh" / name)))), None)


def same_key(text: str) -> str | None:
    """Return `<type> <base64>` from a line in an authorized_keys file; None if the line is not a key."""
    match = _PUBLIC.fullmatch(text.strip())
    return f"{match[1]} {match[2]}" if match else None


def authorize_key(key: str) -> str:
    """Return an idempotent shell line that authorizes a public key when a machine starts.

    The key does not need escaping, because it consists of two words without quotes, separated by a single space.
    """
    assert same_key(key) == key
    file = "~/.ssh/authorized_keys"
    return f"mkdir -p -m 700 ~/.ssh; grep -qsF '{key}' {file} || echo '{key}' >> {file}"


def _first_line(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_KEY_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
