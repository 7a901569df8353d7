"""Contract for every provider, inherited by each provider's test.

The test supplies the fixture `rig`: a `Rig` with the provider, a way to let its world settle, a second account, and
some false replies. Tests of the replies that a lease may trust run the use cases (`Desk`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from gpuwarden.core.errors import Conflict, NotFound, NotSupported
from gpuwarden.core.models import Answer, Instance, InstanceState, JobSpec, Known, Resources, Unknown
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job, Lease
from gpuwarden.lifecycle.execution.provisioning import accepted, provisioning
from gpuwarden.lifecycle.leases.accounts import BoundProvider
from gpuwarden.lifecycle.leases.meter import poll_lease
from gpuwarden.lifecycle.leases.termination import request_end
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.records import LeaseRecord, read_job, read_lease
from gpuwarden.providers.base import Provider
from lifecycle_kit import open_house
from rehearsal_kit import HandClock

T = TypeVar("T")
UP = {InstanceState.BOOTING, InstanceState.RUNNING}


@dataclass
class Rig:
    """A provider with its test controls; `settle` returns once all requested changes have happened."""

    provider: Provider
    settle: Callable[[], Awaitable[None]]
    clock: HandClock
    folder: Path
    platform: str
    resources: Resources = field(default_factory=lambda: Resources(gpu="H100"), kw_only=True)
    names_account: bool = field(default=True, kw_only=True)
    """Whether the platform's API identifies a key's account."""

    def use_account(self, which: int) -> None:
        """Use the key of the first (0) or another (1) account."""
        raise NotImplementedError

    def replace_key(self) -> None:
        """Replace the first account's key with a new one for the same account."""
        raise NotImplementedError

    def stray_404(self, ident: str) -> None:
        """Report one instance as missing on get, although the list includes it."""
        raise NotImplementedError

    def refuse(self, *, makes: bool, names: bool = False) -> None:
        """Refuse the next create. With `makes`, carry it out anyway; with `names`, name the instance in the refusal."""
        raise NotImplementedError

    def blind(self, *, now: bool) -> None:
        """Make the list unreadable, or readable again."""
        raise NotImplementedError

    def lists_at_once(self) -> None:
        """Make lists show new instances immediately instead of after a lag."""

    def rented(self) -> list[str]:
        """Return the first account's billing instances, read from its world instead of the provider."""
        raise NotImplementedError


class Desk:
    """A ledger with one accepted job on a rig's provider."""

    lease_id = "j1-i1"

    def __init__(self, rig: Rig, gpu: str | None, *, price: float | None = None, **more: object) -> None:
        self.rig = rig
        self.ctx = open_house(rig.folder / "desk", rig.clock)
        self.ctx._providers[rig.platform] = rig.provider
        wanted = {"name": "train", "platform": rig.platform, "command": ("true",), "gpu": gpu, "timeout_s": 600}
        spec = JobSpec.model_validate({**wanted, "outputs": ("out",), **more})
        body = {"spec": spec.model_dump(mode="json"), "worst_cost": price and price * 600 / 3600, "price": price}
        self.ctx.ledger.append("job/j1", "job.accepted", body, state=Job.ACCEPTED)

    async def rent(self) -> LeaseRecord:
        """Rent a machine and wait until it runs."""
        await accepted(self.ctx, read_job(self.ctx.ledger, "j1"))
        await self.rig.settle()
        return self.lease

    async def looks(self) -> list[Answer[Instance | None]]:
        """Poll three times, far enough apart to count as separate answers."""
        answers = []
        for _ in range(3):
            answers.append(await poll_lease(self.ctx, self.lease_id))
            await self.rig.clock.sleep(self.rig.provider.settle_s + 1)
        return answers

    @property
    def lease(self) -> LeaseRecord:
        return read_lease(self.ctx.ledger, self.lease_id)

    @property
    def job(self) -> Job:
        return read_job(self.ctx.ledger, "j1").state


def known(answer: Answer[T]) -> T:
    assert isinstance(answer, Known), answer
    return answer.value


class ProviderTests:
    """Base class of a provider's tests; a subclass supplies `rig`."""

    pytestmark = pytest.mark.anyio

    async def rent(self, rig: Rig, token: str = "token-1") -> Instance:
        made = known(await rig.provider.create(rig.resources, token))
        await rig.settle()
        found = known(await rig.provider.get(made.id))
        assert found is not None
        return found

    async def down(self, rig: Rig, ident: str) -> None:
        if rig.provider.profile.verbs.terminate_needs_stop:
            known(await rig.provider.stop(ident))
            await rig.settle()
        known(await rig.provider.terminate(ident))
        await rig.settle()


class ProviderContract(ProviderTests):
    """The tests that every provider passes."""

    async def test_a_new_account_has_nothing(self, rig: Rig) -> None:
        assert known(await rig.provider.list()) == ()
        assert known(await rig.provider.find("token-1")) == ()
        assert known(await rig.provider.get("no-such-instance")) is None
        assert await rig.provider.check() == []

    async def test_keys_of_two_accounts_are_distinguished(self, rig: Rig) -> None:
        digests, names = set(), set()
        for which in (0, 1, 0):
            rig.use_account(which)
            digests.add(rig.provider.key_digest("salt"))
            if rig.names_account:
                names.add(known(await rig.provider.account_id()))
            else:
                with pytest.raises(NotSupported):
                    await rig.provider.account_id()
        assert len(digests) == 2 and len(names) == (2 if rig.names_account else 0)

    async def test_a_quote_names_its_source(self, rig: Rig) -> None:
        quote = known(await rig.provider.quote(rig.resources))
        assert quote.source
        assert quote.price_usd_per_hour is None or quote.price_usd_per_hour >= 0

    async def test_create_returns_at_once_and_carries_the_token(self, rig: Rig) -> None:
        made = known(await rig.provider.create(rig.resources, "token-1"))
        assert made.state in UP
        assert made.token == "token-1"
        assert made.meter is not False
        await rig.settle()
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [made.id]
        assert known(await rig.provider.find("token-2")) == ()
        assert [i.id for i in known(await rig.provider.list())] == [made.id]

    async def test_list_and_get_return_the_same_instance(self, rig: Rig) -> None:
        """Polling many machines takes a single list request, unless the list lacks a running machine's address."""
        instance = await self.rent(rig)
        alone, (listed,) = known(await rig.provider.get(instance.id)), known(await rig.provider.list())
        changing = {"cost_usd", "why"}
        if listed.place is None:
            changing |= {"place", "price_usd_per_hour", "stopped_usd_per_hour", "created_at", "running_since"}
        assert alone is not None
        assert listed.model_dump(exclude=changing) == alone.model_dump(exclude=changing)

    async def test_a_running_instance_has_a_place_and_a_meter(self, rig: Rig) -> None:
        instance = await self.rent(rig)
        assert instance.state == InstanceState.RUNNING
        assert instance.meter is not False
        assert instance.place is not None
        assert instance.place.instance_id == instance.id
        assert instance.place.run_root.startswith("/")

    async def test_terminate_ends_the_instance_and_can_be_repeated(self, rig: Rig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        known(await rig.provider.terminate(instance.id))
        seen = known(await rig.provider.get(instance.id))
        assert seen is None or (seen.state == InstanceState.GONE and seen.meter is False and seen.place is None)
        assert known(await rig.provider.list()) == ()

    async def test_terminating_an_instance_leaves_the_other(self, rig: Rig) -> None:
        one, two = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        await self.down(rig, one.id)
        assert [i.id for i in known(await rig.provider.list())] == [two.id]

    async def test_stop_obeys_the_profile(self, rig: Rig) -> None:
        instance, verbs = await self.rent(rig), rig.provider.profile.verbs
        if verbs.stop is None:
            with pytest.raises(NotSupported):
                await rig.provider.stop(instance.id)
            return
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None
        assert seen.state == InstanceState.STOPPED
        assert seen.place is None
        if "stop" not in verbs.reversible:
            return
        known(await rig.provider.start(instance.id))
        await rig.settle()
        again = known(await rig.provider.get(instance.id))
        assert again is not None and again.state == InstanceState.RUNNING

    async def test_start_is_unsupported_where_stop_is_irreversible(self, rig: Rig) -> None:
        if "stop" in rig.provider.profile.verbs.reversible:
            return
        instance = await self.rent(rig)
        with pytest.raises(NotSupported):
            await rig.provider.start(instance.id)

    async def test_stop_and_start_refuse_a_missing_instance(self, rig: Rig) -> None:
        for verb in (rig.provider.stop, rig.provider.start):
            with pytest.raises((NotFound, NotSupported)):
                await verb("no-such-instance")

    async def test_terminate_obeys_the_profile(self, rig: Rig) -> None:
        if not rig.provider.profile.verbs.terminate_needs_stop:
            return
        instance = await self.rent(rig)
        with pytest.raises(Conflict):
            await rig.provider.terminate(instance.id)
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state == InstanceState.RUNNING

    # ------------------------------------------------------------------------------------------------ lease evidence

    @pytest.fixture
    def desk(self, rig: Rig) -> Iterator[Desk]:
        desk = Desk(rig, rig.resources.gpu)
        yield desk
        desk.ctx.ledger.close()

    @pytest.mark.attack("ending", "shows another account, where the machine does not exist")
    async def test_another_accounts_key_yields_unknown_and_sends_nothing(self, desk: Desk) -> None:
        lease, rig = await desk.rent(), desk.rig
        assert lease.state is Lease.METERING and lease.instance_id
        rig.use_account(1)
        assert known(await rig.provider.list()) == (), "to that account there is nothing"
        for answer in await desk.looks():
            assert isinstance(answer, Unknown) and "account" in answer.why
        bound = BoundProvider(desk.ctx, lease)
        acts = (bound.start, bound.stop, bound.terminate)
        for unknown in [await act(lease.instance_id) for act in acts] + [await bound.find(lease.id)]:
            assert isinstance(unknown, Unknown) and "account" in unknown.why
        await request_end(desk.ctx, lease.id, "terminate")
        assert desk.lease.state is Lease.UNVERIFIED and len(rig.rented()) == 1
        (row,) = [r for r in (await list_instances(desk.ctx)).rows if r.ours]
        assert row.billing is None and "account" in row.note
        rig.use_account(0)
        seen = known((await desk.looks())[-1])
        assert seen is not None and desk.lease.state is Lease.METERING
        assert lease.id not in desk.ctx.unseen

    @pytest.mark.attack("spending", "loses the answer of a create, then shows another account")
    async def test_a_create_with_a_lost_reply_stays_open_under_another_account(self, desk: Desk) -> None:
        rig = desk.rig
        rig.refuse(makes=True)
        rig.blind(now=True)
        assert (await desk.rent()).state is Lease.UNVERIFIED
        rig.blind(now=False)
        rig.use_account(1)
        for _ in range(3):
            await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
            await rig.clock.sleep(rig.provider.settle_s + 1)
        assert desk.lease.state is Lease.UNVERIFIED and "account" in desk.ctx.unseen[desk.lease_id]
        rig.use_account(0)
        await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
        assert desk.lease.instance_id and len(rig.rented()) == 1

    async def test_an_old_lease_is_bound_only_to_an_account_that_shows_it(self, desk: Desk) -> None:
        rig = desk.rig
        made = await self.rent(rig, desk.lease_id)
        subject, intent = f"lease/{desk.lease_id}", {"job": "j1", "platform": rig.platform, "generation": 1}
        desk.ctx.ledger.append(subject, "create.intent", intent, state=Lease.UNVERIFIED)
        body = {"instance": made.model_dump(mode="json")}
        desk.ctx.ledger.append(subject, "lease.created", body, state=Lease.METERING)
        rig.use_account(1)
        assert all(isinstance(answer, Unknown) for answer in await desk.looks())
        assert desk.lease.account is None and desk.lease.state is Lease.UNVERIFIED
        rig.use_account(0)
        assert known(await poll_lease(desk.ctx, desk.lease_id)) is not None
        assert desk.lease.account is not None and desk.lease.state is Lease.METERING
        rig.use_account(1)
        assert all(isinstance(answer, Unknown) for answer in await desk.looks())

    async def test_a_replaced_key_of_the_same_account_still_sees_the_instance(self, desk: Desk) -> None:
        await desk.rent()
        desk.rig.replace_key()
        assert all(known(answer) is not None for answer in await desk.looks())
        assert desk.lease.state is Lease.METERING

    async def test_a_replaced_key_proves_the_end_only_if_accounts_are_named(self, desk: Desk) -> None:
        lease = await desk.rent()
        assert lease.instance_id
        await self.down(desk.rig, lease.instance_id)
        desk.rig.replace_key()
        answers = await desk.looks()
        if desk.rig.names_account:
            assert known(answers[-1]) is None and desk.lease.state is Lease.STOPPED
        elif desk.lease.account == lease.account:  # the provider reported no bill for it
            assert all(isinstance(answer, Unknown) for answer in answers) and desk.lease.state is Lease.UNVERIFIED

    async def test_the_ledger_does_not_keep_the_key(self, desk: Desk) -> None:
        lease = await desk.rent()
        assert lease.account is not None and len(lease.account.key) == 32
        again = desk.rig.provider.key_digest("another-salt")
        assert lease.account.key == desk.rig.provider.key_digest(lease.account.salt) != again

    @pytest.mark.attack("ending", "answers 404 for a machine that its list shows")
    async def test_a_stray_404_never_ends_a_listed_instance(self, desk: Desk) -> None:
        lease, rig = await desk.rent(), desk.rig
        assert lease.instance_id
        rig.stray_404(lease.instance_id)
        for answer in await desk.looks():
            assert known(answer) is not None
        assert desk.lease.state is Lease.METERING

    async def test_gone_needs_lookup_and_list_to_agree_twice(self, desk: Desk) -> None:
        lease, rig = await desk.rent(), desk.rig
        assert lease.instance_id
        await self.down(rig, lease.instance_id)
        rig.blind(now=True)
        assert all(isinstance(answer, Unknown) for answer in await desk.looks())
        assert desk.lease.state is Lease.UNVERIFIED
        rig.blind(now=False)
        assert known(await poll_lease(desk.ctx, lease.id)) is None
        assert known(await poll_lease(desk.ctx, lease.id)) is None
        assert desk.lease.state in LIVE_LEASES, "two looks at one moment are one look"
        await rig.clock.sleep(rig.provider.settle_s + 1)
        assert known(await poll_lease(desk.ctx, lease.id)) is None
        assert desk.lease.state is Lease.STOPPED

    @pytest.mark.attack("spending", "refuses a create and rents the machine")
    @pytest.mark.parametrize("names", [False, True])
    async def test_an_instance_from_a_refused_create_is_found(self, desk: Desk, names: bool) -> None:
        desk.rig.lists_at_once()
        desk.rig.refuse(makes=True, names=names)
        await desk.rent()
        for _ in range(2):  # after an unreadable reply, the next call checks again
            if desk.lease.instance_id is None:
                await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
        assert desk.lease.state is Lease.METERING and desk.job is not Job.FAILED
        assert len(desk.rig.rented()) == 1 and desk.lease.instance_id

    @pytest.mark.attack("spending", "refuses a create, rents the machine and lists it late")
    async def test_an_instance_from_a_refused_create_is_found_when_listed_late(self, desk: Desk) -> None:
        desk.rig.refuse(makes=True)
        await desk.rent()
        assert len(desk.rig.rented()) == 1
        (row,) = (await list_instances(desk.ctx)).rows
        assert row.ours and desk.lease.instance_id and desk.lease.state is not Lease.NONE

    async def test_a_refused_create_that_made_nothing_fails_the_job_when_rechecked(self, desk: Desk) -> None:
        desk.rig.refuse(makes=False)
        assert (await desk.rent()).state is Lease.UNVERIFIED, "a list may be older than the refusal"
        job = read_job(desk.ctx.ledger, "j1")
        assert job.state is Job.PROVISIONING and job.reason is Code.REFUSAL_UNSETTLED and "refused" in job.why
        for _ in range(2):
            await desk.rig.clock.sleep(desk.rig.provider.settle_s + 1)
            if desk.job is Job.PROVISIONING:
                await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
        assert desk.lease.state is Lease.NONE and desk.job is Job.FAILED and desk.rig.rented() == []
        assert read_job(desk.ctx.ledger, "j1").reason is Code.REFUSED_RENT

    @pytest.mark.attack("spending", "refuses a create and can't be listed")
    async def test_a_refused_create_stays_open_until_the_list_can_be_read(self, desk: Desk) -> None:
        rig = desk.rig
        rig.refuse(makes=False)
        rig.blind(now=True)
        assert (await desk.rent()).state is Lease.UNVERIFIED
        assert desk.job is Job.PROVISIONING
        rig.blind(now=False)
        for _ in range(4):
            if desk.job is Job.PROVISIONING:
                await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
            await rig.clock.sleep(rig.provider.settle_s + 1)
        assert desk.lease.state is Lease.NONE and desk.job is Job.FAILED
        assert "refused" in read_job(desk.ctx.ledger, "j1").why
