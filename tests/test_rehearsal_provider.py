"""The rehearsal keeps the providers' contract, whatever platform it plays."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from contract_provider import ProviderContract, Rig, known
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Resources
from gpuwarden.profiles import load_profile
from gpuwarden.providers.base import Provider, load_provider
from gpuwarden.rehearsal.cloud import SOURCE
from rehearsal_kit import RENTED, HandClock


@pytest.fixture(params=RENTED)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    clock = HandClock()

    async def settle() -> None:
        await clock.sleep(60)

    return Rig(load_provider("rehearsal", load_profile(request.param), tmp_path, clock), settle)


class TestRehearsal(ProviderContract):
    async def test_the_price_is_labelled_as_pretend(self, rig: Rig) -> None:
        quote = known(await rig.provider.quote(Resources(gpu="h100", gpu_count=2)))
        assert quote.source == SOURCE and "pretend" in SOURCE
        assert quote.price_usd_per_hour == pytest.approx(5.6)
        assert quote.platform == f"rehearsal/{rig.provider.profile.id}"

    async def test_create_is_not_idempotent_like_real_clouds(self, rig: Rig) -> None:
        await rig.provider.create(self.resources, "same")
        await rig.provider.create(self.resources, "same")
        assert len(known(await rig.provider.find("same"))) == 2

    async def test_too_dear_is_a_definite_no(self, rig: Rig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=0.5), "token")
        assert known(await rig.provider.list()) == ()

    async def test_a_gone_instance_still_has_its_bill(self, rig: Rig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        gone = known(await rig.provider.get(instance.id))
        assert gone is not None and gone.cost_usd is not None and gone.cost_usd > 0


def test_provider_has_every_method_of_the_protocol(tmp_path: Path) -> None:
    made = load_provider("rehearsal", load_profile("vastai"), tmp_path, SystemClock())
    for name, method in inspect.getmembers(Provider, inspect.isfunction):
        if not name.startswith("_"):
            assert (
                inspect.signature(getattr(type(made), name)).parameters.keys()
                == inspect.signature(method).parameters.keys()
            )
