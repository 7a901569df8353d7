"""List the environment variables that a client must pass to the server.

Claude Code passes its whole environment. Codex passes only variables that are listed by name, and Gemini omits
variables whose names suggest a secret. Therefore each plug-in lists its variables in a table in its module
docstring, and the manifests and `gpuwarden setup` list all of these names. They never contain a value.

    | variable | meaning |
    |---|---|
    | `MYCLOUD_API_KEY`, `MYCLOUD_API_KEY_FILE` | the account's key |
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from gpuwarden.config import PREFIX
from gpuwarden.core.policy import Policy, policy_fields
from gpuwarden.core.sanitize import SECRET_NAME

ROW: Final = re.compile(r"^\| (`[A-Z][A-Z0-9_]*`(?:, `[A-Z][A-Z0-9_]*`)*) \| (.+) \|$", re.MULTILINE)
READERS: Final = ("config", "hub.client", "core.store_address", "lifecycle.notify", "providers._account")
"""Modules that read environment variables but are not plug-ins."""
SYSTEM: Final = {
    "XDG_CONFIG_HOME": "base folder of the policy file, unless GPUWARDEN_POLICY is set",
    "XDG_DATA_HOME": "folder of the ledger, unless GPUWARDEN_HOME names it",
    "XDG_STATE_HOME": "folder with the list of this account's servers",
    "XDG_CACHE_HOME": "folder of the Hub's cache, unless HF_HOME names it",
    "SSH_AUTH_SOCK": "the socket of the SSH agent",
    "HTTPS_PROXY": "the proxy for HTTPS requests",
    "NO_PROXY": "addresses that bypass the proxy",
}
"""System environment variables that libraries read."""


@dataclass(frozen=True)
class Variable:
    """One variable: its name, its meaning, and whether its value is a secret."""

    name: str
    meaning: str
    secret: bool


def variables(allowed: Iterable[str] = Policy().secrets.allowed) -> list[Variable]:
    """Return every variable that the server or a plug-in reads, gpuwarden's own first. Imports every plug-in.

    `allowed` are the secrets that the policy allows for jobs; the server reads their values.
    """
    from gpuwarden.backends.base import BACKENDS
    from gpuwarden.providers.base import PROVIDERS, account_keys

    own, *readers = (importlib.import_module(f"gpuwarden.{name}") for name in READERS)
    plugins = [module for registry in (PROVIDERS, BACKENDS) for _, module in registry.usable()]
    # These variables make the policy stricter. If a client omitted one, the policy would be less strict than intended.
    tightening = {
        PREFIX + field.path.upper().replace(".", "_"): f"may {field.by_variable.may} {field.path} in the policy"
        for field in policy_fields()
        if field.by_variable is not None
    }
    meanings = dict(documented(own)) | tightening
    for module in (*readers, *plugins):
        meanings |= dict(documented(module))
    keys = account_keys()
    secrets = {n for n in meanings if not n.endswith("_FILE") and (n in keys or SECRET_NAME.search(n))}
    given = {n: "a secret that the policy allows for jobs" for n in allowed if n.isidentifier() and n not in meanings}
    return [Variable(n, m, n in secrets or n in given) for n, m in (meanings | given | SYSTEM).items()]


def documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield each variable in the table of a module's docstring, with its meaning."""
    for names, meaning in ROW.findall(module.__doc__ or ""):
        for name in re.findall(r"\w+", names):
            yield name, meaning
