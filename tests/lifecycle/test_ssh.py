"""Use cases over a real OpenSSH server: submit, poll, lose the connection, pull and verify on the user's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutting import CuttingProxy, NoWait
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.models import Level, Verdict
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job
from lifecycle_kit import launch, open_house, training, until
from ssh_house import PROFILE
from sshd import Sshd

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_a_machine_is_found_through_the_users_notes_file(sshd: Sshd, tmp_path: Path) -> None:
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
async def test_a_job_runs_over_ssh_through_cuts_to_a_proven_copy(
    ssh_house: tuple[Context, SshBackend], sshd: Sshd, proxy: CuttingProxy, tmp_path: Path
) -> None:
    w, backend = ssh_house
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
