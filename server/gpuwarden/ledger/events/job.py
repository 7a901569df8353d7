"""Events of jobs and of the receipts that they are launched with."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from gpuwarden.core.fan_out import FanOutPlan
from gpuwarden.core.models import Choice, Handle, InputFile, JobSpec, Level, Place, Verdict
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job
from gpuwarden.ledger.events.base import Body


class ReceiptIssued(Body):
    """The submit gate let a spec pass. `job` is set where the price of a rented machine is asked about.

    `cells` counts the runs of a fan-out on at most so many `machines`; `fan_out` is the one whose limits would change.
    `choices` are the platforms of a job that may run on several, in order; price and cost are then the highest of them.
    `parts` are the digests of the policy, the profile and a fetched script. `storage` names what bills on after the
    machine's end, at `storage_usd_per_hour`, None where that is unknown. `spec` or `plan` is what a launch by the
    receipt alone runs, and `script_file` the file below the working directory that its script came from.
    """

    event: Literal["receipt.issued"] = "receipt.issued"
    spec_digest: str
    facts_digest: str
    price: float | None = None
    expires_at: float
    worst_cost: float | None = None
    name: str = ""
    platform: str = ""
    timeout_s: int | None = None
    ask: str = ""
    hub: dict[str, Any] = Field(default_factory=dict)
    parts: dict[str, str] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict)
    artifact_store: str = Field(default="", validation_alias=AliasChoices("artifact_store", "keep"))
    storage: tuple[str, ...] = ()
    storage_usd_per_hour: float | None = None
    job: str | None = None
    cells: int = 0
    machines: int = 1
    fan_out: str = ""
    choices: tuple[Choice, ...] = ()
    spec: JobSpec | None = None
    plan: FanOutPlan | None = Field(default=None, validation_alias=AliasChoices("plan", "roster"))
    script_file: str = ""


class JobAccepted(Body):
    """A job was accepted against a receipt. `price` is USD an hour when it was checked, `worst_cost` USD.

    Of a job with several `choices` the spec and the price are those of the first one.

    `script_digest` is empty for a job without a script, None where an older ledger did not record it.
    """

    event: Literal["job.accepted"] = "job.accepted"
    MOVES_TO: ClassVar = Job.ACCEPTED
    spec: JobSpec
    spec_digest: str = ""
    facts_digest: str = ""
    worst_cost: float | None = None
    price: float | None = None
    receipt: str = ""
    script_digest: str | None = None
    inputs: tuple[InputFile, ...] = ()
    choices: tuple[Choice, ...] = ()


class JobRefused(Body):
    """The submit gate refused a spec. Only its digest is kept, since it may contain a secret."""

    event: Literal["job.refused"] = "job.refused"
    MOVES_TO: ClassVar = Job.REFUSED
    name: str = ""
    platform: str = ""
    spec_digest: str = ""
    rules: tuple[str, ...] = ()


class JobProvisioning(Body):
    """A machine will be rented for a job."""

    event: Literal["job.provisioning"] = "job.provisioning"
    MOVES_TO: ClassVar = Job.PROVISIONING
    lease: str
    generation: int = 0


class JobMovedOn(Body):
    """A platform had no capacity for certain, so the job goes on with the next of its choices.

    `choice` is its place in the list, from 0, `lease` and `generation` those of the request that was given up.
    """

    event: Literal["job.moved_on"] = "job.moved_on"
    choice: int
    platform: str
    gpu: str | None = None
    lease: str
    generation: int


class JobSubmitting(Body):
    """A machine is ready, and an attempt will be launched there. `timeout_s` is its own where the job was paused.

    `array` is the token of the array that it is launched with, empty for a job that is launched by itself.
    """

    event: Literal["job.submitting"] = "job.submitting"
    MOVES_TO: ClassVar = Job.SUBMITTING
    place: Place | None = None
    attempt: int = 1
    timeout_s: int | None = None
    array: str = ""


class SubmitIntent(Body):
    """One attempt is about to be launched; its token allows that once."""

    event: Literal["submit.intent"] = "submit.intent"
    attempt: int = 0


class JobSubmitted(Body):
    """An attempt was launched."""

    event: Literal["job.submitted"] = "job.submitted"
    MOVES_TO: ClassVar = Job.RUNNING
    handle: Handle
    attempt: int = 1
    running_since: float | None = None
    """When its machine was last started, in seconds since the epoch, where the platform reports that."""


class JobObserved(Body):
    """Base of the moves that an observation of the job leads to.

    `observation` may contain text of the job's own: it is kept for people and decided on by nobody.
    """

    observation: dict[str, Any] | None = None


class JobQueued(JobObserved):
    """The job waits in its backend's queue."""

    event: Literal["job.queued"] = "job.queued"
    MOVES_TO: ClassVar = Job.QUEUED


class JobRunning(JobObserved):
    """The job was seen running."""

    event: Literal["job.running"] = "job.running"
    MOVES_TO: ClassVar = Job.RUNNING


class JobUnknown(JobObserved):
    """Nothing can be said of the job now."""

    event: Literal["job.unknown"] = "job.unknown"
    MOVES_TO: ClassVar = Job.UNKNOWN


class JobPreempted(JobObserved):
    """The machine was taken back in the middle of the run."""

    event: Literal["job.preempted"] = "job.preempted"
    MOVES_TO: ClassVar = Job.PREEMPTED


class JobRested(JobObserved):
    """Base of the moves after which no process of a job writes any more."""


class JobPaused(JobRested):
    """The job's process was ended on request, to be launched again on request."""

    event: Literal["job.paused"] = "job.paused"
    MOVES_TO: ClassVar = Job.PAUSED


class JobEnded(JobRested):
    """Base of the moves after which a job moves no more."""


class JobSucceeded(JobEnded):
    """The job ended well."""

    event: Literal["job.succeeded"] = "job.succeeded"
    MOVES_TO: ClassVar = Job.SUCCEEDED


class JobFailed(JobEnded):
    """The job failed, or could not be launched: `code` is that error's, `findings` what its machine lacks.

    `following`, stored as `next`, are the next steps of that error.
    """

    event: Literal["job.failed"] = "job.failed"
    MOVES_TO: ClassVar = Job.FAILED
    code: str = ""
    findings: tuple[Finding, ...] = ()
    following: tuple[dict[str, Any], ...] = Field(default=(), validation_alias="next", serialization_alias="next")


class JobCanceled(JobEnded):
    """The job was ended on request, or at its cost cap."""

    event: Literal["job.canceled"] = "job.canceled"
    MOVES_TO: ClassVar = Job.CANCELED


class CancelRequested(Body):
    """Somebody asked for a job's end while it was in a state."""

    event: Literal["cancel.requested"] = "cancel.requested"
    from_state: Job = Field(validation_alias="from", serialization_alias="from")


class PauseRequested(Body):
    """Somebody asked for a job's pause while it was in a state."""

    event: Literal["pause.requested"] = "pause.requested"
    from_state: Job = Field(validation_alias="from", serialization_alias="from")


class ResumeRequested(Body):
    """Somebody asked for a paused job to go on, after which it may come to `worst_cost` US dollars in all."""

    event: Literal["resume.requested"] = "resume.requested"
    worst_cost: float | None = None


class RelaunchAllowed(Body):
    """A person allowed further machines for a job whose machine is taken, up to `budget_usd` US dollars in all.

    They did so at a terminal with the approval of the receipt `receipt`; `policy` is the policy file's digest then.
    """

    event: Literal["relaunch.allowed"] = "relaunch.allowed"
    budget_usd: float
    receipt: str
    by: str = ""
    policy: str = ""


class RelaunchIntent(Body):
    """Another machine is about to be rented for an interrupted job, which resumes from the pull with a digest.

    `worst_cost` is what that may cost, `left` what the budget has left after it, in US dollars.
    """

    event: Literal["relaunch.intent"] = "relaunch.intent"
    pull: str
    record: str
    worst_cost: float
    left: float
    generation: int


class MachineSeen(Body):
    """Which start of its machine a job runs on."""

    event: Literal["machine.seen"] = "machine.seen"
    machine: str


class FolderGone(Body):
    """A machine that was started again answers and has no run folder."""

    event: Literal["folder.gone"] = "folder.gone"
    machine: str


class ProcessGone(Body):
    """The process of an attempt was seen gone, and whether its machine was taken is not seen yet."""

    event: Literal["process.gone"] = "process.gone"
    attempt: int


class PriceAsk(Body):
    """A machine costs more than was checked (`price`, USD an hour); a person is asked by `ticket`."""

    event: Literal["price.ask"] = "price.ask"
    ticket: str
    price: float
    expires_at: float


class PriceAccepted(Body):
    """A machine's higher price (USD an hour) was settled."""

    event: Literal["price.accepted"] = "price.accepted"
    price: float


class OutputsDeclared(Body):
    """Outputs that were declared after the submission: all of them so far."""

    event: Literal["outputs.declared"] = "outputs.declared"
    outputs: tuple[str, ...]


class ArtifactsPulled(Body):
    """A job's outputs were copied here. `record` is the file that lists them, `digest` that list's.

    `store` is the address of the artifact store that they came from, empty where the machine sent them. `unsettled`:
    that store is not shown to have everything that the machine has.
    """

    event: Literal["artifacts.pulled"] = "artifacts.pulled"
    record: str
    digest: str
    dest: str = ""
    files: int = 0
    bytes: int = 0
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    not_taken: tuple[str, ...] = ()
    store: str = ""
    unsettled: bool = False


class ArtifactsVerified(Body):
    """The copy of a pull was verified. `seal` is None where files changed while they were read."""

    event: Literal["artifacts.verified"] = "artifacts.verified"
    verdict: Verdict
    level: Level
    pull: str
    seal: str | None
    problems: tuple[str, ...] = ()
    equal: bool = False
    files: int = 0
    bytes: int = 0
    unread: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class ArtifactsExaminedThere(Body):
    """A machine examined the outputs where they are. It is a claim: no gate reads it."""

    event: Literal["artifacts.examined_there"] = "artifacts.examined_there"
    verdict: Verdict
    level: Level
    files: int = 0
    problems: tuple[str, ...] = ()
