"""What the tests of SSH share: a connection to the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.session import Ssh
from sshd import Sshd


def machine(server: Sshd, *, pin: str | None = None, host: str = "box") -> Ssh:
    return Ssh(resolve(host, config=server.config), pin=pin, config=server.config)


@pytest.fixture(name="box")
async def box_fixture(sshd: Sshd) -> AsyncIterator[Ssh]:
    ssh = machine(sshd)
    yield ssh
    await ssh.aclose()
