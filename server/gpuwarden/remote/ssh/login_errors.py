"""Create errors for a failed login, with advice for the keys and the agent of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from gpuwarden.core.errors import AuthFailed, BadReply, Unreachable, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.config import NO_AGENT, Endpoint

# Messages of the OpenSSH client, the only source for the reason of a failure. They are never translated.
_DENIED = re.compile(r"Permission denied \(([^)]*)\)")
_NOT_SSH = re.compile(r"banner exchange: .*invalid format|Bad remote protocol|banner line contains invalid characters")
_NO_ROUTE = re.compile(
    r"connect to (?:host|address) .* port \d+: (.+)|Could not resolve hostname .*|.*(?:stdio forwarding failed)"
)


def explained(endpoint: Endpoint, said: str, *, key_shown: bool) -> WardenError:
    """Return the error for the output of a failed `ssh`. `key_shown`: the host had already shown its key."""
    words = line(said.splitlines()[-1] if said else "", 300) or "no reason given"
    if denied := _DENIED.search(said):
        return denied_login(endpoint, denied[1].split(","), line(said, 600))
    if "Too many authentication failures" in said:
        return AuthFailed(
            f"{endpoint} ended the login after too many keys",
            "Set IdentityFile and IdentitiesOnly yes for it in ~/.ssh/config.",
        )
    if _NOT_SSH.search(said):
        return BadReply(f"{endpoint.host} port {endpoint.port} does not speak SSH: {words}", "Check the port.")
    if _NO_ROUTE.search(said):
        return Unreachable(
            f"{endpoint.host} port {endpoint.port} can't be reached: {words}",
            "The instance may be booting or stopped, or its port may have changed at its last start.",
        )
    if key_shown:
        return Unreachable(f"the connection to {endpoint} ended before the login: {words}", "Try again.")
    return Unreachable(
        f"the SSH handshake with {endpoint} failed: {words}",
        "The instance may be booting or limiting connections; try again.",
    )


def denied_login(endpoint: Endpoint, methods: list[str], said: str = "") -> AuthFailed:
    """Return the error for a host that accepted none of the keys, with advice that fits the keys and the agent."""
    if "publickey" not in methods:
        allowed = ", ".join(m for m in methods if m) or "no supported method"
        return AuthFailed(
            f"{endpoint} does not accept public keys, only {allowed}",
            "gpuwarden logs in with keys and the agent only: enable public keys on the machine.",
        )
    held = agent_keys(endpoint)
    if not endpoint.identities and not held:
        agent = "its agent has none" if held is not None else "no agent is running"
        return AuthFailed(
            f"no key to log in to {endpoint}: no identity file exists, and {agent}",
            "Create one with ssh-keygen and add its public key to the provider's account, or start the agent that "
            "has yours (IdentityAgent in ~/.ssh/config, or SSH_AUTH_SOCK).",
        )
    locked = [key for key in endpoint.identities if is_locked(key)]
    if locked and not held:
        return AuthFailed(f"a key for {endpoint} is encrypted: {', '.join(locked)}", "Add it to the agent: ssh-add.")
    lost = [key for key in endpoint.identities if key.endswith(".pub") and not Path(key[:-4]).is_file()]
    if lost and not held:
        return AuthFailed(
            f"{', '.join(lost)} is a public key, and no agent has the private key for {endpoint}",
            "Start the agent that has it (IdentityAgent in ~/.ssh/config, or SSH_AUTH_SOCK), or unlock the agent.",
        )
    keys = ", ".join(endpoint.identities) or "no key file"
    agent = f"agent with {held}" if held else "agent without a key" if held == 0 else "no agent"
    return AuthFailed(
        f"{endpoint} accepted none of the keys ({keys}; {agent}): {said}",
        "Check that the public key is in the instance's authorized_keys or in the provider's account.",
    )


def agent_keys(endpoint: Endpoint) -> int | None:
    """Return the number of keys in the agent for this host; None if no agent answers."""
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
    """Return whether a private key file has a passphrase."""
    tool = shutil.which("ssh-keygen")
    if tool is None or identity.endswith(".pub"):
        return False
    try:
        argv = [tool, "-y", "-P", "", "-f", identity]
        ran = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode != 0
