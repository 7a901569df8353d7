"""The use cases over a real OpenSSH server: submit, look, lose the line, pull and verify on a machine of one's own."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cutting import CuttingProxy, NoWait, proxy_fixture  # noqa: F401
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.models import Level, Place, Verdict
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job
from lifecycle_kit import launch, open_house, training, until
from sshd import Sshd, sshd_fixture  # noqa: F401

pytestmark = pytest.mark.anyio

PROFILE = Path(__file__).resolve().parents[1] / "profiles" / "local.md"


@pytest.fixture
def house(
    sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Context, SshBackend]]:
    """A warden whose platform `box` is this machine behind a server and a proxy."""
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


async def test_a_machine_is_found_by_what_its_owner_noted(sshd: Sshd, tmp_path: Path) -> None:
    profiles, notes = tmp_path / "profiles", tmp_path / "notes.toml"
    profiles.mkdir()
    text = PROFILE.read_text("utf-8").replace("id: local", "id: lab", 1).replace("backend: local", "backend: ssh", 1)
    (profiles / "lab.md").write_text(text)
    notes.write_text(f"[platforms.lab]\nhost = 'box'\nscratch = '{tmp_path / 'scratch'}'\n")
    notes.chmod(0o600)
    ctx = open_house(tmp_path / "home", NoWait())
    ctx.own_profiles, ctx.notes_file = profiles, notes
    ctx._backends["ssh"] = backend = SshBackend(ctx.clock, config=sshd.config)
    try:
        job = await launch(ctx, training(tmp_path / "said", platform="lab", max_cost_usd=None))
        assert await finish(ctx, job) is Job.SUCCEEDED
        assert list((tmp_path / "scratch").glob("*/**/model.safetensors"))
    finally:
        await backend.aclose()


async def finish(ctx: Context, job: str) -> Job:
    return (await until(ctx, job)).job.state


@pytest.mark.slow
async def test_a_job_goes_its_whole_way_over_ssh(
    house: tuple[Context, SshBackend], sshd: Sshd, proxy: CuttingProxy, tmp_path: Path
) -> None:
    w, backend = house
    said = tmp_path / "said"
    job = await launch(w, training(said, 0.5, platform="box", max_cost_usd=None))
    handle = read_job(w.ledger, job).handle
    assert handle is not None and handle.place.host_key == sshd.host_key
    await backend.aclose()
    cuts = iter([3_000, 9_000])
    proxy.arm(lambda: next(cuts, None))
    assert await finish(w, job) is Job.SUCCEEDED
    assert len(said.read_text().splitlines()) == 1
    pulled = await pull(w, job, tmp_path / "here")
    assert pulled.received.complete
    assert (tmp_path / "here/out/model.safetensors").stat().st_size > 1024
    report = await verify_job(w, job, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN
