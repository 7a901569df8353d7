"""What a platform is like, as data: the front matter of `profiles/<id>.md`.

Every block of volatile facts carries `verified` (year-month) and `source`. A value nobody knows is written
`{unknown: how to find out}`, which the code reads as `Unfound`; no default stands in for it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import Field, field_validator, model_validator

from gpuwarden.core.models import Frozen, Verb

V = TypeVar("V")


class Unfound(Frozen):
    """A fact that nobody has established; `unknown` says how to find out."""

    unknown: str = Field(min_length=8)


Fact: TypeAlias = V | Unfound

Month = Annotated[str, Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
Source = Annotated[str, Field(min_length=8)]
Event = Literal["stop", "terminate", "preemption", "job_end"]
Present = Literal["always", "on_request", "sometimes"]


class Sourced(Frozen):
    """A block of facts with its provenance."""

    verified: Month
    source: Source


class Survival(Frozen):
    """Whether files on a tier outlive an event."""

    stop: Fact[bool]
    terminate: Fact[bool]
    preemption: Fact[bool] = True
    job_end: Fact[bool] = True


class Tier(Sourced):
    """One kind of storage: where it is mounted and what it outlives.

    `present` says whether it is there without being asked for: `on_request` tiers count only for jobs with
    `durable_storage`, `sometimes` ones never count until they were seen.
    """

    tier: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    path: str = Field(pattern=r"^/")
    survives: Survival
    present: Present = "always"
    bills_when_stopped: Fact[bool] = False
    note: str = ""


class Meter(Sourced):
    """When money runs. `stops_on` lists the verbs after which compute bills nothing.

    `residue` are the verbs after which something else (a disk, an address) still bills.
    """

    metered: bool
    stops_on: tuple[Verb, ...] = ()
    residue: tuple[Verb, ...] = ()
    granularity_s: Fact[int] = 1
    note: str = ""


class Verbs(Sourced):
    """Which of our two verbs the platform has, and what it calls them."""

    stop: str | None = None
    terminate: str | None = None
    terminate_needs_stop: bool = False
    reversible: tuple[Verb, ...] = ()
    note: str = ""


class Spot(Sourced):
    """Interruptions: whether they are sold, what the process sees, and what happens next."""

    offered: bool
    signal: Fact[Literal["SIGTERM", "none"]] = "none"
    grace_s: Fact[float] = 0.0
    then: Fact[Literal["stopped", "terminated"]] = "terminated"
    auto_resume: Fact[bool] = False
    note: str = ""


class Limits(Sourced):
    """What the platform limits by itself."""

    boot_timeout_s: int = Field(gt=0)
    default_timeout_s: int | None = None
    settle_s: float = Field(default=10.0, ge=0)
    note: str = ""


class DangerClock(Sourced):
    """Something that the platform does by itself after a while, and that costs data or money."""

    trigger: str
    after: Fact[str]
    effect: str


class Profile(Frozen):
    """One platform. The prose of the file is for readers; code reads only this."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    kind: Literal["owned", "rented", "serverless", "engine"]
    backend: str
    provider: str | None = None
    user: str | None = None
    run_root: str = Field(pattern=r"^(/|~)")
    storage: tuple[Tier, ...] = Field(min_length=1)
    meter: Meter
    verbs: Verbs
    spot: Spot
    limits: Limits
    danger_clocks: tuple[DangerClock, ...] = ()
    conveniences: tuple[str, ...] = ()

    @field_validator("storage")
    @classmethod
    def _distinct(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if len({t.tier for t in tiers}) != len(tiers):
            raise ValueError("two tiers have the same name")
        return tiers

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for verb in self.meter.stops_on:
            if getattr(self.verbs, verb) is None:
                raise ValueError(f"meter.stops_on names {verb}, which verbs says the platform does not have")
        if self.meter.metered and not self.meter.stops_on:
            raise ValueError("a metered platform needs a verb that stops the meter")
        if self.run_root.startswith("/") and self.tier_of(self.run_root) is None:
            raise ValueError(f"run_root {self.run_root} lies on none of the storage tiers")
        return self

    def tier_of(self, path: str) -> Tier | None:
        """The tier that holds an absolute path: the longest mount that contains it."""
        inside = [t for t in self.storage if path == t.path or path.startswith(t.path.rstrip("/") + "/")]
        return max(inside, key=lambda t: len(t.path), default=None)

    def survives(self, path: str, event: Event, *, requested: bool = False) -> bool:
        """Whether a file at `path` outlives `event`. Unknown tiers and unknown facts do not."""
        tier = self.tier_of(path)
        if tier is None or not self.has(tier, requested=requested):
            return False
        return getattr(tier.survives, event) is True

    @staticmethod
    def has(tier: Tier, *, requested: bool) -> bool:
        """Whether a tier is there for a job that did or did not ask for durable storage."""
        return tier.present == "always" or (tier.present == "on_request" and requested)
