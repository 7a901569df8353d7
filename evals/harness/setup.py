"""Define the setup of an agent under test: its model, skill pack and environment."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from evals.errors import EvalError
from evals.harness.skill_pack import ARMS, Pack, load_pack

SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PLAIN: Final = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "TMPDIR", "TEMP", "TMP"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "no_proxy"}
    | {"SYSTEMROOT", "COMSPEC", "PATHEXT", "APPDATA", "LOCALAPPDATA", "USERPROFILE"}
)


@dataclass(frozen=True)
class Setup:
    """The setup of a real agent. An empty `model` selects the agent's own default; `url` is used only for endpoints.

    `key_env` is the name of the variable that contains the endpoint's key; empty if the endpoint needs no key.
    """

    model: str = ""
    pack: Pack = field(default_factory=lambda: Pack("none"))
    url: str = "https://api.openai.com/v1"
    key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 1200.0
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sleep: Callable[[float], None] = time.sleep

    def program(self, name: str) -> str:
        """Return the path of an agent's program. Raises EvalError if it is not installed."""
        path = shutil.which(name, path=self.env.get("PATH"))
        if path is None:
            raise EvalError(f"the program {name!r} is not on the PATH", "Install it, or choose another --agent")
        return path

    def version(self, name: str) -> str:
        """Return the first line that the program prints for `--version`, or "" if there is none."""
        command = [self.program(name), "--version"]
        try:
            done = subprocess.run(command, env=self.environment(), capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.decode("utf-8", "replace").strip().partition("\n")[0][:100]

    def environment(self, *prefixes: str) -> dict[str, str]:
        """Return the environment variables for an agent's program: general ones such as PATH, and those with one of
        these prefixes.

        Tokens for clouds, the Hub and other services are excluded, because an agent under test must not have them.
        """
        return {k: v for k, v in self.env.items() if k in _PLAIN or (prefixes and k.startswith(prefixes))}

    def redacted(self, text: bytes) -> bytes:
        """Return a program's output with the values of secret variables removed."""
        for name, value in self.env.items():
            if len(value) >= 6 and any(word in name.upper() for word in SECRET):
                text = text.replace(value.encode("utf-8", "surrogateescape"), f"<{name}>".encode())
        return text


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Add the options for a real agent to a command that runs an agent."""
    parser.add_argument("--model", default="", help="the model (default: the agent's own; required for an endpoint)")
    parser.add_argument("--arm", choices=ARMS, default="none", help="the part of the skill pack that the agent sees")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="another pack's folder; required for --arm old")
    parser.add_argument("--url", default=Setup.url, help="the endpoint's address, including /v1")
    parser.add_argument("--key-env", default=Setup.key_env, metavar="NAME", help="the variable with the endpoint's key")
    parser.add_argument("--timeout", type=float, default=Setup.timeout_s, metavar="SECONDS", help="for one trial")


def from_flags(args: argparse.Namespace) -> Setup:
    """Return the setup that the options describe. Raises EvalError if the skill pack can't be loaded."""
    pack = load_pack(args.arm, args.pack)
    return Setup(args.model, pack, url=args.url, key_env=args.key_env, timeout_s=args.timeout)


def any_of(env: Mapping[str, str], names: tuple[str, ...], files: tuple[Path, ...], what: str) -> None:
    """Raise EvalError unless one of the variables is set or one of the files exists."""
    if not any(env.get(name) for name in names) and not any(file.is_file() for file in files):
        raise EvalError(
            f"{what} has no key: none of {', '.join(names)} is set",
            "Set one of them, or log in with the agent's own program",
        )
