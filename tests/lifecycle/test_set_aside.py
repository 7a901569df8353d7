"""The proven copy of a job that may be relaunched survives until a newer copy is proven."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.models import Artifact, Handle
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import ArtifactsPulled
from gpuwarden.lifecycle.artifacts.local_copies import copy_state, last_pull
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.set_aside import bytes_replaced, drop_older
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.execution.relaunch import proven_copy
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.teardown.facts import complete_copy
from lifecycle_kit import prove, weights
from pretend_machines import Processes
from relaunch_kit import Allowed

pytestmark = pytest.mark.anyio
PAUSE = "gpuwarden.remote.transfer.receive._Receiver._pause"
OLD = {"out/model": b"weights at step 100", "out/optim": b"moments at step 100", "out/config": b"unchanged"}


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> Allowed:
    return Allowed(tmp_path / "home", processes)


async def _proven(house: Allowed) -> str:
    """Return a running job with a proven copy, which has since rewritten its checkpoint in place."""
    job = await house.running()
    for name in ("optim", "config"):
        house.backend.write(house.handle(job), name, OLD[f"out/{name}"])
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    house.backend.write(house.handle(job), "model", b"weights at step 200!!")
    house.backend.write(house.handle(job), "optim", b"moments at step 200")
    return job


def _kept(house: Allowed, job: str) -> dict[str, bytes]:
    found = proven_copy(house.ctx, read_job(house.ctx.ledger, job))
    return {path: Path(place).read_bytes() for path, place in found[0].places.items()} if found else {}


def _aside(house: Allowed, job: str) -> Path:
    return house.ctx.home / "artifacts" / job / ".gpuwarden" / "proven"


def _reads(house: Allowed, path: str, then: Callable[[Artifact], None]) -> object:
    """Call `then` each time one file is read."""
    whole = house.backend.read

    async def read(handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        if artifact.path == path:
            then(artifact)
        async for piece in whole(handle, artifact, offset):
            yield piece

    return patch.object(house.backend, "read", read)


async def test_losing_the_machine_during_a_pull_keeps_the_proven_copy(house: Allowed) -> None:
    job = await _proven(house)
    taken: list[str] = []

    def lost(artifact: Artifact) -> None:
        if not taken:
            house.takes()
        taken.append(artifact.path)
        raise Unreachable("the machine is lost")

    with _reads(house, "out/optim", lost), patch(PAUSE), pytest.raises(Unreachable):
        await pull(house.ctx, job)
    assert _kept(house, job) == OLD
    await house.rounds()
    assert read_job(house.ctx.ledger, job).state is Job.RUNNING and house.rented() == 2
    assert house.backend.given == [{}, OLD]


async def test_repeated_failed_pulls_keep_the_proven_copy(house: Allowed) -> None:
    job = await _proven(house)

    def silent(_: Artifact) -> None:
        raise Unreachable("silence")

    for step in range(3):
        house.backend.write(house.handle(job), "config", b"changed at last" if step else b"unchanged")
        with _reads(house, "out/optim", silent), patch(PAUSE), pytest.raises(Unreachable):
            await pull(house.ctx, job)
        assert _kept(house, job) == OLD


async def test_a_newer_copy_replaces_the_old_copy_once_proven(house: Allowed) -> None:
    job = await _proven(house)
    assert bytes_replaced(house.ctx, read_job(house.ctx.ledger, job), (await _listed(house, job))) == 38
    await pull(house.ctx, job)
    assert copy_state(house.ctx, job) is Copy.UNVERIFIED and _kept(house, job) == OLD
    pulled = last_pull(house.ctx, job)
    assert pulled is not None
    drop_older(house.ctx, job, pulled)
    assert _kept(house, job) == OLD, "the newer copy is not proven yet"
    await prove(house.ctx, job)
    drop_older(house.ctx, job, pulled)
    assert _kept(house, job)["out/model"] == b"weights at step 200!!" and not _aside(house, job).exists()


async def _listed(house: Allowed, job: str):  # type: ignore[no-untyped-def]
    return await house.backend.list_files(house.handle(job), ("out",))


async def test_a_changed_local_copy_is_not_kept_as_proven(house: Allowed) -> None:
    job = await _proven(house)
    (house.ctx.home / "artifacts" / job / "out" / "config").write_bytes(b"UNCHANGED")
    await pull(house.ctx, job)
    assert not _kept(house, job) and not _aside(house, job).exists()


async def test_a_file_changed_after_it_was_set_aside_is_not_proven(house: Allowed) -> None:
    job = await _proven(house)
    await pull(house.ctx, job)
    next(_aside(house, job).rglob("optim")).write_bytes(b"MOMENTS AT STEP 100")
    assert not _kept(house, job)


async def test_the_outputs_of_an_ended_job_are_replaced(house: Allowed) -> None:
    job = await _proven(house)
    house.backend.end(house.handle(job))
    await house.rounds(1)
    assert read_job(house.ctx.ledger, job).state is Job.SUCCEEDED
    await pull(house.ctx, job)
    assert not _aside(house, job).exists()


async def _logging(house: Allowed, growing: str = "train.log") -> tuple[str, Callable[[Artifact], None]]:
    """Return a job with a checkpoint, and a function that writes to another output while it is copied."""
    job = await house.running()
    handle = house.handle(job)
    (Path(handle.run_dir) / "work/out/model").unlink()
    house.backend.write(handle, "checkpoint-100.safetensors", weights())
    house.backend.write(handle, growing, b"line\n")

    def grow(artifact: Artifact) -> None:
        house.backend.write(handle, growing, b"line\n" * (artifact.size + 1))
        raise BadReply("the file's size differs from the manifest")

    return job, grow


async def test_a_log_that_grows_does_not_prevent_a_proof(house: Allowed) -> None:
    job, grow = await _logging(house)
    with _reads(house, "out/train.log", grow):
        await house.watcher.copier.round()
    assert copy_state(house.ctx, job) is Copy.PROVEN and not house.watcher.copier.trouble
    house.takes()
    await house.rounds()
    assert house.backend.given[-1].keys() == {"out/checkpoint-100.safetensors"}


async def test_a_copy_without_the_log_does_not_count_after_the_end(house: Allowed) -> None:
    """The job ends while its outputs are copied: the copy lacks a file, so no teardown may rely on it."""
    job, grow = await _logging(house)
    with _reads(house, "out/train.log", grow):
        await pull(house.ctx, job)
    house.backend.end(house.handle(job))
    await house.rounds(1)
    record = read_job(house.ctx.ledger, job)
    pulled = house.ctx.ledger.last(record.subject, ArtifactsPulled)
    assert record.state is Job.SUCCEEDED and pulled is not None
    house.ctx.ledger.add(record.subject, pulled.data)
    assert copy_state(house.ctx, job) is Copy.PARTIAL and complete_copy(house.ctx, record) is None
    await verify_job(house.ctx, job)
    assert copy_state(house.ctx, job) is Copy.PARTIAL


async def test_another_file_that_grows_makes_the_copy_partial_and_is_named(house: Allowed) -> None:
    job, grow = await _logging(house, "latest")  # DeepSpeed's name for the file that names the checkpoint
    with _reads(house, "out/latest", grow):
        await house.watcher.copier.round()
    assert copy_state(house.ctx, job) is Copy.PARTIAL
    assert "out/latest" in house.watcher.copier.trouble[job]
