"""The context of every operation: its access to the ledger, the policy, the clock, the backends and the providers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from gpuwarden.backends.base import Backend, InstallingBackend, SandboxBackend, load_backend
from gpuwarden.core.clock import Clock, ShiftedClock
from gpuwarden.core.deadlines import Funds
from gpuwarden.core.errors import BadRequest, Conflict, NotFound, NotSupported, WardenError
from gpuwarden.core.guidance import Action, NextStep, do, manual_text
from gpuwarden.core.models import Instance, Observation, Place
from gpuwarden.core.policy import Policy
from gpuwarden.core.profile import Profile
from gpuwarden.core.sanitize import secret_values
from gpuwarden.known_secrets import KnownSecrets
from gpuwarden.ledger.store import Ledger
from gpuwarden.metrics.store import MetricStore
from gpuwarden.notes import Notes, load_notes
from gpuwarden.policy_record import WRONG_PINS, ActivePolicy, Notice, digest_of
from gpuwarden.profiles import load_profile, profile_names
from gpuwarden.providers.base import Provider, keyed, load_provider

REHEARSAL = "rehearsal/"
STEP_S = 55.0
"""Maximum duration in seconds of one step while a job is locked. The first connection can take almost a minute."""
LOCK_PATIENCE_S = 60.0
"""Seconds that a caller waits for a job's lock; longer than any single step under that lock."""
CAPS = "submit"
"""Name of the lock for the spending caps."""
CAPS_PATIENCE_S = 1.0
"""Seconds that a step waits for the CAPS lock while it holds a job's lock that other callers may need."""


class Ended(NamedTuple):
    """A machine whose billing has ended: the end time, and the cost of its last 24 hours in US dollars.

    `pretend` is true for a machine in a rehearsal.
    """

    at: float
    cost: float
    pretend: bool


@dataclass
class Context:
    """One process's access to the state folder. `env` supplies the values of named secrets."""

    ledger: Ledger
    source: Policy | Callable[[], ActivePolicy]
    """A fixed policy, or a function that returns the policy that currently applies."""
    clock: Clock
    home: Path
    env: Mapping[str, str]
    own_profiles: Path | None = None
    notes_file: Path | None = None
    cwd: Path | None = None
    """Folder that a job's input paths are relative to; None for the process's working directory."""
    more_notices: tuple[Notice, ...] = ()
    """Notices about matters other than the policy, such as servers that use another ledger."""
    seen: dict[str, tuple[float, Instance]] = field(default_factory=dict)
    """Maps each lease to the last answer that this process received about its instance, and the time of that answer.

    The ledger records only status changes.
    """
    unseen: dict[str, str] = field(default_factory=dict)
    """Maps leases to the reason why this process's last poll of the instance failed."""
    observed: dict[str, Observation] = field(default_factory=dict)
    blind: dict[str, WardenError] = field(default_factory=dict)
    """The observation from this process's last poll of each job (`observed`), or the error from that poll (`blind`)."""
    ended: dict[str, Ended] = field(default_factory=dict)
    ended_until: float = 0.0
    """Machines whose billing ended in the last day, by lease, collected up to the time `ended_until`."""
    funds: dict[str, Funds | None] = field(default_factory=dict)
    """Maps platforms to the account's funds at this process's last poll; None if no machine could be billed."""
    phrase: Callable[[Sequence[NextStep]], str] = manual_text
    """The function that renders an alert's next steps as text, set by the interface that opens this context."""
    _backends: dict[str, Backend] = field(default_factory=dict)
    _providers: dict[str, Provider] = field(default_factory=dict)

    @property
    def active_policy(self) -> ActivePolicy:
        """Return the current policy with its digest and notices. Raises BadRequest or LedgerError if it is invalid."""
        if isinstance(self.source, Policy):
            return ActivePolicy(self.source, digest_of(self.source.model_dump_json().encode()))
        return self.source()

    @property
    def policy(self) -> Policy:
        """Return the current policy. Raises BadRequest or LedgerError if it is invalid."""
        return self.source if isinstance(self.source, Policy) else self.source().policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.source = policy

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Return the notices about ignored variables, other servers, and an unrecorded policy file or ledger."""
        return (*self.active_policy.notices, *self.more_notices)

    @property
    def warnings(self) -> tuple[Notice, ...]:
        """Return the notices for a reply. An invalid policy is reported as a notice instead of an error."""
        try:
            return self.notices
        except WardenError as error:
            return (Notice("broken", error.message), *self.more_notices)

    def platforms(self) -> list[str]:
        """Return every platform name, including rehearsals. A platform with targets has a placeholder: `ssh/ALIAS`."""
        real = [load_profile(n, self.own_profiles) for n in profile_names(self.own_profiles)]
        rented = sorted(p.id for p in real if p.meter.metered)
        return sorted(p.listed for p in real) + [REHEARSAL + name for name in rented]

    def profile(self, platform: str) -> Profile:
        """Return a platform's profile.

        A rehearsal has the real platform's profile, but the local backend and the simulated provider.
        """
        if not platform.startswith(REHEARSAL):
            family, _, target = platform.partition("/")
            named = target and family in profile_names(self.own_profiles)
            profile = load_profile(family if named else platform, self.own_profiles)
            if target and profile.target is None:
                return load_profile(platform, self.own_profiles)  # raises an error that lists the platforms
            if profile.target is not None and not target:
                raise NotFound(
                    f"{platform} needs a target, but none was given",
                    f"Write {profile.listed}, with {profile.target.hint}.",
                )
            return profile
        real = load_profile(platform.removeprefix(REHEARSAL), self.own_profiles)
        if not real.meter.metered:
            raise NotFound(f"{real.id} is not rented, so it has no rehearsal", "Use it directly.")
        return real.model_copy(update={"backend": "local", "provider": "rehearsal"})

    def family(self, name: str) -> Profile:
        """Return a profile by its id, such as `ssh` for all SSH machines."""
        return load_profile(name, self.own_profiles)

    def configured(self) -> list[str]:
        """Return the rented platforms that the policy allows and that have an API key in the environment.

        A platform with targets, such as dstack's projects, is omitted, because no key identifies a target. A platform
        whose profile can't be read is included, so that using the platform raises the error.
        """
        found = []
        for name in filter(self.policy.allows, profile_names(self.own_profiles)):
            try:
                profile = load_profile(name, self.own_profiles)
            except WardenError:
                found.append(name)
                continue
            if profile.provider is not None and profile.target is None and keyed(profile.provider, self.env):
                found.append(name)
        return found

    def backend(self, name: str) -> Backend:
        """Return the backend with this name, loading it on first use."""
        if name not in self._backends:
            backend = self._backends[name] = load_backend(name, self.clock)
            if isinstance(backend, SandboxBackend):
                folders = (self.home, *([self.notes_file.parent] if self.notes_file else []))
                backend.confine(lambda: self.policy.local, folders)
            if isinstance(backend, InstallingBackend):
                backend.supply(lambda: self.policy.hosts, self.home / "tools")
        return self._backends[name]

    def provider(self, platform: str) -> Provider:
        """Return a platform's provider, loading it on first use. Raises NotSupported if the platform has none."""
        if platform not in self._providers:
            profile = self.profile(platform)
            if profile.by_hand:
                raise NotSupported(
                    f"gpuwarden has no provider for {platform}: it can't rent, price, stop or release machines there",
                    "Rent and release machines in its console, and run jobs on them as ssh/ALIAS.",
                )
            if profile.provider is None:
                raise NotSupported(f"{platform} is not rented, so it is not billed and can't be torn down")
            if isinstance(self.clock, ShiftedClock) and profile.provider != "rehearsal":
                raise NotSupported(
                    f"{platform} bills real money, but GPUWARDEN_REHEARSAL_CLOCK is set", "Unset it for real work."
                )
            state = self.home / "providers" / profile.provider
            named = profile if profile.target is None else profile.model_copy(update={"id": platform})
            self._providers[platform] = load_provider(profile.provider, named, state, self.clock)
        return self._providers[platform]

    @cached_property
    def known_secrets(self) -> KnownSecrets:
        """Return the digests of the secrets that were passed to jobs."""
        return KnownSecrets(self.home)

    def hidden(self, body: Any, names: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the secrets to redact in `body`: those in this environment, those with the given names, and those
        passed to jobs.
        """
        return (*secret_values(self.env, names), *self.known_secrets.found_in(body))

    @cached_property
    def metrics(self) -> MetricStore:
        """Return the store of job metrics, opened on first use. Raises DiskError."""
        return MetricStore(self.home)

    @property
    def input_store(self) -> Path:
        """Return the content-addressed folder for accepted jobs' inputs."""
        return self.home / "inputs"

    @property
    def protected_paths(self) -> tuple[Path, ...]:
        """Return the paths that are never sent to a machine and that only gpuwarden and its user may write."""
        folder = self.notes_file.parent if self.notes_file else None
        beside = (folder / name for name in ("policy.toml", "notes.toml", "profiles", WRONG_PINS)) if folder else ()
        return (self.home, *beside, *filter(None, [self.active_policy.file]))

    @cached_property
    def notes(self) -> Notes:
        """Return the user's notes. Raises BadRequest with the file and line of an error."""
        return load_notes(self.notes_file) if self.notes_file else Notes()

    def owned_place(self, platform: str) -> Place:
        """Return the host and run root for jobs on an owned platform, from the user's notes or the profile."""
        profile, told = self.profile(platform), self.notes.of(platform)
        run_root = told.scratch or profile.run_root
        if run_root.startswith("/") and profile.tier_of(run_root) is None:
            raise BadRequest(
                f"{self.notes_file}: platforms.{platform}.scratch is on storage that is not always available",
                do(Action.SHOW_PROFILE, "for its storage", name=profile.id),
            )
        target = platform.partition("/")[2]
        if profile.target is not None and target == profile.target.here:
            target = ""
        host = told.host or target if profile.kind == "engine" else target or told.host
        return Place(platform=platform, run_root=run_root, host=host or None)

    @contextlib.asynccontextmanager
    async def lock(self, job_id: str, patience_s: float = LOCK_PATIENCE_S) -> AsyncIterator[None]:
        """Lock a job, so that only one process at a time advances it. A dead process's locks are released.

        CAPS protects the spending caps, from their check until the cost is recorded. It is the last lock to acquire:
        its holder acquires no other lock and makes no network call.

        Raises Conflict if another process holds the lock for longer than `patience_s` seconds.
        """
        deadline = anyio.current_time() + patience_s
        while (held := self.ledger.lock(job_id)) is None:
            if anyio.current_time() > deadline:
                what = "checking the spending caps" if job_id == CAPS else f"working on {job_id}"
                raise Conflict(f"another process has been {what} for {patience_s:g} s", do(Action.RETRY, "in a moment"))
            await anyio.sleep(0.02)
        try:
            yield
        finally:
            held.release()
