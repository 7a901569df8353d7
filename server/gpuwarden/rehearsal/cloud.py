"""Simulate a metered cloud on this machine.

The processes and files of a rented machine are real; only the money is simulated.

The cloud behaves as one profile's front matter describes: which verbs it supports, which data survives them, when
billing stops, and how an interruption happens. Time advances on access: every call first applies the transitions that
are due (`tick`). A supervisor process (`supervisor.py`) polls, so that transitions also happen without other callers.

A change and the list of its side effects are committed together by one rename. The side effects are then carried out;
after a crash, the next caller completes them.

This is not a chroot. `Place.root` is prepended to the paths that gpuwarden itself uses, but a script that uses an
absolute path accesses this machine's own files. Rehearse only scripts that you would run here anyway.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gpuwarden.core.clock import Clock, ShiftedClock
from gpuwarden.core.errors import (
    BadReply,
    BadRequest,
    Conflict,
    NoCapacity,
    NotFound,
    NotSupported,
    RateLimited,
    Unreachable,
    nothing_sent,
)
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile, Tier
from gpuwarden.rehearsal import disk, meter, processes, runs
from gpuwarden.rehearsal.disk import Disk
from gpuwarden.rehearsal.model import MARKER, Call, Fault, Faults, Record, Settings, State, Truth
from gpuwarden.rehearsal.store import Config, Store
from gpuwarden.rehearsal.transitions import Engine

T = TypeVar("T")
_S = InstanceState
_OFF = frozenset({_S.STOPPED, _S.INTERRUPTED, _S.GONE})
SOURCE = "rehearsal catalog, simulated money"


@dataclass
class Session:
    """The state of the cloud while it is locked for one call."""

    state: State
    config: Config
    now: float
    stale_s: float = 0.0
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.config.profile, self.config.settings)


class Cloud:
    """One simulated account on one platform. Calls block for milliseconds; in async code, make them in a thread.

    `settings` and `faults` replace the stored values; None keeps the stored value. If `supervise` is true, a
    supervisor process runs while the cloud can change without a call. Unless `make` is true, a missing folder raises
    Unreachable.
    """

    def __init__(
        self,
        root: Path,
        profile: Profile,
        clock: Clock,
        *,
        settings: Settings | None = None,
        faults: Faults | None = None,
        supervise: bool = True,
        make: bool = True,
    ) -> None:
        self.root = root.absolute()
        self.profile = profile
        self.clock = clock
        self.supervise = supervise
        self.store = Store(self.root)
        self.configure(settings, faults, make=make)

    def configure(self, settings: Settings | None = None, faults: Faults | None = None, *, make: bool = False) -> None:
        """Change settings or faults. New faults count calls and instances from now on."""
        with self.store.lock(make=make):
            old = self.store.config() or Config(profile=self.profile)
            new = Config(profile=self.profile, settings=settings or old.settings, faults=faults or old.faults)
            if new != self.store.config():
                self.store.save(new)
            if faults is not None or not self.store.begun:  # the nonce does not change once the state is saved
                state = self.store.state()
                state.calls = {}
                self.store.save(state)

    @property
    def nonce(self) -> str:
        """Return the nonce that distinguishes this cloud from all others."""
        return self.store.state().nonce

    @property
    def settings(self) -> Settings:
        """Return the current settings."""
        return (self.store.config() or Config(profile=self.profile)).settings

    # ------------------------------------------------------------------------------------------------ the account

    def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the current simulated price of an instance."""

        def ask(s: Session) -> Quote:
            usd = meter.price(s.config.settings, self.profile, resources)
            stays = self.profile.residue("terminate", requested=resources.durable_storage)
            storage = s.config.settings.residue_usd_per_hour if stays else None
            return Quote(
                platform=self._platform,
                price_usd_per_hour=usd,
                source=SOURCE,
                at=s.now,
                storage_usd_per_hour=storage,
            )

        return self._call("quote", ask)

    def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent an instance with the label `token`. As in real clouds, each call rents another instance."""

        def rent(s: Session) -> Instance:
            usd = meter.price(s.config.settings, self.profile, resources)
            with nothing_sent():  # as if the search that precedes the order had found no offer
                self._refuse(s, resources, usd)
            number = s.state.calls.get("instances", 0) + 1
            s.state.calls["instances"] = number
            record = Record(
                id=f"r{s.state.nonce}-{len(s.state.records) + 1}",
                token=token,
                number=number,
                created_at=s.now,
                since=s.now,
                interruptible=resources.interruptible,
                durable=resources.durable_storage,
                sometimes=s.config.settings.sometimes,
                usd_per_hour=usd,
                ends_at=s.now + resources.deadline_s if resources.deadline_s and self._takes_end_date else None,
                residue_usd_per_hour=s.config.settings.residue_usd_per_hour,
                faults=s.config.faults.on_instance(number),
            )
            s.state.records[record.id] = record = s.engine.born(record)
            return self._view(s, record)

        return self._call("create", rent)

    def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every listed instance with the label `token`."""
        return self._call("find", lambda s: tuple(self._listed(s, token)))

    def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance that the platform lists."""
        return self._call("list", lambda s: tuple(self._listed(s)))

    def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance, with its final bill if it has ended; None if it vanished or never existed."""

        def look(s: Session) -> Instance | None:
            record = s.state.records.get(id)
            if record is None or record.vanished or self._unseen(s, record):
                return None
            return self._view(s, record)

        return self._call("get", look)

    def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped or interrupted instance, if the platform supports it."""

        def act(s: Session) -> None:
            record = self._known(s, id)
            if "stop" not in self.profile.verbs.reversible:
                raise NotSupported(f"{self._platform} can't start a stopped instance again")
            if record.state in {_S.RUNNING, _S.BOOTING}:
                return
            if record.state not in {_S.STOPPED, _S.INTERRUPTED}:
                raise Conflict(f"instance {id} is {record.state} and can't be started", "Check it again later.")
            s.state.records[id] = s.engine.boot(record, s.now, "started again")

        return self._call("start", act)

    def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Ask an instance to stop."""

        def act(s: Session) -> None:
            if self.profile.verbs.stop is None:
                raise NotSupported(f"{self._platform} can't stop instances", "Use terminate, which ends the instance.")
            record = self._known(s, id)
            if record.state not in {_S.STOPPED, _S.STOPPING, _S.TERMINATING}:
                s.state.records[id] = s.engine.stop(record, s.now)

        return self._call("stop", act)

    def self_stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Let an instance stop itself with its own key, if the platform provides one."""

        def act(s: Session) -> None:
            facts = self.profile.unattended
            if facts is None or facts.self_stop is not True:
                raise NotSupported(f"machines on {self._platform} have no known way to stop themselves")
            record = self._known(s, id)
            if record.state is _S.RUNNING:
                s.state.records[id] = s.engine.stop(record, s.now, by_itself=True)

        return self._call("self_stop", act)

    def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Terminate an instance. This has no effect if the instance has already ended."""

        def act(s: Session) -> None:
            verbs, record = self.profile.verbs, s.state.records.get(id)
            if verbs.terminate is None:
                raise NotSupported(f"{self._platform} can't terminate instances")
            if record is None or record.state in {_S.TERMINATING, _S.GONE}:
                return
            if verbs.terminate_needs_stop and record.state not in {_S.STOPPED, _S.INTERRUPTED, _S.FAILED}:
                raise Conflict(
                    f"instance {id} is {record.state}; {self._platform} terminates only stopped instances", "Stop it."
                )
            s.state.records[id] = s.engine.terminate(record, s.now)

        return self._call("terminate", act)

    # ------------------------------------------------------------------------------------------- for tests and demos

    def tick(self) -> float | None:
        """Advance time. Return the seconds until the next scheduled change; None if nothing can change without a call.

        Returns `inf` if no change is scheduled but an instance is running, because its job's files can change its state
        at any time.
        """
        with self._session(counts=False) as s:
            self._tick(s)
            restless = [r for r in s.state.records.values() if self._restless(r)]
            return min((self._due(r) - s.now for r in restless), default=None)

    def truth(self, id: str) -> Truth:  # noqa: A002
        """Return an instance's true state, regardless of the provider's reports. Advances time first.

        Raises NotFound.
        """
        truths = self.truths()
        if id not in truths:
            raise NotFound(f"{self._platform} never had an instance {id!r}")
        return truths[id]

    def truths(self) -> dict[str, Truth]:
        """Return the true state of every instance that ever existed."""
        with self._session() as s:
            held = processes.held(set(s.state.records))
            found: dict[str, Truth] = {}
            for record in s.state.records.values():
                named = list(self._named(record))
                pids = [p.pid for p in processes.of(record.id, named)] if named or record.id in held else []
                found[record.id] = Truth(
                    id=record.id,
                    state=record.state,
                    meter=meter.computes(self.profile, record),
                    cost_usd=meter.cost(self.profile, s.config.settings, record, s.now),
                    usd_per_hour=record.usd_per_hour,
                    processes=tuple(pids),
                )
            return found

    def inject(self, id: str, fault: Fault) -> None:  # noqa: A002
        """Add a fault to an existing instance."""
        if fault.call is not None:
            raise BadRequest(f"{fault.kind} is a call fault; configure it with Faults")
        with self._session() as s:
            record = self._known(s, id)
            s.state.records[id] = meter.turn(self.profile, s.config.settings, s.engine.given(record, fault), s.now)

    def preempt(self, id: str) -> None:  # noqa: A002
        """Interrupt an instance now. Raises Conflict unless it is interruptible and running."""
        with self._session() as s:
            record = self._known(s, id)
            if not record.interruptible or record.state != _S.RUNNING:
                raise Conflict(f"instance {id} is {record.state} and can't be preempted")
            s.state.records[id] = s.engine.preempt(record, s.now)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Apply this cloud's `submit` faults to the body, in which a backend submits a job without calling the cloud.

        Raises Unreachable before or after the body, or BadReply after it. The lock is not held while the body runs.
        """
        with self._session() as s:
            kinds = self._strikes(s, "submit")
        if "lost_request" in kinds:
            raise Unreachable("rehearsal: no reply to submit; the request or the reply was lost")
        yield
        if "lost_reply" in kinds:
            raise Unreachable("rehearsal: no reply to submit; the request or the reply was lost")
        if "bad_reply" in kinds:
            raise BadReply("rehearsal: the reply to submit had an unexpected shape")

    # ---------------------------------------------------------------------------------------------------- internal

    @property
    def _takes_end_date(self) -> bool:
        """Return whether the platform accepts an end date, even if the platform then ignores it."""
        return self.profile.unattended is not None and self.profile.unattended.end_date != "none"

    @property
    def _platform(self) -> str:
        return f"rehearsal/{self.profile.id}"

    def _call(self, verb: Call, act: Callable[[Session], T]) -> Answer[T]:
        try:
            with self._session() as s:
                kinds = self._strikes(s, verb)
                if 0 < s.config.settings.calls_per_minute < s.state.in_minute:
                    with nothing_sent():
                        raise RateLimited(
                            f"{self._platform} accepts no more calls this minute", after_s=60 - s.now % 60
                        )
                if "lost_request" in kinds:
                    return Unknown(f"rehearsal: no reply to {verb}; the request or the reply was lost")
                if "no_capacity" in kinds:
                    raise NoCapacity(f"{self._platform} currently has no machine of that kind")
                value = act(s)
        except (Unreachable, BadReply) as silence:
            return Unknown(f"{silence.message}. {manual_text(silence.next_steps)}".strip())
        except OSError as trouble:
            return Unknown(f"the rehearsal cloud in {self.root} can't be used: {trouble}")
        if self.supervise and any(self._restless(record) for record in self.store.state().records.values()):
            processes.wake_supervisor(self.root)
        if "lost_reply" in kinds:
            return Unknown(f"rehearsal: no reply to {verb}; the request or the reply was lost")
        if "bad_reply" in kinds:
            return Unknown(f"rehearsal: the reply to {verb} had an unexpected shape")
        if "false_refusal" in kinds:
            raise BadRequest(f"{self._platform} refused {verb}")
        return Known(value)

    @contextmanager
    def _session(self, *, counts: bool = True) -> Iterator[Session]:
        """Lock the cloud, advance time, yield the state, and then commit the changes and carry out their side effects.

        The state is also committed after a refused call, because the call was counted and time has advanced.
        """
        with self.store.lock():
            state, config = self.store.state(), self.store.config() or Config(profile=self.profile)
            state.now = max(state.now, self.clock.now())
            s = Session(state, config, state.now)
            if counts:
                self._tick(s)
            try:
                yield s
            finally:
                if counts:
                    self.store.save(state)
                    self._tick(s, hold=False)

    def _strikes(self, s: Session, verb: Call) -> set[str]:
        nth = s.state.calls.get(verb, 0) + 1
        s.state.calls[verb] = nth
        minute = int(s.now // 60)
        s.state.minute, s.state.in_minute = minute, 1 + (s.state.in_minute if s.state.minute == minute else 0)
        faults = s.config.faults.on_call(verb, nth)
        s.stale_s = max((f.seconds for f in faults if f.kind == "stale"), default=0.0)
        return {f.kind for f in faults}

    def _refuse(self, s: Session, resources: Resources, price: float) -> None:
        if resources.interruptible and not self.profile.spot.offered:
            raise NotSupported(
                f"{self._platform} does not offer interruptible instances",
                "Request an instance that is not interruptible.",
            )
        limit = resources.max_price_usd_per_hour
        if limit is not None and price > limit:
            raise NoCapacity(
                f"{self._platform} has no offer at {usd_per_hour(limit)} or less; its price is {usd_per_hour(price)}"
            )
        if sum(r.state != _S.GONE for r in s.state.records.values()) >= s.config.settings.capacity:
            raise NoCapacity(f"{self._platform} has rented out all {s.config.settings.capacity} machines")

    def _tick(self, s: Session, *, hold: bool = True) -> None:
        """Complete pending effects, then apply due transitions. Each transition is committed before its effects are
        carried out.
        """
        for id, before in list(s.state.records.items()):  # noqa: A001
            record = self._carry_out(before)
            record = s.engine.advance(record, s.now)
            record = self._observe(s, record)
            if record.pending:
                s.state.records[id] = record
                self.store.save(s.state)
                record = self._carry_out(record)
            if record != before:
                s.state.records[id] = record
                self.store.save(s.state)
        if hold:
            # Kill processes that were started while the machine shut down, because a machine that is off runs no
            # processes.
            off = {r.id for r in s.state.records.values() if r.state in _OFF}
            for id in processes.held(off):  # noqa: A001
                processes.kill(id)
        disk.sweep(self.root)

    def _observe(self, s: Session, record: Record) -> Record:
        """Update the record from the machine's files: the step that was reached, whether the jobs ended, and whether
        the disk is full.
        """
        if record.state != _S.RUNNING or record.pending:
            return record
        if s.config.settings.keeps_end_dates and record.ends_at is not None and s.now >= record.ends_at:
            return s.engine.stop(record.but(ends_at=None), s.now, by_itself=True)
        folder, shared = self._run_root(record), self._shares_run_root(record)
        if any(f.step is not None for f in record.faults):
            # A volume may contain runs of other instances, so only runs of this instance's processes count.
            pids = {p.pid for p in processes.of(record.id)} if shared else None
            record = s.engine.strike(record, s.now, runs.step(folder, pids))
        lost_at_end = self.profile.kind == "serverless" or any(
            tier.survives.job_end is not True for tier in self.profile.storage
        )
        if record.state == _S.RUNNING and lost_at_end and not shared:
            ended = runs.all_ended(folder)
            if ended != record.job_ended:
                record = s.engine.job_end(record, s.now) if ended else record.but(job_ended=False)
        limit = record.fault("full_disk")
        if record.state == _S.RUNNING and limit is not None:
            files = self._disk(record)
            full = files.used() > limit.size
            if full or record.disk_full:
                processes.limit_files(record.id, full=full)
                files.allow_runs(not full)
            record = record.but(disk_full=full, why="the disk is full" if full else "running")
        return record

    def _carry_out(self, record: Record) -> Record:
        """Carry out pending effects in order. An effect may be carried out again after a crash."""
        files = self._disk(record)
        for effect in record.pending:
            match effect.split(":"):
                case ["on"]:
                    files.power_on()
                case ["signal"]:
                    processes.terminate(processes.of(record.id, self._named(record)))
                case ["kill"]:
                    processes.kill(record.id, self._named(record))
                case ["off"]:
                    files.power_off()
                case ["wipe", event]:
                    files.wipe(event)  # type: ignore[arg-type]
                case ["erase"]:
                    files.erase()
        return record.but(pending=())

    @staticmethod
    def _restless(record: Record) -> bool:
        return record.due is not None or bool(record.pending) or record.state == _S.RUNNING

    @staticmethod
    def _due(record: Record) -> float:
        """Return the time of the next known change to an instance; 0 if effects are pending or a fault is waiting for a
        training step.
        """
        if record.pending or any(fault.step is not None for fault in record.faults):
            return 0.0
        return math.inf if record.due is None else record.due

    def _disk(self, record: Record) -> Disk:
        return Disk(self.root, self.profile, record.id, self._tiers(record))

    def _tiers(self, record: Record) -> tuple[Tier, ...]:
        return disk.mounted(self.profile, durable=record.durable, sometimes=record.sometimes)

    def _run_root(self, record: Record) -> Path:
        files = self._disk(record)
        return files.fs / files.run_root.lstrip("/")

    def _shares_run_root(self, record: Record) -> bool:
        path = disk.run_root(self.profile)
        inside = [t for t in self._tiers(record) if path == t.path or path.startswith(t.path.rstrip("/") + "/")]
        return bool(inside) and disk.shared(inside[-1])

    def _named(self, record: Record) -> Iterator[tuple[int, str, str]]:
        """Return the processes named in the run folders; none if the folders are on a volume, because the processes may
        belong to another instance.
        """
        return iter(()) if self._shares_run_root(record) else runs.processes(self._run_root(record))

    def _known(self, s: Session, id: str) -> Record:  # noqa: A002
        record = s.state.records.get(id)
        if record is None or record.state == _S.GONE:
            raise NotFound(f"{self._platform} has no instance {id!r}", "List the instances to find its id.")
        return record

    def _unseen(self, s: Session, record: Record) -> bool:
        return s.now < record.created_at + s.stale_s

    def _lags(self, s: Session, record: Record) -> bool:
        return record.state == _S.GONE and not record.vanished and s.now < record.since + s.stale_s

    def _listed(self, s: Session, token: str | None = None) -> Iterator[Instance]:
        for record in s.state.records.values():
            if (
                token not in {None, record.token}
                or self._unseen(s, record)
                or (record.state == _S.GONE and not self._lags(s, record))
            ):
                continue
            yield self._view(s, record)

    def _view(self, s: Session, record: Record) -> Instance:
        """Return the instance that the provider reports for a record."""
        if self._lags(s, record):
            record = record.but(state=_S.TERMINATING, why="terminate was requested")
        files = self._disk(record)
        shifted = (str(self.clock.file.absolute()),) if isinstance(self.clock, ShiftedClock) else ()
        place = Place(
            platform=self._platform,
            instance_id=record.id,
            root=str(files.fs),
            mounts=files.mounts,
            run_root=files.run_root,
            env={MARKER: record.id},
            self_stop_command=(
                sys.executable,
                "-P",  # it is started in the job's folder, whose modules must not replace gpuwarden's
                "-m",
                "gpuwarden.rehearsal.self_stop",
                str(self.root),
                record.id,
                *shifted,
            ),
        )
        settings = s.config.settings
        residue = meter.leaves_residue(self.profile, record)
        return Instance(
            id=record.id,
            token=record.token,
            state=record.state,
            place=place if record.state == _S.RUNNING else None,
            meter=meter.computes(self.profile, record),
            price_usd_per_hour=record.usd_per_hour,
            # This is the rate per hour of simulated time, as on the bill, so that a second poll can detect that a
            # stopped machine is billed.
            stopped_usd_per_hour=record.residue_usd_per_hour * settings.time_scale if residue else 0.0,
            cost_usd=meter.cost(self.profile, settings, record, s.now),
            created_at=record.created_at,
            running_since=record.since if record.state == _S.RUNNING else None,
            why=record.why,
        )
