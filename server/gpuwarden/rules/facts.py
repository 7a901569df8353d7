"""Facts that rules read. Facts are immutable, and the caller collects them because rules do no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gpuwarden.core.engine import EngineLimits
from gpuwarden.core.hardware import Gpu, gpu_of
from gpuwarden.core.models import (
    Answer,
    Disclosure,
    InputFile,
    Instance,
    JobSpec,
    Known,
    Manifest,
    Quote,
    Unknown,
    Verb,
    Verdict,
    digest,
)
from gpuwarden.core.policy import Policy
from gpuwarden.core.profile import Profile
from gpuwarden.core.readiness import Readiness
from gpuwarden.core.rules import Finding, Found, Severity
from gpuwarden.core.states import Job
from gpuwarden.hub.facts import HubFacts
from gpuwarden.static_analysis.env_and_shell import installed
from gpuwarden.static_analysis.group_launch import GroupLaunch, read_launch
from gpuwarden.static_analysis.package_checks import Libraries
from gpuwarden.static_analysis.script import ScriptFacts
from gpuwarden.static_analysis.script_usage import Push, Uses

HUB_OUTPUTS = ("/hub/models/", "/hub/datasets/")
MARGIN = 1.3
"""The minimum ratio of a timeout to the estimated time, which leaves a margin of 30 %."""


@dataclass(frozen=True)
class Leak:
    """A spec field that contains a secret's value; the value itself is not stored."""

    where: str
    looks_like: str


@dataclass(frozen=True)
class RehearsalOutcome:
    """The outcome of rehearsing this script with these arguments on this machine: `passed`, `fault` or `stopped`.

    `certain` is true if the error does not depend on substitute data or models. `line` is 0 if no script line caused
    the error.
    """

    outcome: str
    certain: bool = False
    message: str = ""
    line: int = 0


@dataclass(frozen=True)
class SubmitFacts:
    """All facts known before a job is accepted.

    - `profile`: None for an unknown platform.
    - `quote`: None if the platform is not metered.
    - `unusable`: the reason that jobs can't run on the platform. `unsold`: the reason that the platform does not rent
      out the requested machine.
    - `unset_secrets`: declared secrets that have no value on this machine. `account_secrets`: declared secrets that
      are, or contain, the key of an account that rents machines, or gpuwarden's own secrets.
    - `looked`: findings from probing an existing machine and checking the account. Each names the rule that reports it.
    - `hub`: None for a job that does not use the Hub.
    - `proven_script`: whether this exact script has succeeded before or is bundled with gpuwarden.
    - `script_url`: the problem with the script's URL; empty if there is none.
    - `inputs`: the manifest of the files copied with the job. `inputs_left_out`: files in the input folders that are
      not copied. `input_leaks`: inputs that look like secrets.
    - `attempts`: the number of times that the platform itself may run the command.
    - `artifact_store`: the problem with the artifact store, or an empty string; None if the job has no store.
      `unset_store_keys`: the variables for the store's credentials that have no value on this machine.
    - `engine`: the limits of the engine that runs the job; None if no engine runs it.
    - `local_modules`: modules, with their paths, that the program imports from files that are not copied.
    - `readiness`: requirements that an existing machine does not meet; None if it was not checked.
    - `files_here`: files in the working directory that the command or arguments name but that are not copied; None if
      the platform does not accept files.
    - `rehearsed`: the last rehearsal of this script with these arguments; None if it was never rehearsed.
    """

    spec: JobSpec
    policy: Policy
    profile: Profile | None
    platforms: tuple[str, ...]
    """All known platforms, listed in the message if `profile` is None."""
    script: ScriptFacts | None = None
    quote: Answer[Quote] | None = None
    unusable: str = ""
    leaks: tuple[Leak, ...] = ()
    unset_secrets: tuple[str, ...] = ()
    account_secrets: tuple[str, ...] = ()
    unsold: str = ""
    looked: tuple[Finding, ...] = ()
    hub: HubFacts | None = None
    proven_script: bool = False
    inputs: tuple[InputFile, ...] = ()
    inputs_left_out: tuple[str, ...] = ()
    input_leaks: tuple[Leak, ...] = ()
    script_url: Answer[str] = field(default_factory=lambda: Known(""))
    unusable_rules: tuple[str, ...] = ()
    attempts: int = 1
    artifact_store: Answer[str] | None = None
    unset_store_keys: tuple[str, ...] = ()
    engine: Answer[EngineLimits] | None = None
    rehearsed: RehearsalOutcome | None = None
    local_modules: tuple[tuple[str, str], ...] = ()
    readiness: Answer[Readiness] | None = None
    files_here: tuple[str, ...] | None = ()

    @property
    def undeclared(self) -> tuple[str, ...]:
        """Return the third-party modules that the script imports, excluding files next to the script."""
        local = dict(self.local_modules)
        return tuple(m for m in self.script.third_party if m not in local) if self.script is not None else ()

    @property
    def limits(self) -> EngineLimits | None:
        """Return the engine's limits; None if no engine runs the job or its limits are unknown."""
        return self.engine.value if isinstance(self.engine, Known) else None

    @property
    def launch(self) -> GroupLaunch:
        """Return the settings for a multi-node launch, as given in the command, the environment and the script."""
        return read_launch((*self.spec.command, *self.spec.args), self.spec.env, self.script)

    @property
    def nodes(self) -> int:
        """Return the job's number of nodes: the larger of the numbers in its engine request and its launch command."""
        return max(self.limits.request.nodes if self.limits else 1, self.launch.nodes or 1)

    @property
    def uses(self) -> Uses:
        """Return the facts read from the script or the command; empty if the source can't be parsed."""
        return self.script.uses if self.script is not None else Uses()

    @cached_property
    def libraries(self) -> Libraries:
        """Return the training libraries and the releases that the job will use."""
        header = self.script.header if self.script is not None else None
        pip = tuple(sorted(installed(self.uses.shells, "pip")))
        given = (*header.dependencies, *pip) if header else pip or None
        return Libraries(given, self.uses.package_use, self.uses.imports)

    @property
    def gpu(self) -> tuple[Gpu, int] | None:
        """Return the requested GPU model and the number of GPUs; None if no GPU is requested or its name is unknown."""
        found = gpu_of(self.spec.gpu)
        return (found[0], found[1] * self.spec.gpu_count) if found else None

    def certain(self, push: Push) -> bool:
        """Return true if a push is certain to run and its failure makes the job fail.

        If the script catches the error, the job fails only if it declares the repo, which is then not written.
        """
        declared = {"/".join(o.split("/")[3:5]) for o in self.spec.outputs if o.startswith(HUB_OUTPUTS)}
        target = push.target or "?"  # a name without an owner belongs to the token's account
        return not push.maybe and (not push.tried or (bool(declared) and ("/" not in target or target in declared)))

    @property
    def could_not(self) -> Severity:
        """Return the severity for a check that could not be completed.

        It is UNKNOWN, which closes the gate, on a metered platform, and WARNING on any other.
        """
        return Severity.UNKNOWN if self.metered else Severity.WARNING

    def reported(self, rule: str) -> Iterator[Found]:
        """Yield one rule's findings from the machine probe and the account check."""
        return (Found(f.message, f.fix, f.severity) for f in self.looked if f.rule == rule)

    @property
    def metered(self) -> bool:
        """Return true if time on the platform costs money; an unknown platform counts as metered."""
        return self.profile is None or self.profile.meter.metered

    @property
    def price(self) -> float | None:
        """Return the price in US dollars per hour; None if unknown."""
        if self.quote is None or isinstance(self.quote, Unknown):
            return None
        return self.quote.value.price_usd_per_hour

    @property
    def worst_cost(self) -> float | None:
        """Return the job's worst-case cost in US dollars: price x timeout x possible runs; None if unknown.

        `max_cost_usd` does not lower this cost: when a job reaches its cap, the next check ends only the job's process,
        and the machine is still billed.
        """
        spec = self.spec
        if self.price is None or spec.timeout_s is None:
            return None
        runs = 1 + spec.max_restarts if spec.interruptible else 1
        return self.price * spec.timeout_s / 3600 * runs * self.attempts

    @property
    def parts(self) -> dict[str, str]:
        """Return the digests of the policy, the profile and a fetched script. Receipts are bound to these digests."""
        return {
            "policy": digest(self.policy),
            "profile": digest(self.profile) if self.profile else "",
            "script": self.script.fetched if self.script else "",
        }

    @property
    def digest(self) -> str:
        """Return the digest of all checked facts. A receipt is bound to it."""
        return digest(
            {
                "spec": self.spec.model_dump(mode="json"),
                "parts": self.parts,
                "price": self.price,
                "unset_secrets": list(self.unset_secrets),
                "hub": self.hub.watched if self.hub else {},
                "inputs": [f.model_dump() for f in self.inputs],
            }
        )


@dataclass(frozen=True)
class OutputFile:
    """One declared file on the machine, and the state of its copies.

    `dies`: the verb destroys the file. `copied`: the file was pulled. `stored`: the artifact store has a copy whose
    checksum, computed by the store, matches the file's.
    """

    path: str
    size: int
    tier: str
    dies: bool
    copied: bool = False
    stored: bool = False


@dataclass(frozen=True)
class TeardownFacts:
    """All facts known before a machine is stopped or terminated.

    - `machine`: the provider's report on the instance. `files`: the files currently on the instance; Unknown if the
      instance can't be reached.
    - `copy_verdict`: the verdict on the pulled copy; None if the copy has not been verified since it last changed.
    - `copy_equal`: every file in the copy matches its digest in the machine's manifest, even if its content is invalid.
    - `copy_unread`: files in unknown formats, if they are the only reason that the copy is not proven.
    - `copy_aside`: images, tables and logs that are also broken on the machine, if no other file refutes the copy.
    - `store`: the address of the artifact store, if the store was checked. `store_why`: the reason that the store lacks
      files that the verb destroys.
    - `checkpoint_before`: the message from the last check that found an undeclared checkpoint; used if the machine
      can't be inspected now.
    """

    job_id: str
    job_state: Job
    verb: Verb
    profile: Profile
    machine: Answer[Instance | None]
    files: Answer[tuple[OutputFile, ...]]
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    manifest: Manifest | None = None
    changed: tuple[str, ...] = ()
    copy_verdict: Verdict | None = None
    copy_equal: bool = False
    copy_problems: tuple[str, ...] = ()
    copy_unread: tuple[str, ...] = ()
    copy_aside: tuple[str, ...] = ()
    other_jobs: tuple[str, ...] = ()
    unusable_rules: tuple[str, ...] = ()
    durable_storage: bool = False
    store: str = ""
    store_why: str = ""
    disclosure: Answer[Disclosure] = field(default_factory=lambda: Unknown("the machine has not been inspected"))
    checkpoint_before: str = ""

    @property
    def gone(self) -> bool:
        """Return true if the provider reports that the instance no longer exists."""
        return not isinstance(self.machine, Unknown) and self.machine.value is None

    @property
    def dying(self) -> tuple[OutputFile, ...]:
        """Return the declared files that this verb destroys."""
        return () if isinstance(self.files, Unknown) else tuple(f for f in self.files.value if f.dies)
