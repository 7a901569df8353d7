"""The ssh backend against a real OpenSSH server: the contract, and what only it promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from contract_backend import BackendContract, ended, shell
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Place
from gpuwarden.core.states import Job
from sshd import Sshd, sshd  # noqa: F401

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def backend(sshd: Sshd) -> Iterator[SshBackend]:  # noqa: F811
    ssh = SshBackend(SystemClock(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(platform="ssh", host="box", run_root=str(tmp_path / "runs"))


class TestSsh(BackendContract):
    pass
