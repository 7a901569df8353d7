"""Install the watch as a service for this account: a systemd user unit, or a launchd agent.

A service does not inherit the shell's variables, so the watch reads its keys from a private file when it starts.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from gpuwarden.core.errors import BadRequest, NotSupported
from gpuwarden.interfaces.results import Result
from gpuwarden.private import private_folder, write_private

NAME: Final = "gpuwarden-watch"
LABEL: Final = "dev.gpuwarden.watch"
KEYS: Final = "watch.env"
"""The file with the API keys, next to the policy: one NAME=VALUE per line."""
KEPT: Final = ("GPUWARDEN_HOME", "GPUWARDEN_POLICY")
"""Variables with the ledger and policy paths; the service must use the same paths."""
WAIT_S: Final = 30.0


def command(keys: Path) -> list[str]:
    """Return the command line that the service runs."""
    return [sys.executable, "-P", "-m", "gpuwarden", "watch", "--keys", str(keys)]


def systemd_unit(argv: list[str], env: Mapping[str, str]) -> str:
    """Return the text of a systemd user unit."""
    settings = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in env.items())
    if set(argv[0]) & set("\"'\\"):
        raise BadRequest(
            f"systemd does not allow quotes in a program's path: {argv[0]}", "Install gpuwarden elsewhere."
        )
    program, *rest = map(_quoted, argv)
    start = " ".join((program, *(word.replace("$", "$$") for word in rest)))  # systemd expands `$` only in arguments
    return (
        "[Unit]\n"
        "Description=gpuwarden watch: advances GPU jobs and sends alerts\n"
        "\n"
        "[Service]\n"
        "Type=exec\n"
        f"ExecStart={start}\n"
        f"{settings}"
        "Restart=on-failure\n"
        "RestartSec=30\n"
        "RestartPreventExitStatus=2\n"
        "NoNewPrivileges=yes\n"
        "UMask=0077\n"
        "KillMode=mixed\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def _quoted(word: str) -> str:
    """Quote one word for a unit file. Raises BadRequest for control characters, which a unit file can't contain."""
    if any(ord(c) < 32 for c in word):
        raise BadRequest("a path that the watch uses contains a control character", "Choose another folder.")
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word}"'


def launchd_agent(argv: list[str], env: Mapping[str, str]) -> bytes:
    """Return a launchd property list."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": argv,
        "EnvironmentVariables": dict(env),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ProcessType": "Background",
    }
    return plistlib.dumps(agent)


def service_file() -> Path:
    """Return the path of this account's service file. Raises NotSupported without systemd or launchd."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    if shutil.which("systemctl") is None:
        raise NotSupported(
            "this system has neither systemd nor launchd",
            "Start the watch from cron, at `@reboot` and every five minutes. If a watch is already running, "
            "another one only shows its alerts.",
        )
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user" / f"{NAME}.service"


def install(keys: Path) -> Result:
    """Write the service file, and start the service.

    If the service manager is not reachable, the service starts at the next login.
    """
    file, env = service_file(), {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    file.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "darwin":
        file.write_bytes(launchd_agent(command(keys), env))
        problem = _ask("launchctl", "bootstrap", f"gui/{os.getuid()}", str(file))
    else:
        file.write_text(systemd_unit(command(keys), env), "utf-8")
        problem = _ask("systemctl", "--user", "daemon-reload")
        problem = problem or _ask("systemctl", "--user", "enable", "--now", f"{NAME}.service")
    if not keys.exists():
        private_folder(keys.parent)
        write_private(keys, "# One NAME=VALUE per line: the keys that the watch needs, such as RUNPOD_API_KEY=...\n")
    later = f" It could not be started ({problem})." if problem else " It is running."
    return Result(
        ok=not problem,
        code="not_started" if problem else "ok",
        message=f"The watch is installed as a service ({file}).{later}",
        hint=f"Put the platforms' keys in {keys}; only you can read it. `loginctl enable-linger` keeps the watch "
        "running while you are logged out.",
    )


def uninstall() -> Result:
    """Stop the service and remove it."""
    file = service_file()
    if not file.exists():
        return Result(message="The watch is not installed as a service.")
    if sys.platform == "darwin":
        _ask("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}")
    else:
        _ask("systemctl", "--user", "disable", "--now", f"{NAME}.service")
    file.unlink()
    if sys.platform != "darwin":
        _ask("systemctl", "--user", "daemon-reload")
    return Result(message=f"The watch no longer runs as a service; {file} was removed.")


def _ask(*argv: str) -> str:
    """Run a service manager command. Return the reason if it fails, else an empty string."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]}: {type(error).__name__}"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"{argv[0]} failed"])[0][:200]


@dataclass(frozen=True)
class Runs:
    """The watch's state: whether a watch is running for the ledger, and whether the service is installed."""

    leads: bool
    installed: bool

    def __str__(self) -> str:
        now = "a watch is running" if self.leads else "no watch is running"
        return f"{now}; the watch is {'' if self.installed else 'not '}installed as a service"


def runs(home: Path) -> Runs:
    """Return whether a watch is running for the ledger in `home`, and whether the service is installed."""
    lock = FileLock(private_folder(home / "locks") / "watch.lock", mode=0o600)
    try:
        with lock.acquire(blocking=False):
            leads = False
    except Timeout:
        leads = True
    try:
        installed = service_file().exists()
    except NotSupported:
        installed = False
    return Runs(leads, installed)


def read_keys(file: Path) -> dict[str, str]:
    """Return the variables in a key file. Raises BadRequest if other users can read the file or a line is invalid."""
    try:
        mode, text = file.stat().st_mode, file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"the key file {file} can't be read", "Check its path and permissions.") from error
    if os.name != "nt" and stat.S_IMODE(mode) & 0o077:
        raise BadRequest(f"other users can read the key file {file}", f"Run chmod 600 {file}.")
    found = {}
    for number, row in enumerate(text.splitlines(), 1):
        if not row.strip() or row.lstrip().startswith("#"):
            continue
        name, mark, value = row.partition("=")
        if not mark or not name.strip().isidentifier() or name.strip().startswith("GPUWARDEN_"):
            raise BadRequest(f"line {number} of {file} is not NAME=VALUE, or sets GPUWARDEN_*", "Fix that line.")
        found[name.strip()] = value.strip()
    return found
