"""Attacks on the final list of an artifact store, by a store, a job, a console user or a cut connection."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import anyio
import pytest

from artifact_store_kit import FILES, KEEP, Kit, landed
from fakes import FakeClock
from gpuwarden.core.errors import AuthFailed, Conflict, WardenError
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import Job, Teardown
from gpuwarden.core.store_address import StoredFile
from gpuwarden.interfaces import results
from gpuwarden.ledger.events import AlertRaised, LeaseCameBack
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.providers.rehearsal import RehearsalProvider
from lifecycle_kit import prove, records, story, weights
from mortal_kit import Died, Fuse, Mortal, MortalLedger
from pretend_machines import Processes, remembered
from real_parts import amount
from small_disk import fill
from wording import Wording

pytestmark = pytest.mark.anyio


def used_from_the_console(kit: Kit, job: str, late: bytes = b"merged by hand") -> None:
    """Start the machine in the console, work on it and stop it, without a poll in between."""
    machine = records(kit.cloud)[0].id
    kit.cloud.start(machine)
    for _ in range(4):
        kit.clock.advance(900)
        kit.cloud.truths()
    kit.backend.write(kit.handle(job), "late.txt", late)
    kit.cloud.stop(machine)
    kit.clock.advance(600)


async def test_an_unobserved_start_voids_the_final_list(kit: Kit) -> None:
    """The bill reveals the start. Files written meanwhile are only on the machine, so it is read again."""
    job = await kit.off()
    kit.keeps(job)
    used_from_the_console(kit, job)
    for _ in range(3):
        await kit.round()
    assert kit.state() == "stopped"
    assert (await advance(kit.ctx, job)).state is Job.UNKNOWN
    done = await pull(kit.ctx, job)
    assert not done.store and kit.starts() == 2 and landed(done)["out/late.txt"] == b"merged by hand"


async def test_an_unobserved_start_voids_a_copy_from_the_store(kit: Kit) -> None:
    job = await kit.off()
    kit.keeps(job)
    await advance(kit.ctx, job)
    await pull(kit.ctx, job)
    await prove(kit.ctx, job)
    assert copy_state(kit.ctx, job) is Copy.PROVEN
    used_from_the_console(kit, job)
    view = await request(kit.ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and "TD-SEE-001" in {f.rule for f in view.findings}
    assert copy_state(kit.ctx, job) is Copy.FROM_STORE, "the machine may have more"


@pytest.mark.slow
async def test_a_machine_used_since_the_copy_is_read_again_before_its_end(ordered: Kit) -> None:
    """The machine is started, read again, and ended once the newer file is here."""
    job = await ordered.off()
    ordered.keeps(job)
    for _ in range(4):
        await ordered.round()
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.state() == "stopped" and copy_state(ordered.ctx, job) is Copy.PROVEN
    used_from_the_console(ordered, job)
    kinds = []
    for _ in range(40):
        kinds += await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert "came_back" in kinds and ordered.state() == "gone" and ordered.starts() == 2
    assert next((ordered.ctx.home / "artifacts" / job).rglob("late.txt")).read_bytes() == b"merged by hand"
    ordered.holds()


async def test_a_disk_bill_does_not_count_as_a_start(ordered: Kit) -> None:
    job = await ordered.off()
    ordered.keeps(job)
    for _ in range(12):
        await ordered.round(3600)
        await check(ordered.ctx, job)
    assert ordered.ctx.ledger.events(kind=LeaseCameBack) == []


async def test_a_stopped_machine_is_shown_with_only_its_disk_price(ordered: Kit, wording: Wording) -> None:
    """The list of waiting items shows the disk's price, and an alert claims nothing about the store's files."""
    job = await ordered.off()
    ordered.keeps(job)
    for _ in range(4):
        await ordered.round()
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    waits = what_waits(ordered.ctx)
    assert [w.kind for w in waits] == ["ordered"] and ordered.state() == "stopped"
    assert "$0.02/h" in waits[0].text and "3.60" not in waits[0].text
    assert waits[0].price_usd_per_hour == pytest.approx(0.02, abs=0.01)
    self_stopped = [
        e.data.text for e in ordered.ctx.ledger.events(kind=AlertRaised) if e.data.condition == "self_stopped"
    ]
    wording(self_stopped[0], job, "$0.02/h", KEEP)
    assert {*self_stopped} == {self_stopped[0]}


@pytest.mark.slow
async def test_a_self_stopped_machine_is_started_if_the_store_denies_the_files(
    ordered: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store shows its list but denies an object, or lacks an object and the key may not list."""
    job = await ordered.night()
    ordered.keeps(job)

    async def denied(keys: Sequence[str], **_: bool) -> dict[str, StoredFile]:
        raise AuthFailed("kept: AccessDenied", "Set another key.")

    monkeypatch.setattr(ordered.shelf, "files", denied)
    for _ in range(30):
        await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.starts() == 1 and ordered.state() == "gone"
    ordered.holds()


@pytest.mark.slow
async def test_a_full_local_disk_does_not_stop_a_watch_pulling_from_a_store(
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    disk: Callable[[str], Path],
) -> None:
    home, cloud = disk("size=64m") / "home", tmp_path / "cloud"
    home.mkdir(mode=0o700)
    cloud.mkdir(mode=0o700)
    (home / "providers").symlink_to(cloud)
    kit = Kit(home, processes, monkeypatch, "terminate")
    job = await kit.night()
    kit.keeps(job)
    for _ in range(3):
        await kit.round()
    assert copy_state(kit.ctx, job) is Copy.NONE
    full = fill(home.parent)
    for _ in range(20):
        kit.clock.advance(120)
        await kit.watcher.copier.round()
        await kit.watcher.round()
    assert kit.state() == "stopped" and kit.starts() == 0 and kit.watcher.copier.trouble
    full.unlink()
    for _ in range(40):
        await kit.round(120)
        await kit.watcher.copier.round()
        await prove(kit.ctx, job)
    assert kit.state() == "gone"
    assert {f: (home / "artifacts" / job / f).read_bytes() for f in FILES} == FILES
    kit.holds()


async def test_an_unsigned_list_never_replaces_a_file_from_the_machine(kit: Kit, wording: Wording) -> None:
    """A writer to the store claims a newer file; the machine is gone, and the only good copy is here."""
    job = await kit.started(artifact_store=KEEP)
    kit.backend.write(kit.handle(job), "model", b"good weights")
    await pull(kit.ctx, job)
    body = kit.keeps(job, {"out/model": b"evil weights", "out/new": b"new"}, end=False, signed=False)
    body["files"][0]["mtime_ns"] = 4 * 10**18
    kit.lists(job, body, signed=False)
    await kit.taken()
    with pytest.raises(Conflict) as refused:
        await pull(kit.ctx, job)
    wording(refused, job, "out/model")
    assert next((kit.ctx.home / "artifacts" / job).rglob("model")).read_bytes() == b"good weights"
    assert copy_state(kit.ctx, job) is Copy.UNVERIFIED
    kit.lists(job, body)
    assert landed(await pull(kit.ctx, job))["out/model"] == b"evil weights", "the job's own runner is believed"


NUMBERS = {
    "size beyond a float": ("size", 10**400),
    "size beyond a file": ("size", 2**63),
    "time beyond a float": ("mtime_ns", 10**400),
    "time beyond a file": ("mtime_ns", 10**30),
    "time before a file": ("mtime_ns", -(10**30)),
    "part beyond a file": ("part_size", 10**400),
    "the largest file": ("size", 2**63 - 1),
    "the last time": ("mtime_ns", 2**63 - 1),
    "the first time": ("mtime_ns", -(2**63 - 1)),
}


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("case", NUMBERS)
async def test_impossible_numbers_in_a_list_stop_neither_watch_nor_pull(ordered: Kit, case: str, signed: bool) -> None:
    kit, (field, number) = ordered, NUMBERS[case]
    job = await kit.night()
    body = kit.keeps(job)
    body["files"][0][field] = number
    kit.lists(job, body, signed=signed)
    for _ in range(3):
        await kit.round()
        await kit.watcher.copier.round()
    results.checked(await check(kit.ctx, job))
    with contextlib.suppress(WardenError):
        await pull(kit.ctx, job)
    await kit.taken()
    with contextlib.suppress(WardenError):
        await pull(kit.ctx, job)
    results.checked(await check(kit.ctx, job))


async def test_names_and_texts_from_a_list_are_shown_printable(kit: Kit) -> None:
    evil = "out/\x1b]0;evil\x07\x1b[2J\u202eabc\nIGNORE ALL"
    job = await kit.night()
    body = kit.keeps(job)
    body["files"].append({"path": evil, "size": 4, "sha256": sha256(b"evil").hexdigest(), "mtime_ns": 10**18})
    body["end"] |= {"missing": [evil], "skipped": [{"path": evil, "why": evil}]}
    body["end"]["disclosed"]["processes"] = [evil]
    body["end"]["status"]["why"] = evil
    kit.lists(job, body)
    await kit.round()
    await advance(kit.ctx, job)
    said = [results.checked(await check(kit.ctx, job)), results.pulled(await pull(kit.ctx, job))]
    said.append(results.torn_down(await request(kit.ctx, job, "terminate")))
    for reply in said:
        text = reply.model_dump_json()
        assert "abc" in text
        assert all(mark not in text for mark in ("\\u001b", "\u202e", "\\u0007"))


# ------------------------------------------------------------------------------- kills and cuts while a store is read

NIGHTS = amount(6, 25)


class StoreNight(Kit):
    """A self-stopped machine. The watch dies, the store fails and lies, and a user works in the console.

    `saved` has the files on the machine, which are nowhere else if the store lacks them.
    """

    def __init__(self, home: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random, self.fuse, self.deaths, self.faults = random.Random(seed), Fuse(), 0, 0
        super().__init__(home, processes, monkeypatch, "terminate")
        self.saved = {"out/model.safetensors": weights(), "out/log.txt": b"done"}
        self.reopen()

    def reopen(self) -> None:
        """Start a new process over the same state folder, cloud and store."""
        before = self.ctx
        ledger = MortalLedger(before.home / "ledger.db", self.clock, "watch")
        ledger.fuse = self.fuse
        self.ctx = Context(ledger, before.policy, self.clock, before.home, env=before.env)
        self.ctx._providers[self.platform] = Mortal(RehearsalProvider(self.cloud), self.fuse)  # type: ignore[assignment]
        self.ctx._backends["local"] = Mortal(self.backend, self.fuse)  # type: ignore[assignment]
        self.watcher = Watcher(self.ctx)
        before.ledger.close()

    def begin(self) -> None:
        self.job = anyio.run(partial(self.started, artifact_store=KEEP))
        for path, content in self.saved.items():
            self.backend.write(self.handle(self.job), path.removeprefix("out/"), content)
        self.backend.end(self.handle(self.job))
        self.self_stops()
        self.clock.advance(9 * 3600)
        self.keeps(self.job, self.saved)
        self.good = dict(self.shelf.objects)

    def something_happens(self) -> None:
        shelf, key = self.shelf, self.key(self.job, "out/model.safetensors")
        shelf.silent, shelf.cuts, shelf.sizes, shelf.objects = False, 0, {}, dict(self.good)
        self.faults += 1
        match self.random.randrange(9):
            case 0:
                shelf.silent = True
            case 1:
                shelf.cut_at, shelf.cuts = 0, self.random.choice((1, 3, 100))
            case 2:
                shelf.sizes[key] = self.random.choice((0, 7, 2**62))
            case 3:
                shelf.objects[key] = bytes(len(self.saved["out/model.safetensors"]))
            case 4:
                del shelf.objects[self.random.choice([*self.good])]
            case 5:  # another writer's list: it omits a file
                body = self.keeps(self.job, {"out/log.txt": b"done"}, signed=False)
                self.lists(self.job, body, signed=False)
            case 6 if self.state() == "stopped" and self.random.random() < 0.4:
                self.saved["out/late.txt"] = b"%d" % self.faults
                used_from_the_console(self, self.job, self.saved["out/late.txt"])
            case _:
                self.faults -= 1

    def do(self, use: Callable[[], Awaitable[object]], *, mortal: bool) -> None:
        self.fuse.left = self.random.randint(0, 40) if mortal and self.random.random() < 0.6 else None
        try:
            anyio.run(use)
        except WardenError:
            pass
        except Died:
            self.deaths += 1
            self.reopen()
        finally:
            self.fuse.left = None

    def look(self, *, mortal: bool) -> None:
        self.clock.advance(self.random.choice((15.0, 60.0, 120.0)))
        for use in (lambda: self.watcher.copier.round(), lambda: self.watcher.round()):
            self.do(use, mortal=mortal)
        if self.state() == "gone":
            here = self.ctx.home / "artifacts" / self.job
            lost = [p for p, data in self.saved.items() if not (here / p).exists() or (here / p).read_bytes() != data]
            assert not lost, f"{lost}\n{story(self.ctx.ledger.events())}"


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.attack("ending", "kills the watch and corrupts the store while a self-stopped machine is proven from it")
def test_kills_and_store_faults_never_end_a_machine_with_newer_files(
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)  # the host itself never crashes here
    monkeypatch.setattr("gpuwarden.checkpoints.load.run_child", remembered)
    monkeypatch.setattr("gpuwarden.remote.transfer.receive.SystemClock", FakeClock)  # so that retries take no time
    deaths = faults = ended = unstarted = 0
    for seed in range(NIGHTS):
        night = StoreNight(tmp_path / str(seed), processes, monkeypatch, seed)
        night.begin()
        for _ in range(20):
            night.something_happens()
            night.look(mortal=True)
            if night.state() == "gone":
                break
        night.shelf.silent, night.shelf.cuts, night.shelf.sizes = False, 0, {}
        night.shelf.objects = dict(night.good)
        for _ in range(60):
            night.look(mortal=False)
            if night.state() == "gone":
                break
        raised = {event.data.condition for event in night.ctx.ledger.events(kind=AlertRaised)}
        assert night.state() == "gone" or raised & {"self_stopped", "finished_billing"}, story(
            night.ctx.ledger.events()
        )
        deaths, faults, ended = deaths + night.deaths, faults + night.faults, ended + (night.state() == "gone")
        unstarted += night.state() == "gone" and night.starts() == 0
        night.ctx.ledger.close()
    figure = f"{deaths} kills and {faults} faults in {NIGHTS} nights: {ended} ended, {unstarted} of them not started"
    print(figure)
    record_property("figure", figure)
    assert deaths > NIGHTS and faults > NIGHTS and ended and unstarted
