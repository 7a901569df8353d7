"""A platform's facts as data: the front matter of `profiles/<id>.md`.

Every block of volatile facts has `verified` (year-month) and `source`. An unknown value is written
`{unknown: how to find out}`, which the code reads as `UnknownFact`; it is never replaced by a default.
"""

from __future__ import annotations

import posixpath
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from pydantic import Field, field_validator, model_validator

from gpuwarden.core.models import Frozen, SelfStop, Verb

V = TypeVar("V")


class UnknownFact(Frozen):
    """A fact that has not been established; `unknown` describes how to establish it."""

    unknown: str = Field(min_length=8)


Fact: TypeAlias = V | UnknownFact

Month = Annotated[str, Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
Source = Annotated[str, Field(min_length=8)]
Event = Literal["stop", "terminate", "preemption", "job_end"]
Present = Literal["always", "on_request", "sometimes"]
VOLATILE: Final = ("/dev", "/run", "/var/run", "/var/lock", "/proc", "/sys")
"""In-memory mounts on every Linux machine. Profiles do not list them, and stopping the machine empties them."""


class Sourced(Frozen):
    """A block of facts with its provenance."""

    verified: Month
    source: Source


class Survival(Frozen):
    """The events that files on a tier survive. Each event has an explicit value or is `unknown`.

    `stop` and `terminate` are gpuwarden's two verbs, `preemption` means that the platform reclaims the machine, and
    `job_end` means that the process ends.
    """

    stop: Fact[bool]
    terminate: Fact[bool]
    preemption: Fact[bool]
    job_end: Fact[bool]


class Tier(Sourced):
    """One kind of storage: its mount and the events that its files survive.

    `present` states whether every machine has the tier: `on_request` tiers count only for jobs with `durable_storage`,
    and `sometimes` tiers count only after they were observed. An `on_request` tier may have the path of an `always`
    tier, which it then replaces for jobs with `durable_storage`.
    """

    tier: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    path: str = Field(pattern=r"^/")
    survives: Survival
    present: Present = "always"
    bills_when_stopped: Fact[bool]
    bills_when_terminated: Fact[bool]
    note: str = ""

    @field_validator("path")
    @classmethod
    def _normal(cls, path: str) -> str:
        if path != posixpath.normpath(path) or path.startswith("//"):
            raise ValueError(f"{path!r} is not a normalized path: write {posixpath.normpath(path)!r}")
        return path

    def in_memory(self, path: str) -> Tier:
        """Return the tier of an in-memory mount on a machine with this disk; its files survive the end of a job, but no
        other event.
        """
        lost = {"stop": False, "terminate": False, "preemption": False}
        survives = self.survives.model_copy(update=lost)
        return self.model_copy(update={"tier": "memory", "path": path, "survives": survives})


class Meter(Sourced):
    """When the platform bills. `stops_on` lists the verbs after which compute is not billed.

    `residue` lists the verbs after which a resource that every machine has (a disk, an address) is or may be billed;
    `Profile.residue` adds the resources that the job requested. `counts` is the resource that a job consumes: money or,
    on an engine without prices, a quota of machine time (`walltime`) or the user's share (`fair_share`).
    """

    metered: bool
    counts: Literal["money", "walltime", "fair_share"] = "money"
    stops_on: tuple[Verb, ...] = ()
    residue: tuple[Verb, ...] = ()
    granularity_s: Fact[int] = 1
    note: str = ""


class Verbs(Sourced):
    """The two verbs, stop and terminate: the platform's name for each, or None if it has no such verb."""

    stop: str | None = None
    terminate: str | None = None
    terminate_needs_stop: bool = False
    reversible: tuple[Verb, ...] = ()
    note: str = ""


class Spot(Sourced):
    """Interruptions: whether interruptible machines are offered, the signal that the process gets, and the machine's
    state afterward.
    """

    offered: bool
    signal: Fact[Literal["SIGTERM", "none"]] = "none"
    grace_s: Fact[float] = 0.0
    then: Fact[Literal["stopped", "terminated"]] = "terminated"
    auto_resume: Fact[bool] = False
    note: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Spot:
        missing = {"signal", "grace_s", "then", "auto_resume"} - self.model_fields_set
        if self.offered and missing:
            raise ValueError(f"spot.offered is true, so {', '.join(sorted(missing))} must be given or marked unknown")
        return self


class Limits(Sourced):
    """The platform's own limits."""

    boot_timeout_s: int = Field(gt=0)
    default_timeout_s: int | None = None
    settle_s: float = Field(default=10.0, ge=0)
    note: str = ""


class Unattended(Sourced):
    """How a machine can end without gpuwarden: it stops itself, or the platform ends it on a given date.

    `self_stop` is whether a command on the machine, or a key limited to this machine, can stop it. `by` is this
    command or request; `{instance}` in its URL stands for the machine's id. `end_date` is the platform's action on the
    given date, as observed by a source. If it is `unreliable`, gpuwarden does not rely on it for any guarantee.
    """

    self_stop: Fact[bool]
    by: SelfStop | None = None
    end_date: Fact[Literal["stop", "terminate", "none", "unreliable"]]
    note: str = ""

    @model_validator(mode="after")
    def _possible(self) -> Unattended:
        if (self.self_stop is True) != (self.by is not None):
            raise ValueError("unattended.by is required if self_stop is true, and not allowed otherwise")
        if self.by is not None and bool(self.by.command) == bool(self.by.url and self.by.key and self.by.method):
            raise ValueError("unattended.by must be either a command, or a request with method, url and key")
        return self


class DangerClock(Sourced):
    """An action that the platform takes automatically after some time, and that may cause data loss or costs.

    `after` is text for readers. If it is a duration, `after_s` is its length in seconds, counted from the event
    `counts_from`: the machine's creation or its last stop. If the action is taken when the account's balance is used
    up, its date is computed from hourly spending. `without_timeout` deadlines apply only to jobs without a timeout.
    """

    trigger: str
    after: Fact[str]
    after_s: Fact[Annotated[int, Field(gt=0)]] | None = None
    counts_from: Literal["created", "stopped", "balance"] | None = None
    without_timeout: bool = False
    effect: str

    @model_validator(mode="after")
    def _counted(self) -> DangerClock:
        if self.counts_from != "balance" and (self.after_s is None) != (self.counts_from is None):
            raise ValueError("after_s and counts_from must be given together: a duration needs a starting point")
        return self

    def fires_at(self, created_at: float | None, stopped_at: float | None) -> float | None:
        """Return the time of the action, in seconds since the epoch; None if it does not apply or is unknown."""
        began = {"created": created_at, "stopped": stopped_at}.get(self.counts_from or "")
        return began + self.after_s if isinstance(self.after_s, int) and began is not None else None


class Target(Frozen):
    """The part of a platform's name after the slash, such as the alias in `ssh/ALIAS`.

    `word` is its placeholder in listings, `hint` describes where to find a name, `here` is the name for this machine.
    """

    word: str = Field(pattern=r"^[A-Z]{2,16}$")
    hint: str = Field(min_length=8)
    here: str = ""


class Profile(Frozen):
    """One platform. Code reads only this data; the prose in the file is for human readers."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    kind: Literal["owned", "rented", "serverless", "engine"]
    backend: str
    provider: str | None = None
    user: str | None = None
    target: Target | None = None
    run_root: str = Field(pattern=r"^(/|~)")
    runner: bool = True
    """Whether gpuwarden's runner starts the jobs, so that it can report, seal and upload."""
    storage: tuple[Tier, ...] = Field(min_length=1)
    meter: Meter
    verbs: Verbs
    spot: Spot
    limits: Limits
    unattended: Unattended | None = None
    danger_clocks: tuple[DangerClock, ...] = ()
    conveniences: tuple[str, ...] = ()

    @field_validator("storage")
    @classmethod
    def _distinct(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if len({t.tier for t in tiers}) != len(tiers):
            raise ValueError("two tiers have the same name")
        by_path: dict[str, list[Present]] = {}
        for tier in tiers:
            by_path.setdefault(tier.path, []).append(tier.present)
        for path, present in by_path.items():
            if len(present) > 1 and sorted(present) != ["always", "on_request"]:
                raise ValueError(f"two tiers have the path {path}; only an on_request tier may replace an always tier")
        return tiers

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for verb in (*self.meter.stops_on, *self.meter.residue, *self.verbs.reversible):
            if getattr(self.verbs, verb) is None:
                raise ValueError(f"meter or verbs.reversible names {verb}, which the platform does not have")
        if self.unattended is not None and self.unattended.self_stop is True and self.verbs.stop is None:
            raise ValueError("unattended.self_stop is true, but the platform has no stop verb")
        if self.meter.metered and not self.meter.stops_on:
            raise ValueError("meter.stops_on is empty, but a metered platform needs a verb that ends billing")
        if self.kind != "engine" and self.meter.metered != (self.kind != "owned"):
            raise ValueError(f"meter.metered is {self.meter.metered}, which does not match the kind {self.kind}")
        if self.run_root.startswith("/") and self.tier_of(self.run_root) is None:
            raise ValueError(f"run_root {self.run_root} is not on a storage tier that is always present")
        for verb in ("stop", "terminate"):
            if getattr(self.verbs, verb) and verb not in self.meter.residue and self.residue(verb):
                raise ValueError(f"a tier is billed after {verb}, so meter.residue must contain {verb}")
        return self

    @property
    def listed(self) -> str:
        """Return the platform's name in a listing, with the placeholder of its target."""
        return self.id if self.target is None else f"{self.id}/{self.target.word}"

    @property
    def by_hand(self) -> bool:
        """Return true if the user has to rent and release this platform's machines, because gpuwarden can't."""
        return self.meter.metered and self.provider is None

    def tier_of(self, path: str, *, requested: bool = False) -> Tier | None:
        """Return the tier that contains an absolute path, or None if that is uncertain.

        The longest mount that contains the path determines the tier. If that mount may be absent, the result is None,
        since the file may be on either disk. `requested` is whether the job requested durable storage. Paths that are
        in memory on every machine are on a disk only if the profile has a tier there.
        """
        if not path.startswith("/") or ".." in path.split("/"):
            return None
        plain = posixpath.normpath("/" + path.lstrip("/"))
        mounts = [t.path for t in self.storage if _inside(plain, t.path)]
        longest = max(mounts, key=len, default="")
        tier = next((t for t in self.tiers(requested=requested) if t.path == longest), None)
        volatile = next((mount for mount in VOLATILE if _inside(plain, mount)), "")
        return tier.in_memory(volatile) if tier is not None and len(volatile) > len(longest) else tier

    def place_of(self, output: str) -> str:
        """Return the absolute path of a declared output. A home folder (`~`) counts as part of the disk mounted at the
        root.
        """
        path = output if output.startswith("/") else f"{self.run_root}/{output}"
        return "/" + path.removeprefix("~").lstrip("/")

    def tiers(self, *, requested: bool = False) -> tuple[Tier, ...]:
        """Return a job's tiers, one for each path. `requested` is whether the job requested durable storage."""
        there = [t for t in self.storage if self.has(t, requested=requested)]
        # if two tiers have the same path, the `on_request` tier is kept
        there.sort(key=lambda t: t.present == "on_request")
        return tuple({t.path: t for t in there}.values())

    @staticmethod
    def has(tier: Tier, *, requested: bool) -> bool:
        """Return whether a job has the tier. `requested` is whether it requested durable storage."""
        return tier.present == "always" or (tier.present == "on_request" and requested)

    def survives(self, path: str, event: Event, *, requested: bool = False) -> bool:
        """Return whether a file at `path` survives `event`; False for unknown tiers and unknown facts."""
        tier = self.tier_of(path, requested=requested)
        return tier is not None and getattr(tier.survives, event) is True

    def residue(self, verb: Verb, *, requested: bool = False) -> tuple[str, ...]:
        """Return the names of storage that is or may be billed after `verb`. Storage whose billing is unknown is
        included.
        """
        field = "bills_when_stopped" if verb == "stop" else "bills_when_terminated"
        tiers = (t for t in self.tiers(requested=requested) if getattr(t, field) is not False)
        return tuple(f"{t.tier} ({t.path})" for t in tiers) or ("a disk or an address",) * (verb in self.meter.residue)


def _inside(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount.rstrip("/") + "/")
