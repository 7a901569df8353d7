"""Provider `rehearsal`: instances of a cloud that is simulated on this machine according to a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import NotSupported
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import salted
from gpuwarden.providers._rented import agreed_gone

if TYPE_CHECKING:
    from gpuwarden.rehearsal.cloud import Cloud

ACCOUNT_KEYS: Final = ()  # simulated money needs no key
SHELL_GUARD: Final = ShellGuard()  # its machines are local processes, and no command-line tool ends them


class RehearsalProvider:
    """A `Provider` over a `Cloud`; the token is the instance's label."""

    name = "rehearsal"
    wishes = frozenset({"image", "region"})
    """A simulated machine has neither image nor region; accepted so that a job with these options can be rehearsed."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.profile = cloud.profile
        self.settle_s = cloud.settings.settle_s

    def key_digest(self, salt: str) -> str:
        """Return a digest of the cloud's nonce: each folder counts as a separate account."""
        return salted(salt, self.name, self.profile.id, self.cloud.nonce)

    async def account_id(self) -> Answer[str]:
        """Raise NotSupported: a simulated cloud has no account, only a nonce."""
        raise NotSupported("a simulated cloud names no account")

    async def check(self) -> list[Finding]:
        """Return an empty list: a simulated account can't have problems."""
        return []

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the simulated price."""
        return await to_thread.run_sync(self.cloud.quote, resources)

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent an instance. Not idempotent: call `find` before a retry."""
        return await to_thread.run_sync(self.cloud.create, resources, token)

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every listed instance labelled `token`."""
        return await to_thread.run_sync(self.cloud.find, token)

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance, with its final bill if it is gone; None if the cloud does not know it."""
        answer = await to_thread.run_sync(self.cloud.get, id)
        if isinstance(answer, Unknown) or (answer.value and answer.value.state is not InstanceState.GONE):
            return answer
        there = await agreed_gone(id, self.list, "the simulated cloud has no such instance")
        return there if isinstance(there, Unknown) or there.value else answer

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance that is not gone."""
        return await to_thread.run_sync(self.cloud.list)

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported: simulated money has no balance."""
        raise NotSupported("simulated money has no balance")

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped instance again."""
        return await to_thread.run_sync(self.cloud.start, id)

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a stop."""
        return await to_thread.run_sync(self.cloud.stop, id)

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination."""
        return await to_thread.run_sync(self.cloud.terminate, id)


def create(profile: Profile, state: Path, clock: Clock) -> RehearsalProvider:
    """Return the provider for one profile; the cloud's files in `state/<profile id>` are kept."""
    # On the system clock, a supervisor process applies changes in time; on any other clock, the next poll does.
    from gpuwarden.rehearsal.cloud import Cloud  # a late import: this module is loaded to read key names

    return RehearsalProvider(Cloud(state / profile.id, profile, clock, supervise=isinstance(clock, SystemClock)))
