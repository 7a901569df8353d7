"""The use cases over a real OpenSSH server."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cutting import CuttingProxy, NoWait
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.models import Place
from gpuwarden.lifecycle.context import Context
from lifecycle_kit import open_house
from paths import ROOT
from sshd import Sshd

PROFILE = ROOT / "profiles" / "local.md"


@pytest.fixture(name="ssh_house")
def house_fixture(
    sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Context, SshBackend]]:
    """Yield a context whose platform `box` is this machine behind a server and a proxy, and its backend."""
    profiles, far = tmp_path / "profiles", tmp_path / "far"
    profiles.mkdir()
    text = PROFILE.read_text("utf-8").replace("id: local", "id: box", 1).replace("backend: local", "backend: ssh", 1)
    (profiles / "box.md").write_text(text.replace("run_root: ~/.local/share/gpuwarden/runs", f"run_root: {far}", 1))
    warden = open_house(tmp_path / "home", NoWait())
    warden.own_profiles = profiles
    place = Place(platform="box", host="127.0.0.1", port=proxy.port, user=getpass.getuser(), run_root=str(far))
    monkeypatch.setattr(warden, "owned_place", lambda _: place)
    backend = SshBackend(warden.clock, config=sshd.config)
    warden._backends["ssh"] = backend
    yield warden, backend
    anyio.run(backend.aclose)
