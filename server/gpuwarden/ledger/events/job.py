"""Events for jobs and their receipts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from gpuwarden.core.fan_out import FanOutPlan
from gpuwarden.core.models import Choice, Handle, InputFile, JobSpec, Level, Place, Verdict
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job
from gpuwarden.ledger.events.base import Body


class ReceiptIssued(Body):
    """The submit gate passed a spec. `job` is set if the receipt is for the price of a machine that is already rented.

    `cells` is the number of runs in a fan-out on at most `machines` machines. `fan_out` is the fan-out whose limits the
    receipt would change. If the job may run on several platforms, `choices` lists them in order of preference, and the
    price and cost are the highest of all choices. `parts` contains the digests of the policy, the profile and a fetched
    script. `storage` lists the storage that is billed after the teardown, at `storage_usd_per_hour`; None if unknown.
    If a call passes only the receipt, `spec` or `plan` is launched. `script_file` is the path of the script in the
    working directory.
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
    """A job was accepted with a receipt. `price` is the price in USD per hour at the time of the check; `worst_cost` is
    in USD.

    For a job with several `choices`, the spec and the price are those of the first choice. `script_digest` is empty for
    a job without a script, and None if an older version did not record it.
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
    """The submit gate refused a spec. Only its digest is stored, because the spec may contain a secret."""

    event: Literal["job.refused"] = "job.refused"
    MOVES_TO: ClassVar = Job.REFUSED
    name: str = ""
    platform: str = ""
    spec_digest: str = ""
    rules: tuple[str, ...] = ()


class JobProvisioning(Body):
    """A machine is about to be rented for a job."""

    event: Literal["job.provisioning"] = "job.provisioning"
    MOVES_TO: ClassVar = Job.PROVISIONING
    lease: str
    generation: int = 0


class JobMovedOn(Body):
    """A platform confirmed that it has no capacity, so the job's next choice is used.

    `choice` is the next choice's index, counted from 0. `lease` and `generation` are those of the abandoned request.
    """

    event: Literal["job.moved_on"] = "job.moved_on"
    choice: int
    platform: str
    gpu: str | None = None
    lease: str
    generation: int


class JobSubmitting(Body):
    """A machine is ready, and an attempt will be launched on it.

    If the job has been paused, `timeout_s` is set, and the job may cost up to `worst_cost` US dollars in total.
    `array` is the token of the array in which the attempt is launched, or empty if the attempt is launched separately.
    """

    event: Literal["job.submitting"] = "job.submitting"
    MOVES_TO: ClassVar = Job.SUBMITTING
    place: Place | None = None
    attempt: int = 1
    timeout_s: int | None = None
    worst_cost: float | None = None
    array: str = ""


class SubmitIntent(Body):
    """One attempt is about to be launched. The token ensures that this happens only once."""

    event: Literal["submit.intent"] = "submit.intent"
    attempt: int = 0


class JobSubmitted(Body):
    """An attempt was launched."""

    event: Literal["job.submitted"] = "job.submitted"
    MOVES_TO: ClassVar = Job.RUNNING
    handle: Handle
    attempt: int = 1
    running_since: float | None = None
    """The last start time of the job's machine, in seconds since the epoch; None if the platform does not report it."""


class JobObserved(Body):
    """Base class for transitions caused by an observation of the job.

    `observation` may contain text that the job wrote. It is only for display, and no decision depends on it.
    """

    observation: dict[str, Any] | None = None


class JobQueued(JobObserved):
    """The job is waiting in its backend's queue."""

    event: Literal["job.queued"] = "job.queued"
    MOVES_TO: ClassVar = Job.QUEUED


class JobRunning(JobObserved):
    """The job is running."""

    event: Literal["job.running"] = "job.running"
    MOVES_TO: ClassVar = Job.RUNNING


class JobUnknown(JobObserved):
    """The job's state is unknown."""

    event: Literal["job.unknown"] = "job.unknown"
    MOVES_TO: ClassVar = Job.UNKNOWN


class JobPreempted(JobObserved):
    """The platform reclaimed the machine while the job was running."""

    event: Literal["job.preempted"] = "job.preempted"
    MOVES_TO: ClassVar = Job.PREEMPTED


class JobRested(JobObserved):
    """Base class for transitions after which none of the job's processes can write files."""


class JobPaused(JobRested):
    """A pause ended the job's process. A resume launches the job again."""

    event: Literal["job.paused"] = "job.paused"
    MOVES_TO: ClassVar = Job.PAUSED


class JobEnded(JobRested):
    """Base class for a job's final transitions."""


class JobSucceeded(JobEnded):
    """The job succeeded."""

    event: Literal["job.succeeded"] = "job.succeeded"
    MOVES_TO: ClassVar = Job.SUCCEEDED


class JobFailed(JobEnded):
    """The job failed or could not be launched. `code` is the error code; `findings` lists problems with the machine.

    `following`, stored as `next`, lists the next steps that the error suggests.
    """

    event: Literal["job.failed"] = "job.failed"
    MOVES_TO: ClassVar = Job.FAILED
    code: str = ""
    findings: tuple[Finding, ...] = ()
    following: tuple[dict[str, Any], ...] = Field(default=(), validation_alias="next", serialization_alias="next")


class JobCanceled(JobEnded):
    """The job was canceled on request, or because it reached its cost cap."""

    event: Literal["job.canceled"] = "job.canceled"
    MOVES_TO: ClassVar = Job.CANCELED


class CancelRequested(Body):
    """Cancellation was requested while the job was in `from_state`."""

    event: Literal["cancel.requested"] = "cancel.requested"
    from_state: Job = Field(validation_alias="from", serialization_alias="from")


class PauseRequested(Body):
    """A pause was requested while the job was in `from_state`."""

    event: Literal["pause.requested"] = "pause.requested"
    from_state: Job = Field(validation_alias="from", serialization_alias="from")


class ResumeRequested(Body):
    """A resume was requested. The resumed job may cost up to `worst_cost` US dollars in total."""

    event: Literal["resume.requested"] = "resume.requested"
    worst_cost: float | None = None


class RelaunchAllowed(Body):
    """The user allowed additional machines if a job is interrupted, for up to `budget_usd` US dollars in total.

    The budget was set at a terminal, along with the approval of the receipt `receipt`. `policy` is the digest of the
    policy file.
    """

    event: Literal["relaunch.allowed"] = "relaunch.allowed"
    budget_usd: float
    receipt: str
    by: str = ""
    policy: str = ""


class RelaunchIntent(Body):
    """Another machine is about to be rented to resume an interrupted job from the pull with the digest `pull`.

    `worst_cost` is the maximum cost of this machine, and `left` is the budget that then remains, both in US dollars.
    """

    event: Literal["relaunch.intent"] = "relaunch.intent"
    pull: str
    record: str
    worst_cost: float
    left: float
    generation: int


class MachineIdentified(Body):
    """The machine on which a job runs was identified, including the machine's current boot."""

    event: Literal["machine.seen"] = "machine.seen"
    machine: str


class FolderGone(Body):
    """A machine was restarted and responds, but the run folder no longer exists."""

    event: Literal["folder.gone"] = "folder.gone"
    machine: str


class ProcessGone(Body):
    """An attempt's process no longer exists. It is not yet known whether the platform reclaimed the machine."""

    event: Literal["process.gone"] = "process.gone"
    attempt: int


class PriceAsk(Body):
    """A machine costs `price` USD per hour, more than the checked price. The user is asked to approve `ticket`."""

    event: Literal["price.ask"] = "price.ask"
    ticket: str
    price: float
    expires_at: float


class PriceAccepted(Body):
    """A machine's higher price, in USD per hour, was accepted."""

    event: Literal["price.accepted"] = "price.accepted"
    price: float


class OutputsDeclared(Body):
    """Additional outputs were declared. `outputs` lists all outputs that have been declared since the submission."""

    event: Literal["outputs.declared"] = "outputs.declared"
    outputs: tuple[str, ...]


class ArtifactsPulled(Body):
    """A job's outputs were copied to this computer. `record` is the file that lists them, and `digest` is its digest.

    `store` is the address of the artifact store from which the outputs were copied, or empty if they were copied from
    the machine. `unsettled` is true if the store may lack files that are on the machine.
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
    """A pull's files were verified. `seal` is the digest of their metadata; None if they changed in the meantime."""

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
    """A machine verified its own outputs. No gate relies on the result, because it is only the machine's claim."""

    event: Literal["artifacts.examined_there"] = "artifacts.examined_there"
    verdict: Verdict
    level: Level
    files: int = 0
    problems: tuple[str, ...] = ()
