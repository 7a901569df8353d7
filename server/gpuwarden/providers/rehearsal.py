"""Provider `rehearsal`: instances in a cloud that is simulated on this machine from a profile."""

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
from gpuwarden.providers._rented import confirmed_absent

if TYPE_CHECKING:
    from gpuwarden.rehearsal.cloud import Cloud

ACCOUNT_KEYS: Final = ()  # a simulated account needs no key
SHELL_GUARD: Final = ShellGuard()  # its machines are local processes, and no command-line tool ends them


class RehearsalProvider:
    """A `Provider` for a simulated `Cloud`. The token is the instance's label."""

    name = "rehearsal"
    machine_options = frozenset({"image", "region"})
    """Options that have no effect on a simulated machine.

    They are accepted so that a job with these options can be rehearsed.
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.profile = cloud.profile
        self.settle_s = cloud.settings.settle_s

    def key_digest(self, salt: str) -> str:
        """Return a digest of the cloud's nonce. Each cloud folder counts as a separate account."""
        return salted(salt, self.name, self.profile.id, self.cloud.nonce)

    async def account_id(self) -> Answer[str]:
        """Raise NotSupported, because a simulated cloud has a nonce instead of an account."""
        raise NotSupported("a simulated cloud has no account name")

    async def check(self) -> list[Finding]:
        """Return an empty list, because a simulated account can't have problems."""
        return []

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the simulated price."""
        return await to_thread.run_sync(self.cloud.quote, resources)

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent an instance. Not idempotent: call `find` before a retry."""
        return await to_thread.run_sync(self.cloud.create, resources, token)

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every listed instance with the label `token`."""
        return await to_thread.run_sync(self.cloud.find, token)

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance, with its final bill if it is gone, or None if the cloud has no record of it."""
        answer = await to_thread.run_sync(self.cloud.get, id)
        if isinstance(answer, Unknown) or (answer.value and answer.value.state is not InstanceState.GONE):
            return answer
        there = await confirmed_absent(id, self.list, "the simulated cloud has no such instance")
        return there if isinstance(there, Unknown) or there.value else answer

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance that is not gone."""
        return await to_thread.run_sync(self.cloud.list)

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported, because a simulated account has no balance."""
        raise NotSupported("a simulated account has no balance")

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
    """Return the provider for one profile. The simulated cloud's files are stored in `state/<profile id>`."""
    # With the system clock, a supervisor process applies changes on time; otherwise, the next poll applies them.
    from gpuwarden.rehearsal.cloud import Cloud  # imported late: this module is often loaded only for its key names

    return RehearsalProvider(Cloud(state / profile.id, profile, clock, supervise=isinstance(clock, SystemClock)))
