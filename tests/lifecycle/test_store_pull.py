"""Pulls from the artifact store when the machine can't be read: complete, and compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from artifact_store_kit import FILES, KEEP, MODEL, Kit, landed
from fakes import FakeClock
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import Conflict, NotFound, Unreachable, WardenError
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import Handle, InstanceState, Level, Observation
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import TeardownPolicy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Teardown
from gpuwarden.core.store_address import MANIFEST, StoreAddress, StoredFile
from gpuwarden.interfaces import results
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.ledger.events import ArtifactsPulled, ResumeIntent
from gpuwarden.lifecycle.artifacts.local_copies import copy_state, last_pull
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.store_contents import read_store, unsettled
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases import self_stop
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.overview import cached_overview
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.teardown.gate import request, silent
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.remote.launch import observation
from gpuwarden.remote.runner.observe import observe
from gpuwarden.remote.runner.self_stop import record_request
from lifecycle_kit import WEALTHY, launch, open_house, promises, prove, records, rent_cloud, training
from pretend_machines import Processes
from relaunch_kit import Allowed, Resuming
from store_kit import SAVE, S3Server, s3_server
from waiting import soon
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("machines_vanish")]


# ----------------------------------------------------------------------------------------- an in-memory store


async def test_a_self_stopped_machine_stays_off_if_the_store_has_the_last_manifest(kit: Kit) -> None:
    job = await kit.night()
    kit.keeps(job)
    await kit.round()
    record = await advance(kit.ctx, job)
    assert record.state is Job.SUCCEEDED, "how it ended is in the store's signed list"
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and done.store == KEEP and not done.unsettled
    assert kit.starts() == 0 and copy_state(kit.ctx, job) is Copy.UNVERIFIED
    await prove(kit.ctx, job)
    view = await request(kit.ctx, job, "terminate")
    assert view.record.state is Teardown.AWAITING_HUMAN and view.complete and silent(view), view.findings
    kit.holds()


@pytest.mark.slow
async def test_automatic_teardown_ends_a_self_stopped_machine_without_a_start(ordered: Kit) -> None:
    job = await ordered.night()
    ordered.keeps(job)
    for _ in range(30):
        await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.state() == "gone" and ordered.starts() == 0
    assert ordered.ctx.ledger.last(f"job/{job}", ArtifactsPulled) is not None
    ordered.holds()


UNPROVEN: dict[Code, dict[str, Any]] = {
    Code.STORE_UNSIGNED: {"signed": False},
    Code.STORE_NO_END: {"end": False},
    Code.STORE_OTHER_OUTPUTS: {"ended": {"outputs": ["elsewhere"]}},
    Code.STORE_NO_LAST_LOOK: {"ended": {"look": ""}},
}


@pytest.mark.parametrize("code", UNPROVEN, ids=str)
async def test_a_machine_without_a_final_list_in_the_store_is_started(kit: Kit, code: Code) -> None:
    job = await kit.night()
    kit.keeps(job, **UNPROVEN[code])
    record = read_job(kit.ctx.ledger, job)
    contents = await read_store(kit.ctx, record)
    assert contents is not None
    why = unsettled(kit.ctx, record, contents)
    assert why is not None and why.code is code
    await kit.round()
    assert (await advance(kit.ctx, job)).state is Job.UNKNOWN
    done = await pull(kit.ctx, job)
    assert not done.store and kit.starts() == 1


async def test_another_attempts_list_does_not_count_as_final(kit: Kit) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    body["end"]["status"]["attempt"] = 2
    kit.lists(job, body)
    record = read_job(kit.ctx.ledger, job)
    contents = await read_store(kit.ctx, record)
    assert contents is not None
    why = unsettled(kit.ctx, record, contents)
    assert why is not None and why.code is Code.STORE_NO_END


async def test_a_changed_list_fails_its_signature(kit: Kit) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    signed = json.loads(kit.shelf.objects[kit.key(job, MANIFEST)])
    for change in ({"files": body["files"][1:]}, {"taken_at": 2e9}, {"end": body["end"] | {"look": "2"}}):
        kit.shelf.objects[kit.key(job, MANIFEST)] = json.dumps(signed | change).encode()
        contents = await read_store(kit.ctx, read_job(kit.ctx.ledger, job))
        assert contents is not None and not contents.signed


async def test_a_start_after_the_final_list_voids_it_and_the_gates_proof(kit: Kit) -> None:
    job = await kit.off()
    kit.keeps(job)
    await advance(kit.ctx, job)
    await pull(kit.ctx, job)
    await prove(kit.ctx, job)
    record = read_job(kit.ctx.ledger, job)
    kit.ctx.ledger.add(f"lease/{record.lease}", ResumeIntent(why="somebody started it"))
    contents = await read_store(kit.ctx, record)
    assert contents is not None
    why = unsettled(kit.ctx, record, contents)
    assert why is not None and why.code is Code.STORE_STARTED_SINCE
    view = await request(kit.ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and "TD-SEE-001" in {f.rule for f in view.findings}


async def test_other_processes_and_files_are_disclosed(kit: Kit) -> None:
    job = await kit.night()
    other = {"path": "extra/model.safetensors", "size": 9_000_000, "mtime_ns": 1}
    kit.keeps(job, ended={"disclosed": {"processes": ["pid 7: python serve.py"], "files": [other], "complete": True}})
    await kit.round()
    await advance(kit.ctx, job)
    await pull(kit.ctx, job)
    await prove(kit.ctx, job)
    view = await request(kit.ctx, job, "terminate")
    assert {"TD-ELSE-001", "TD-ELSE-002"} <= {f.rule for f in view.findings} and not silent(view)
    assert view.record.state is Teardown.BLOCKED


async def test_a_gone_machines_files_are_pulled_from_the_store(kit: Kit) -> None:
    job = await kit.started(artifact_store=KEEP)
    kit.keeps(job, end=False)
    await kit.taken()
    steps = (await check(kit.ctx, job)).next_steps
    assert KEEP in str(steps[0].parameters["text"]) and steps[1].action is Action.PULL
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and done.unsettled and done.next_steps[0].action is not Action.PULL
    assert copy_state(kit.ctx, job) is Copy.UNVERIFIED, "nothing else has more"
    await prove(kit.ctx, job)
    assert Action.PULL not in [s.action for s in following(kit.ctx, read_job(kit.ctx.ledger, job))]


async def test_a_file_saved_again_is_read_from_its_listed_version(kit: Kit) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    next(row for row in body["files"] if row["path"] == MODEL)["version"] = "1"
    kit.shelf.objects[kit.key(job, MODEL, "1")] = FILES[MODEL]
    kit.shelf.objects[kit.key(job, MODEL)] = b"half of the next save"
    kit.lists(job, body)
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and not done.received.problems and not done.unsettled


async def test_a_machine_that_does_not_answer_is_replaced_by_its_store(kit: Kit) -> None:
    job = await kit.started(artifact_store=KEEP)
    kit.keeps(job, end=False)

    kit.backend.silent = True
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and "does not answer" in done.lost and done.unsettled


async def test_a_stopped_machines_copy_without_a_final_list_needs_a_decision(kit: Kit, wording: Wording) -> None:
    kit.ctx.policy = WEALTHY
    job = await kit.started(artifact_store=KEEP)
    kit.backend.write(kit.handle(job), "model", b"weights")
    kit.backend.end(kit.handle(job))
    await kit.after(1, job)
    kit.keeps(job, end=False)
    kit.cloud.stop(records(kit.cloud)[0].id)
    for _ in range(3):
        await kit.round(40)
    found = await check(kit.ctx, job)
    assert (
        found.artifact_store is not None
        and found.artifact_store.address == KEEP
        and found.artifact_store.files == 3
        and found.artifact_store.why
    )
    assert "out/checkpoint-10" in found.artifact_store.newest and KEEP in str(results.checked(found).artifact_store)
    assert [s.action for s in found.next_steps[:2]] == [Action.MANUAL, Action.PULL]
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and copy_state(kit.ctx, job) is Copy.FROM_STORE
    evidence = {"declared": "yes", "copied": "yes", "equal": "not_yet", "loaded": "not_yet", "stored": "unknown"}
    assert results.checked(await check(kit.ctx, job)).evidence == evidence
    assert done.next_steps[0].action is Action.MANUAL
    wording(str(done.next_steps[0].parameters["text"]), KEEP)
    await prove(kit.ctx, job)
    view = await request(kit.ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and "TD-SEE-001" in {f.rule for f in view.findings}


async def test_checking_an_unreachable_job_shows_a_bounded_store_list(kit: Kit) -> None:
    job = await kit.night()
    kit.keeps(job, {f"out/checkpoint-{n}/model.safetensors": b"x" for n in range(500)}, end=False)
    await kit.round()
    contents = (await check(kit.ctx, job)).artifact_store
    assert contents is not None and (contents.files, len(contents.newest)) == (500, 8)
    kit.shelf.silent = True
    contents = (await check(kit.ctx, job)).artifact_store
    assert contents is not None and "silent" in contents.why
    shown = " ".join(step.parameters.get("text", "") for step in (await check(kit.ctx, job)).next_steps)  # type: ignore[misc]
    assert KEEP in shown


# ----------------------------------------------------------------------------------------------------- store faults


async def broken(kit: Kit, job: str) -> dict[str, str]:
    """Pull; return the files that were not taken, as path -> reason."""
    await kit.round()
    await advance(kit.ctx, job)
    return {p.path: p.why for p in (await pull(kit.ctx, job)).received.problems}


async def test_a_file_that_the_store_lacks_is_named(kit: Kit, wording: Wording) -> None:
    job = await kit.night()
    kit.keeps(job)
    del kit.shelf.objects[kit.key(job, MODEL)]
    not_taken = await broken(kit, job)
    assert set(not_taken) == {MODEL}
    wording(not_taken[MODEL])
    assert copy_state(kit.ctx, job) is Copy.PARTIAL
    view = await request(kit.ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and MODEL in str(view.findings)


async def test_the_next_pull_gets_missing_store_files_from_the_machine(kit: Kit) -> None:
    job = await kit.night()
    kit.keeps(job)
    del kit.shelf.objects[kit.key(job, MODEL)]
    await broken(kit, job)
    assert kit.starts() == 0
    done = await pull(kit.ctx, job)
    assert not done.store and kit.starts() == 1 and copy_state(kit.ctx, job) is Copy.UNVERIFIED


@pytest.mark.slow
async def test_a_watch_starts_the_machine_once_where_the_store_lacks_a_file(ordered: Kit) -> None:
    job = await ordered.night()
    ordered.keeps(job)
    del ordered.shelf.objects[ordered.key(job, MODEL)]
    for _ in range(30):
        await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.starts() == 1 and ordered.state() == "gone"
    ordered.holds()


async def test_a_store_copy_that_fails_to_verify_is_read_once(ordered: Kit, wording: Wording) -> None:
    job = await ordered.night()
    ordered.keeps(job)  # bytes that are not weights
    for _ in range(12):
        await ordered.round(60)
        await ordered.watcher.copier.round()
    assert ordered.starts() == 0 and ordered.state() == "stopped"
    assert len([key for key, _ in ordered.shelf.reads if key.endswith("model.safetensors")]) == 1
    wording(ordered.watcher.copier.trouble[job])


async def test_a_pull_uses_the_store_if_a_start_would_cost_too_much(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await kit.night()
    kit.keeps(job, end=False)
    await kit.round()
    monkeypatch.setattr(self_stop, "_too_dear", lambda ctx, job: "its price rose")
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and done.unsettled and "its price rose" in done.lost and kit.starts() == 0
    assert done.unsettled in results.pulled(done).message


@pytest.mark.parametrize("lie", ["size", "bytes", "short"])
async def test_a_file_that_differs_from_the_list_is_not_pulled(kit: Kit, lie: str) -> None:
    job = await kit.night()
    kit.keeps(job)
    key, good = kit.key(job, MODEL), FILES[MODEL]
    if lie == "size":
        kit.shelf.sizes[key] = len(good) - 1
    elif lie == "bytes":
        kit.shelf.objects[key] = bytes(len(good))
    else:
        kit.shelf.objects[key], kit.shelf.sizes[key] = good[:-1], len(good)
    assert set(await broken(kit, job)) == {MODEL}
    assert copy_state(kit.ctx, job) is Copy.PARTIAL
    assert not list((kit.ctx.home / "artifacts" / job).rglob("model.safetensors"))


async def test_wrong_bytes_with_a_correct_listing_are_detected_on_arrival(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    job = await kit.night()
    kit.keeps(job)
    told = await kit.shelf.files([kit.key(job, path) for path in FILES])
    kit.shelf.objects[kit.key(job, MODEL)] = bytes(len(FILES[MODEL]))

    async def files(keys: Sequence[str], **_: bool) -> dict[str, StoredFile]:
        return {key: told[key] for key in keys}

    monkeypatch.setattr(kit.shelf, "files", files)
    wording((await broken(kit, job))[MODEL])


@pytest.mark.parametrize("name", ["out/../../../evil", "../evil", "out//x", "machine/x", ".gpuwarden/owner", "a\x01b"])
async def test_a_name_outside_the_folder_is_never_requested(kit: Kit, name: str) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    body["files"].append({"path": name, "size": 4, "sha256": sha256(b"evil").hexdigest()})
    kit.lists(job, body)
    assert name in await broken(kit, job)
    assert not [key for key, _ in kit.shelf.reads if name in key]


@pytest.mark.slow
async def test_an_interrupted_store_pull_resumes_at_its_offset(kit: Kit) -> None:
    job = await kit.night()
    kit.keeps(job)
    kit.shelf.cut_at, kit.shelf.cuts = 100_000, 2
    assert not await broken(kit, job)
    offsets = [at for key, at in kit.shelf.reads if key.endswith("model.safetensors")]
    assert offsets[0] == 0 and all(at >= 100_000 for at in offsets[1:]) and len(offsets) == 3


async def test_a_failed_store_pull_keeps_the_received_bytes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.remote.transfer.receive.SystemClock", FakeClock)  # so that retries take no time
    job = await kit.night()
    kit.keeps(job)
    kit.shelf.cut_at, kit.shelf.cuts = 100_000, 1_000_000
    await kit.round()
    await advance(kit.ctx, job)
    with pytest.raises(Unreachable, match=r"model\.safetensors"):
        await pull(kit.ctx, job)
    assert last_pull(kit.ctx, job) is None
    kit.shelf.cuts = 0
    done = await pull(kit.ctx, job)
    assert landed(done) == FILES and done.received.bytes_resumed >= 100_000


@pytest.mark.parametrize("fault", ["silent", "empty", "torn", "other job"])
async def test_a_self_stopped_machine_is_started_if_the_store_lacks_files(kit: Kit, fault: str) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    if fault == "silent":
        kit.shelf.silent = True
    elif fault == "empty":  # half an upload: files without their list
        del kit.shelf.objects[kit.key(job, MANIFEST)]
    elif fault == "torn":
        kit.shelf.objects[kit.key(job, MANIFEST)] = kit.shelf.objects[kit.key(job, MANIFEST)][:-9]
    else:
        kit.lists(job, body | {"job": "j-another"})
    await kit.round()
    assert (await advance(kit.ctx, job)).state is Job.UNKNOWN
    done = await pull(kit.ctx, job)
    assert not done.store and kit.starts() == 1


async def test_a_gone_machines_upload_without_a_list_is_not_pulled(kit: Kit, wording: Wording) -> None:
    job = await kit.started(artifact_store=KEEP)
    kit.shelf.objects[kit.key(job, MODEL)] = FILES[MODEL]
    await kit.taken()
    with pytest.raises(NotFound) as refused:
        await pull(kit.ctx, job)
    wording(refused, job)
    assert copy_state(kit.ctx, job) is Copy.EMPTY
    assert Action.PULL not in [s.action for s in (await check(kit.ctx, job)).next_steps], "that would turn in a circle"


async def test_an_older_store_never_replaces_newer_local_files(kit: Kit, wording: Wording) -> None:
    job = await kit.started(artifact_store=KEEP)
    kit.backend.write(kit.handle(job), "model", b"newer weights")
    await pull(kit.ctx, job)
    before = last_pull(kit.ctx, job)
    kit.keeps(job, {"out/model": b"older"}, end=False)
    await kit.taken()
    with pytest.raises(Conflict) as refused:
        await pull(kit.ctx, job)
    wording(refused, job, "out/model")
    assert last_pull(kit.ctx, job) == before and copy_state(kit.ctx, job) is Copy.UNVERIFIED
    assert Action.PULL not in [s.action for s in (await check(kit.ctx, job)).next_steps]
    assert next((kit.ctx.home / "artifacts" / job).rglob("model")).read_bytes() == b"newer weights"


async def test_files_removed_on_the_machine_are_not_pulled(kit: Kit) -> None:
    job = await kit.night()
    body = kit.keeps(job)
    for row in body["files"]:
        row["gone"] = row["path"] == "out/log.txt"
    kit.lists(job, body)
    await kit.round()
    await advance(kit.ctx, job)
    assert set(landed(await pull(kit.ctx, job))) == set(FILES) - {"out/log.txt"}


# --------------------------------------------------------------------------------------------------- a real store


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


JOB = (
    SAVE
    + """
save(10)
save(20, floats=3_000_000)  # 12 MB: two parts
open("out/log.txt", "w").write("done")
"""
)


def run_dir(ctx: Context, job: str) -> Path:
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    return Path(handle.run_dir)


async def self_stopped_for_real(tmp_path: Path, env: dict[str, str], late: bool = False) -> tuple[Context, Cloud, str]:
    """Run a job to its end with a real runner, processes and store, on a machine that then stops itself."""
    clock = SystemClock()
    ending = TeardownPolicy(self_stop_minutes=0.15)
    ctx = open_house(tmp_path / "home", clock, policy=WEALTHY.model_copy(update={"teardown": ending}))
    ctx = replace(ctx, env=env)
    cloud = rent_cloud(ctx)
    spec = training(tmp_path / "said", command=(sys.executable, "-c", JOB), artifact_store=KEEP)
    job = await launch(ctx, spec)

    async def placed() -> bool:
        await advance(ctx, job)
        return read_job(ctx.ledger, job).handle is not None

    await soon(placed, every=0.05)
    if late:  # everything is in the store, but a process that outlived the job keeps writing
        report = run_dir(ctx, job) / "keep.json"
        asked = record_request(str(report.parent))  # the machine stays on while a request is processed
        text = await soon(
            lambda: report.read_text() if report.exists() else "", good=lambda text: "done" in text or "failed" in text
        )
        assert "failed" not in text, text
        (report.parent / "work" / "out" / "late.txt").write_bytes(b"late")
        os.close(asked)

    async def off() -> bool:
        return (await list_instances(ctx)).rows[0].billing is False

    await soon(
        lambda: next(iter(cloud.truths().values())).state is InstanceState.STOPPED, within=60
    )  # it stops itself after 9 s
    await soon(off, every=0.05)
    return ctx, cloud, job


@pytest.mark.prove
async def test_a_real_self_stopped_machine_is_proven_from_its_store(tmp_path: Path, s3: S3Server) -> None:
    ctx, cloud, job = await self_stopped_for_real(tmp_path, s3.environment(), late=True)
    assert (await advance(ctx, job)).state is Job.SUCCEEDED
    contents = await read_store(ctx, read_job(ctx.ledger, job))
    assert contents is not None and contents.listed.end is not None and contents.listed.end.look
    done = await pull(ctx, job)
    names = {f"out/checkpoint-{n}/{f}" for n in (10, 20) for f in ("model.safetensors", "trainer_state.json")}
    assert set(landed(done)) == {*names, "out/log.txt", "out/late.txt"}, "a process that outlived the job wrote that"
    assert done.store == KEEP and not done.unsettled and not done.received.problems
    report = await verify_job(ctx, job)
    assert report.level is Level.LOAD and report.verdict == "proven", report.problems
    view = await request(ctx, job, "terminate")
    assert view.record.state is Teardown.AWAITING_HUMAN and silent(view), view.findings
    assert not cloud.store.state().calls.get("start") and not promises(ctx.ledger, cloud)


@pytest.mark.prove
async def test_a_reader_without_rights_falls_back_to_the_machine(tmp_path: Path, s3: S3Server) -> None:
    ctx, cloud, job = await self_stopped_for_real(tmp_path, s3.environment())
    writer = s3.environment() | {f"AWS_{n}": s3.writer()[f"AWS_{n}"] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    ctx = replace(ctx, env=writer)
    with pytest.raises(WardenError, match="AccessDenied"):
        await read_store(ctx, read_job(ctx.ledger, job))
    done = await pull(ctx, job)
    assert not done.store and cloud.store.state().calls["start"] == 1, "the store is no help, so the machine is started"


# ------------------------------------------------------------------------------------------------------- relaunch


class Lost(Kit, Allowed):
    """An installation whose jobs have an artifact store and the user's budget for another machine."""

    def __init__(self, home: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
        Allowed.__init__(self, home, processes)
        self.equip(monkeypatch)

    async def turns(self, times: int = 8, *, proves: bool = True) -> None:
        for _ in range(times):
            await self.rounds(1)
            await self.watcher.copier.round()
            for job in self.ctx.ledger.subjects("job", Job.PREEMPTED):
                if proves and copy_state(self.ctx, job.removeprefix("job/")) is not Copy.PROVEN:
                    await prove(self.ctx, job.removeprefix("job/"))

    def given(self) -> dict[str, bytes]:
        assert isinstance(self.backend, Resuming)
        return self.backend.given[-1]


@pytest.fixture
def lost(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Lost:
    return Lost(tmp_path / "home", processes, monkeypatch)


async def test_a_relaunch_resumes_from_the_artifact_store_alone(lost: Lost) -> None:
    job = await lost.running(artifact_store=KEEP)
    lost.keeps(job, end=False)
    lost.takes()
    await lost.turns()
    assert lost.rented() == 2 and lost.given() == FILES


async def test_a_relaunch_takes_the_newer_of_the_two_copies(lost: Lost) -> None:
    job = await lost.copied(artifact_store=KEEP)
    old = (await pull(lost.ctx, job)).received.files
    lost.keeps(job, {"out/model": b"weights at step 200"}, end=False)
    body = json.loads(lost.shelf.objects[lost.key(job, MANIFEST)])
    for row in body["files"]:
        row["mtime_ns"] = row["ctime_ns"] = 4 * 10**18
    lost.lists(job, body)
    lost.takes()
    await lost.turns()
    assert len(old) == 1 and lost.rented() == 2 and lost.given() == {"out/model": b"weights at step 200"}


@pytest.mark.parametrize("fault", ["empty", "older"])
async def test_a_relaunch_keeps_the_proven_copy_over_an_older_or_empty_store(lost: Lost, fault: str) -> None:
    job = await lost.copied(artifact_store=KEEP)
    if fault == "older":
        lost.keeps(job, {"out/model": b"weights at step 50"}, end=False)
    lost.takes()
    await lost.turns()
    assert lost.rented() == 2 and lost.given() == {"out/model": b"weights at step 100"}


async def test_a_store_that_never_answers_delays_a_relaunch_for_an_hour_at_most(lost: Lost) -> None:
    job = await lost.copied(artifact_store=KEEP)
    lost.shelf.silent = True
    lost.takes()
    await lost.turns(4)
    assert lost.rented() == 1 and "silent" in str(lost.watcher.copier.trouble)
    steps = (await check(lost.ctx, job)).next_steps
    assert KEEP in str(steps[0].parameters) and steps[1].action is Action.PULL
    lost.clock.advance(3600)
    await lost.turns(4)
    assert lost.rented() == 2 and lost.given() == {"out/model": b"weights at step 100"}


async def test_an_unproven_store_copy_is_not_relaunched_from(lost: Lost) -> None:
    job = await lost.running(artifact_store=KEEP)
    lost.keeps(job, end=False)  # bytes that are not weights, so never proven
    lost.takes()
    await lost.turns(proves=False)
    assert lost.rented() == 1 and read_job(lost.ctx.ledger, job).reason is Code.NOT_RELAUNCHED


async def test_without_a_budget_the_next_step_is_to_pull_from_the_store(kit: Kit) -> None:
    job = await kit.started(artifact_store=KEEP)
    kit.keeps(job, end=False)
    await kit.taken()
    assert read_job(kit.ctx.ledger, job).state is Job.FAILED
    rest = (await check(kit.ctx, job)).next_steps
    assert [s.action for s in rest] == [Action.MANUAL, Action.PULL, Action.VERIFY]
    await pull(kit.ctx, job)
    await prove(kit.ctx, job)
    rest = (await check(kit.ctx, job)).next_steps
    assert [s.parameters["inputs"] for s in rest if s.action is Action.SUBMIT] == [("resume",)], "from the copy"


# ------------------------------------------------------------------------------------------------------ failed uploads


@pytest.mark.slow
async def test_a_failing_upload_keeps_its_alert_until_it_works(kit: Kit) -> None:
    said = "the upload to the artifact store failed: ClientError (AccessDenied)"
    poll, failing = kit.backend.poll, True

    async def polled(handles: Sequence[Handle]) -> dict[str, Observation]:
        seen = await poll(handles)
        return {token: o.model_copy(update={"upload": said if failing else ""}) for token, o in seen.items()}

    with patch.object(kit.backend, "poll", polled):
        job = await kit.started(artifact_store=KEEP)
        assert "upload_failed" in await kit.round()
        kit.backend.write(kit.handle(job), "model", b"weights")
        kit.backend.end(kit.handle(job))
        raised_kinds = [kind for _ in range(5) for kind in await kit.round()]
        assert "upload_failed" not in raised_kinds, "it is told once"
        (alert,) = (e.data for e in kit.ctx.ledger.standing_alerts() if e.data.condition == "upload_failed")
        assert said in alert.text and KEEP in alert.text
        assert all(name in alert.text for name in StoreAddress.parse(KEEP).secrets)
        assert any(said in text for text in status_of(cached_overview(kit.ctx, {})).alerts)
        kit.backend.silent = True
        await kit.round()
        assert [e.data for e in kit.ctx.ledger.standing_alerts() if e.data.condition == "upload_failed"] == [alert]
        kit.backend.silent, failing = False, False
        await kit.round(400)
    assert "upload_failed" not in {e.data.condition for e in kit.ctx.ledger.standing_alerts()}


def test_the_upload_error_is_read_from_the_uploaders_own_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "succeeded", "upload": "what the job claims"}))
    assert observe(str(tmp_path))["upload"] == ""
    (tmp_path / "keep.json").write_text(json.dumps({"state": "failed", "error": "denied"}))
    assert observe(str(tmp_path))["upload"] == "denied"
    assert observation({**observe(str(tmp_path)), "now": 1.0}).upload == "denied"
