"""What every provider must do, inherited by each provider's test.

The test supplies a fixture `rig`: a `Rig` with the provider and a way to let its world settle, on a passed-in clock or
against a fake service. It may override `resources`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from gpuwarden.core.errors import Conflict, NotFound, NotSupported
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Resources
from gpuwarden.providers.base import Provider

T = TypeVar("T")
UP = {InstanceState.BOOTING, InstanceState.RUNNING}


@dataclass
class Rig:
    """A provider and `settle`, which returns once everything that was asked for has happened."""

    provider: Provider
    settle: Callable[[], Awaitable[None]]


def known(answer: Answer[T]) -> T:
    assert isinstance(answer, Known), answer
    return answer.value


class ProviderContract:
    """Inherit, supply `rig`."""

    pytestmark = pytest.mark.anyio
    resources = Resources(gpu="H100")

    async def rent(self, rig: Rig, token: str = "token-1") -> Instance:
        made = known(await rig.provider.create(self.resources, token))
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

    async def test_a_new_account_has_nothing(self, rig: Rig) -> None:
        assert known(await rig.provider.list()) == ()
        assert known(await rig.provider.find("token-1")) == ()
        assert known(await rig.provider.get("no-such-instance")) is None
        assert await rig.provider.check() == []

    async def test_a_quote_names_its_source(self, rig: Rig) -> None:
        quote = known(await rig.provider.quote(self.resources))
        assert quote.source
        assert quote.price_usd_per_hour is None or quote.price_usd_per_hour >= 0

    async def test_create_returns_at_once_and_carries_the_token(self, rig: Rig) -> None:
        made = known(await rig.provider.create(self.resources, "token-1"))
        assert made.state in UP
        assert made.token == "token-1"
        assert made.meter is not False
        await rig.settle()
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [made.id]
        assert known(await rig.provider.find("token-2")) == ()
        assert [i.id for i in known(await rig.provider.list())] == [made.id]

    async def test_a_running_instance_has_a_place_and_a_meter(self, rig: Rig) -> None:
        instance = await self.rent(rig)
        assert instance.state == InstanceState.RUNNING
        assert instance.meter is not False
        assert instance.place is not None
        assert instance.place.instance_id == instance.id
        assert instance.place.run_root.startswith("/")

    async def test_terminate_ends_it_and_says_so_again(self, rig: Rig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        known(await rig.provider.terminate(instance.id))
        seen = known(await rig.provider.get(instance.id))
        assert seen is None or (seen.state == InstanceState.GONE and seen.meter is False and seen.place is None)
        assert known(await rig.provider.list()) == ()

    async def test_terminating_one_leaves_the_other(self, rig: Rig) -> None:
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

    async def test_start_needs_a_platform_that_can(self, rig: Rig) -> None:
        if "stop" in rig.provider.profile.verbs.reversible:
            return
        instance = await self.rent(rig)
        with pytest.raises(NotSupported):
            await rig.provider.start(instance.id)

    async def test_stop_and_start_of_what_is_not_there_are_refused(self, rig: Rig) -> None:
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
