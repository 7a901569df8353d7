"""Define the facts that rules read. A use case gathers them; they are frozen, and rules do no I/O."""

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
from gpuwarden.static_analysis.script_usage import Uses

MARGIN = 1.3
"""A timeout leaves 30 % of room above the estimate."""


@dataclass(frozen=True)
class Leak:
    """A place in a spec that contains a secret's value; the value itself is not stored."""

    where: str
    looks_like: str


@dataclass(frozen=True)
class Rehearsed:
    """What came of rehearsing exactly this script with these arguments on this machine: `passed`, `fault`, `stopped`.

    `certain`: the error does not depend on any substitute. `line` is 0 where the script itself has no place for it.
    """

    outcome: str
    certain: bool = False
    message: str = ""
    line: int = 0


@dataclass(frozen=True)
class SubmitFacts:
    """All that is known before a job is accepted. `profile` is None for an unknown platform.

    `quote` is None where nothing is metered. `unusable` says why jobs can't be run there, `unsold` why the platform
    does not rent what is asked. `unset_secrets` are declared secrets that have no value here, `account_secrets` those
    that are, or contain, the key of an account that rents machines, or gpuwarden's own secrets. `looked` is what the
    probe of the place (where one exists before renting) and the check of the account found; each finding names the rule
    that will report it. `hub` is None for a job that does not touch the Hub. `proven_script`: this very script has
    succeeded before, or is shipped with gpuwarden. `script_url` says what is wrong with an address that a script comes
    from. `inputs` is the manifest of the files that go with the job, `inputs_left_out` what of the named folders does
    not, and `input_leaks` the files that look like secrets. `attempts` is how often the platform itself may run the
    command. `artifact_store` says what is wrong with the artifact store, None where none is asked for;
    `unset_store_keys` are the variables of its credentials that have no value here. `engine` is what the engine that
    runs the job allows, None where none does. `local_modules` are the modules, with their paths, that the program
    imports from files which do not go along. `readiness` is what an existing place lacks, None where nothing was looked
    for. `files_here` are the files that the command or the arguments name, which exist in the working directory and do
    not go along; None where no file can. `rehearsed` is the last rehearsal of this script with these arguments, None
    where there was none.
    """

    spec: JobSpec
    policy: Policy
    profile: Profile | None
    platforms: tuple[str, ...]
    """Every platform that can be named, where the profile is None."""
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
    rehearsed: Rehearsed | None = None
    local_modules: tuple[tuple[str, str], ...] = ()
    readiness: Answer[Readiness] | None = None
    files_here: tuple[str, ...] | None = ()

    @property
    def undeclared(self) -> tuple[str, ...]:
        """Return the third-party modules that the script imports: without those that are files beside it."""
        local = dict(self.local_modules)
        return tuple(m for m in self.script.third_party if m not in local) if self.script is not None else ()

    @property
    def limits(self) -> EngineLimits | None:
        """Return what the engine allows; None where no engine runs the job, or where it is unknown."""
        return self.engine.value if isinstance(self.engine, Known) else None

    @property
    def launch(self) -> GroupLaunch:
        """Return what the command says of a launch on several nodes."""
        return read_launch((*self.spec.command, *self.spec.args), self.spec.env, self.script)

    @property
    def nodes(self) -> int:
        """Return on how many nodes the job runs: as its engine is asked, or as its command says."""
        return max(self.limits.asked.nodes if self.limits else 1, self.launch.nodes or 1)

    @property
    def uses(self) -> Uses:
        """Return what the script or the command asks for; empty when it can't be parsed."""
        return self.script.uses if self.script is not None else Uses()

    @cached_property
    def libraries(self) -> Libraries:
        """Return the training libraries in the releases that the job will get."""
        header = self.script.header if self.script is not None else None
        pip = tuple(sorted(installed(self.uses.shells, "pip")))
        given = (*header.dependencies, *pip) if header else pip or None
        return Libraries(given, self.uses.package_use, self.uses.imports)

    @property
    def gpu(self) -> tuple[Gpu, int] | None:
        """Return the requested GPU and their number; None without a GPU or when its name is unknown."""
        found = gpu_of(self.spec.gpu)
        return (found[0], found[1] * self.spec.gpu_count) if found else None

    @property
    def could_not(self) -> Severity:
        """Return the severity of "could not be checked", which blocks a metered job."""
        return Severity.UNKNOWN if self.metered else Severity.WARNING

    def reported(self, rule: str) -> Iterator[Found]:
        """Yield what the probe of the place or the account reported for one rule."""
        return (Found(f.message, f.fix, f.severity) for f in self.looked if f.rule == rule)

    @property
    def metered(self) -> bool:
        """Return true when time on the platform costs money; an unknown platform counts as metered."""
        return self.profile is None or self.profile.meter.metered

    @property
    def price(self) -> float | None:
        """Return the price in US dollars per hour, None when unknown."""
        if self.quote is None or isinstance(self.quote, Unknown):
            return None
        return self.quote.value.price_usd_per_hour

    @property
    def worst_cost(self) -> float | None:
        """Return the most that this job may cost: price x timeout, for each run that there may be; None if unknown.

        `max_cost_usd` doesn't lower it: it only ends the job's process, at the next check, and the meter runs on.
        """
        spec = self.spec
        if self.price is None or spec.timeout_s is None:
            return None
        runs = 1 + spec.max_restarts if spec.interruptible else 1
        return self.price * spec.timeout_s / 3600 * runs * self.attempts

    @property
    def parts(self) -> dict[str, str]:
        """Return the digests of the policy, the profile and a fetched script. A receipt is bound to each."""
        return {
            "policy": digest(self.policy),
            "profile": digest(self.profile) if self.profile else "",
            "script": self.script.fetched if self.script else "",
        }

    @property
    def digest(self) -> str:
        """Return the digest of exactly what was checked. A receipt is bound to it."""
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
    """One file that the job declared, as it is on the machine, and what is known of its copies.

    `copied`: it was pulled. `stored`: the artifact store has it, equal by the store's own checksum.
    """

    path: str
    size: int
    tier: str
    dies: bool
    copied: bool = False
    stored: bool = False


@dataclass(frozen=True)
class TeardownFacts:
    """All that is known before a machine is stopped or terminated.

    `machine` is what the provider says of the instance; `files` the files on it now, Unknown when it can't be
    reached. `copy_verdict` is the verification of the pulled copy, None when there was none since it last changed;
    `copy_equal` says that every file of it has the digest that the machine's manifest gives it, whatever its content;
    `copy_unread` are the files that nothing here can read, where they alone keep it from being proven; `copy_aside` the
    pictures, tables and logs that are as broken on the machine, where they alone refute it. `store` is the address of
    the artifact store where one was looked at, `store_why` why it has not everything that dies.
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
    disclosure: Answer[Disclosure] = field(default_factory=lambda: Unknown("not asked"))

    @property
    def gone(self) -> bool:
        """Return true when the provider reports that the instance no longer exists: nothing is left to lose or stop."""
        return not isinstance(self.machine, Unknown) and self.machine.value is None

    @property
    def dying(self) -> tuple[OutputFile, ...]:
        """Return the declared files that this verb destroys."""
        return () if isinstance(self.files, Unknown) else tuple(f for f in self.files.value if f.dies)
