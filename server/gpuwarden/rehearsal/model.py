"""The persistent state of a rehearsal cloud: its settings, its faults, and one record per instance.

Times are seconds since the epoch on the cloud's clock. Prices are simulated US dollars.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpuwarden.core.models import Frozen, InstanceState, digest
from gpuwarden.core.profile import Event

MARKER = "GPUWARDEN_REHEARSAL_INSTANCE"

#: Simulated prices per GPU-hour, for this cloud only; real prices come from the providers.
CATALOG: dict[str, float] = {"RTX 3090": 0.25, "RTX 4090": 0.45, "A100": 1.60, "H100": 2.80, "H200": 3.60}


class Settings(Frozen):
    """Settings for the parts of a simulated platform's behavior that its profile does not define.

    Durations are in seconds on the cloud's clock. `time_scale` applies only to billing: each second on the clock is
    billed as that many seconds. It does not shorten boots, grace periods and resumes, so that processes have enough
    time. `sometimes` decides whether storage that the profile marks as `sometimes` is present. Calls beyond
    `calls_per_minute` in a minute on the clock are refused; 0 means no limit. If `keeps_end_dates` is true, an
    instance is stopped at the end date in its order; some real platforms accept an end date but ignore it. `settle_s`
    is the minimum time between two polls that count as a confirmation.
    """

    boot_s: float = Field(default=1.0, ge=0)
    stop_s: float = Field(default=0.5, ge=0)
    resume_s: float = Field(default=2.0, ge=0)
    time_scale: float = Field(default=1.0, gt=0)
    sometimes: bool = True
    catalog: dict[str, float] = Field(default_factory=lambda: dict(CATALOG))
    default_usd_per_hour: float = Field(default=1.0, ge=0)
    interruptible_factor: float = Field(default=0.5, gt=0, le=1)
    residue_usd_per_hour: float = Field(default=0.02, ge=0)
    capacity: int = Field(default=64, ge=0)
    settle_s: float = Field(default=0.5, ge=0)
    keeps_end_dates: bool = False
    host_life_s: float = Field(default=3600.0, gt=0)
    calls_per_minute: int = Field(default=0, ge=0)


Call = Literal["quote", "create", "find", "get", "list", "start", "stop", "terminate", "submit", "self_stop"]
CallFault = Literal["lost_request", "lost_reply", "bad_reply", "stale", "no_capacity", "false_refusal"]
InstanceFault = Literal[
    "slow_boot", "failed_boot", "preempt", "vanish", "full_disk", "bills_when_stopped", "comes_back"
]
CALL_FAULTS = frozenset({"lost_request", "lost_reply", "bad_reply", "stale", "no_capacity", "false_refusal"})


class Fault(Frozen):
    """One simulated fault.

    A call fault affects the `at`-th call (from 1) of the verb `call`, and the `count - 1` calls after it. An instance
    fault affects the `at`-th instance created, and the `count - 1` instances after it. If `probability` is set, the
    affected calls or instances are instead drawn independently from the seed.

    - `lost_request`: the call has no effect and no response. `lost_reply`: the call takes effect, but no response
      is sent. `bad_reply`: it takes effect, but the response has an unexpected shape. `no_capacity`: it has no effect
      and is refused. `false_refusal`: it takes effect, but is refused.
    - `stale`: for `seconds`, a new instance is not listed yet, and an instance that is gone is listed as terminating.
    - `slow_boot`: the boot takes `seconds` longer. `failed_boot`: the instance never runs, and it is billed until it is
      terminated.
    - `preempt`, `vanish`: the instance is preempted or vanishes when a run reaches `step`, or `seconds` after the
      instance began to run.
    - `full_disk`: writes fail once the instance's files exceed `size` bytes.
    - `bills_when_stopped`: the instance is reported as stopped, but compute is still billed.
    - `comes_back`: the instance is terminated and gone, but runs again after `seconds`.
    """

    kind: CallFault | InstanceFault
    call: Call | None = None
    at: int = Field(default=1, ge=1)
    count: int = Field(default=1, ge=1)
    probability: float | None = Field(default=None, ge=0, le=1)
    step: int | None = Field(default=None, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    size: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _call_or_instance(self) -> Fault:
        if (self.kind in CALL_FAULTS) != (self.call is not None):
            raise ValueError(f"{self.kind} {'needs a call' if self.kind in CALL_FAULTS else 'must not have a call'}")
        if self.kind == "stale" and self.call not in {"find", "get", "list"}:
            raise ValueError("only the calls find, get and list can be stale")
        return self

    def strikes(self, seed: int, position: int, nth: int) -> bool:
        """Return whether this fault, the `position`-th in its list, affects the `nth` call or instance."""
        if self.probability is None:
            return self.at <= nth < self.at + self.count
        draw = int(digest([seed, position, nth])[7:21], 16) / 16**14
        return draw < self.probability


class Faults(Frozen):
    """All of a cloud's faults. The same seed and the same calls produce the same faults."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def on_call(self, call: Call, nth: int) -> list[Fault]:
        """Return the faults that affect the `nth` call of a verb."""
        return [f for i, f in enumerate(self.faults) if f.call == call and f.strikes(self.seed, i, nth)]

    def on_instance(self, nth: int) -> tuple[Fault, ...]:
        """Return the faults that apply to the `nth` instance."""
        return tuple(f for i, f in enumerate(self.faults) if f.call is None and f.strikes(self.seed, i, nth))


class Record(Frozen):
    """One instance. Every change creates a new record. `pending` lists the side effects that may not have been carried
    out yet.
    """

    id: str
    token: str
    number: int
    created_at: float
    interruptible: bool
    durable: bool
    sometimes: bool
    usd_per_hour: float
    residue_usd_per_hour: float
    state: InstanceState = InstanceState.BOOTING
    since: float
    due: float | None = None
    cause: Event | None = None
    why: str = ""
    faults: tuple[Fault, ...] = ()
    pending: tuple[str, ...] = ()
    compute_since: float | None = None
    compute_s: float = 0.0
    residue_since: float | None = None
    residue_s: float = 0.0
    vanished: bool = False
    disk_full: bool = False
    job_ended: bool = False
    ends_at: float | None = None
    by_itself: bool = False

    def but(self, **changes: Any) -> Record:
        """Return a copy with some fields changed."""
        return self.model_copy(update=changes)

    def fault(self, kind: InstanceFault) -> Fault | None:
        """Return the first fault of a kind that has not occurred yet."""
        return next((f for f in self.faults if f.kind == kind), None)

    def without(self, fault: Fault) -> tuple[Fault, ...]:
        """Return the faults that remain after `fault` has occurred."""
        left = list(self.faults)
        left.remove(fault)
        return tuple(left)


class State(BaseModel):
    """All mutable state. It is stored in one file, so that one rename commits a change."""

    model_config = ConfigDict(extra="forbid")

    nonce: str
    now: float = 0.0
    calls: dict[str, int] = Field(default_factory=dict)
    minute: int = 0
    in_minute: int = 0
    """The number of calls so far in `minute`, which counts minutes on the cloud's clock."""
    records: dict[str, Record] = Field(default_factory=dict)


class Truth(Frozen):
    """An instance's true state, for tests that compare it with a caller's view."""

    id: str
    state: InstanceState
    meter: bool
    cost_usd: float
    usd_per_hour: float
    processes: tuple[int, ...] = ()
