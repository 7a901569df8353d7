"""Fixtures for the SSH tests: a connection to the real server with each of the two clients."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator

import pytest

from gpuwarden.remote.ssh import openssh
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.openssh import Master
from real_parts import need
from sshd import Sshd
from waiting import eventually

CLIENTS = ["openssh", "paramiko"]


def machine(server: Sshd, *, pin: str | None = None, host: str = "box") -> Ssh:
    return Ssh(resolve(host, config=server.config), pin=pin, config=server.config)


def cut(ssh: Ssh) -> None:
    """Cut the connection to a machine, as a network failure does."""
    opened = ssh.link.connection()
    if isinstance(opened, Master):
        os.kill(opened.control.pid(), signal.SIGKILL)
        eventually(lambda: not opened.alive)
    else:
        opened.transport.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]


@pytest.fixture(name="client", params=CLIENTS)
def client_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with each client."""
    if request.param == "paramiko":
        monkeypatch.setattr(openssh, "usable", lambda: None)
    else:
        need("an OpenSSH client, 8.5 or newer", openssh.usable() is not None)
    return str(request.param)


@pytest.fixture(name="box")
async def box_fixture(sshd: Sshd, client: str) -> AsyncIterator[Ssh]:
    ssh = machine(sshd)
    yield ssh
    await ssh.aclose()
