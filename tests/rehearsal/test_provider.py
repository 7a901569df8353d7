"""The rehearsal keeps the providers' contract, whichever platform it simulates."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract_provider import ProviderContract, Rig, known
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import InstanceState, Known, Resources, Unknown
from gpuwarden.profiles import load_profile
from gpuwarden.providers.base import Provider, load_provider
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import SOURCE, Cloud
from gpuwarden.rehearsal.model import Fault, Faults
from rehearsal_kit import RENTED, HandClock


@dataclass
class PretendRig(Rig):
    """A pretend cloud, and a second one for the other account."""

    cloud: Cloud

    def use_account(self, which: int) -> None:
        assert isinstance(self.provider, RehearsalProvider)
        other = Cloud(self.folder / "other", self.cloud.profile, self.clock, supervise=False)
        self.provider.cloud = (self.cloud, other)[which]

    def replace_key(self) -> None:
        state = self.cloud.store.state()  # its nonce stands for the key
        state.nonce = "another"
        self.cloud.store.save(state)

    def stray_404(self, ident: str) -> None:
        self.cloud.get = lambda id: Known(None)  # type: ignore[method-assign]

    def refuse(self, *, makes: bool, names: bool = False) -> None:
        kind = "false_refusal" if makes else "no_capacity"
        self.cloud.configure(faults=Faults(faults=(Fault(kind=kind, call="create"),)))  # type: ignore[arg-type]

    def blind(self, *, now: bool) -> None:
        for name in ("list", "find"):
            if now:
                setattr(self.cloud, name, lambda *_: Unknown("no list"))
            else:
                vars(self.cloud).pop(name, None)

    def rented(self) -> list[str]:
        return [i for i, truth in self.cloud.truths().items() if truth.state is not InstanceState.GONE]


@pytest.fixture(params=RENTED)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    clock = HandClock()

    async def settle() -> None:
        await clock.sleep(60)

    provider = load_provider("rehearsal", load_profile(request.param), tmp_path, clock)
    assert isinstance(provider, RehearsalProvider)
    return PretendRig(
        provider, settle, clock, tmp_path, f"rehearsal/{request.param}", provider.cloud, names_account=False
    )


class TestRehearsal(ProviderContract):
    async def test_the_price_is_labelled_as_simulated(self, rig: Rig) -> None:
        quote = known(await rig.provider.quote(Resources(gpu="h100", gpu_count=2)))
        assert quote.source == SOURCE and "simulated" in SOURCE
        assert quote.price_usd_per_hour == pytest.approx(5.6)
        assert quote.platform == f"rehearsal/{rig.provider.profile.id}"

    async def test_create_is_not_idempotent_like_real_clouds(self, rig: Rig) -> None:
        await rig.provider.create(rig.resources, "same")
        await rig.provider.create(rig.resources, "same")
        assert len(known(await rig.provider.find("same"))) == 2

    async def test_a_price_above_the_maximum_raises_no_capacity(self, rig: Rig) -> None:
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
