"""Create errors for failed logins, with advice that depends on this machine's keys and agent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from gpuwarden.core.errors import AuthFailed, BadReply, Unreachable, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.config import NO_AGENT, Endpoint

# Messages from the OpenSSH client. They are the only way to find out why a login failed, and are never translated.
_DENIED = re.compile(r"Permission denied \(([^)]*)\)")
_NOT_SSH = re.compile(r"banner exchange: .*invalid format|Bad remote protocol|banner line contains invalid characters")
_NO_ROUTE = re.compile(
    r"connect to (?:host|address) .* port \d+: (.+)|Could not resolve hostname .*|.*(?:stdio forwarding failed)"
)


def explained(endpoint: Endpoint, message: str, *, key_shown: bool) -> WardenError:
    """Return the error for a failed `ssh`, based on its output. `key_shown` is true if the host presented its key."""
    words = line(message.splitlines()[-1] if message else "", 300) or "no reason given"
    if denied := _DENIED.search(message):
        return denied_login(endpoint, denied[1].split(","), line(message, 600))
    if "Too many authentication failures" in message:
        return AuthFailed(
            f"{endpoint} rejected the login because too many keys were offered",
            "Set IdentityFile and `IdentitiesOnly yes` for this host in ~/.ssh/config.",
        )
    if _NOT_SSH.search(message):
        return BadReply(f"{endpoint.host} port {endpoint.port} is not an SSH server: {words}", "Check the port.")
    if _NO_ROUTE.search(message):
        return Unreachable(
            f"{endpoint.host} port {endpoint.port} can't be reached: {words}",
            "The instance may be booting or stopped, or its port may have changed when it was last started.",
        )
    if key_shown:
        return Unreachable(f"the connection to {endpoint} ended before the login: {words}", "Try again.")
    return Unreachable(
        f"the SSH handshake with {endpoint} failed: {words}",
        "The instance may be booting or limiting connections; try again.",
    )


def denied_login(endpoint: Endpoint, methods: list[str], message: str = "") -> AuthFailed:
    """Return the error for a host that did not accept any key, with advice that depends on the keys and the agent."""
    if "publickey" not in methods:
        allowed = ", ".join(m for m in methods if m) or "no supported method"
        return AuthFailed(
            f"{endpoint} does not accept public keys; it accepts only {allowed}",
            "gpuwarden logs in only with key files or an agent. Enable public key authentication on the machine.",
        )
    held = agent_keys(endpoint)
    if not endpoint.identities and not held:
        agent = "the agent has no key" if held is not None else "no agent is running"
        return AuthFailed(
            f"no key is available for {endpoint}: no identity file exists, and {agent}",
            "Create a key with ssh-keygen and add the public key to your provider account, or start the agent that "
            "has your key (IdentityAgent in ~/.ssh/config, or SSH_AUTH_SOCK).",
        )
    locked = [key for key in endpoint.identities if is_locked(key)]
    if locked and not held:
        return AuthFailed(
            f"a key for {endpoint} is encrypted: {', '.join(locked)}", "Add the key to the agent: ssh-add."
        )
    lost = [key for key in endpoint.identities if key.endswith(".pub") and not Path(key[:-4]).is_file()]
    if lost and not held:
        return AuthFailed(
            f"{', '.join(lost)} is a public key, and no agent has the private key for {endpoint}",
            "Start or unlock the agent that has the private key (IdentityAgent in ~/.ssh/config, or SSH_AUTH_SOCK).",
        )
    keys = ", ".join(endpoint.identities) or "no key file"
    agent = f"keys in the agent: {held}" if held else "no key in the agent" if held == 0 else "no agent"
    return AuthFailed(
        f"{endpoint} accepted none of the keys ({keys}; {agent}): {message}",
        "Check that the public key is in the instance's authorized_keys file or in your provider account.",
    )


def agent_keys(endpoint: Endpoint) -> int | None:
    """Return the number of keys in the agent for this host; None if no agent is available."""
    agent = endpoint.identity_agent or os.environ.get("SSH_AUTH_SOCK", "")
    tool = shutil.which("ssh-add")
    if not agent or agent == NO_AGENT or tool is None:
        return None
    try:
        env = {**os.environ, "SSH_AUTH_SOCK": agent}
        ran = subprocess.run([tool, "-l"], capture_output=True, env=env, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return len(ran.stdout.splitlines()) if ran.returncode == 0 else 0 if ran.returncode == 1 else None


def is_locked(identity: str) -> bool:
    """Return whether a private key file is protected by a passphrase."""
    tool = shutil.which("ssh-keygen")
    if tool is None or identity.endswith(".pub"):
        return False
    try:
        argv = [tool, "-y", "-P", "", "-f", identity]
        ran = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode != 0
