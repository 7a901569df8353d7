"""A job's machine options: the image and region on rented platforms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, Emulator
from clouds.platform import Platform
from clouds_house import PLATFORMS
from clouds_kit import Web
from gpuwarden.core.errors import BadRequest, NoCapacity
from gpuwarden.core.models import JobSpec, Known, Resources
from gpuwarden.interfaces.cli.main import run
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.provisioning import wanted
from gpuwarden.lifecycle.submission.submit import settled
from lifecycle_kit import clock_of_today, open_house
from wording import Wording

pytestmark = pytest.mark.anyio
BY_NAME = {platform.name: platform for platform in PLATFORMS}


class Desk:
    """A platform's account, and the provider that uses it."""

    def __init__(self, ctx: Context, platform: Platform, account: Emulator) -> None:
        self.ctx, self.platform, self.account = ctx, platform, account
        self.provider = ctx.provider(platform.name)

    def resources(self, **options: Any) -> Resources:
        return Resources(gpu=self.platform.gpu, options=options)

    async def ordered(self, **options: Any) -> dict[str, Any]:
        """Rent with these options, and return the body of the order."""
        made = await self.provider.create(self.resources(**options), "token-1")
        assert isinstance(made, Known), made
        bodies = [request.body for request in self.account.requests if isinstance(request.body, dict)]
        return next(body for body in reversed(bodies) if "token-1" in str(body))


@pytest.fixture
def desk(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Desk]:
    platform, clock = BY_NAME[request.param], clock_of_today()
    account = platform.account(tmp_path / "cloud", clock)
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIN0000000000000000000000000000000000000000TEST me")
    for name, value in {
        platform.provider.api.key_variable: KEY, platform.provider.api.url_variable: web.add(account),
        "GPUWARDEN_SSH_PUBLIC_KEY": str(key), **dict(platform.env),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    ctx = open_house(tmp_path / "house", clock)
    yield Desk(ctx, platform, account)
    ctx.ledger.close()


@pytest.mark.parametrize("desk", ["runpod"], indirect=True)
async def test_runpod_gets_image_and_data_center(desk: Desk) -> None:
    order = await desk.ordered(image="me/train:1", region="EU-RO-1")
    assert (order["image"], order["dataCenterIds"]) == ("me/train:1", ["EU-RO-1"])


@pytest.mark.parametrize("desk", ["vastai"], indirect=True)
async def test_vast_gets_image_and_country(desk: Desk) -> None:
    order = await desk.ordered(image="me/train:1", region="se")
    assert order["image"] == "me/train:1"
    search = next(a.body for a in desk.account.requests if isinstance(a.body, dict) and "num_gpus" in a.body)
    assert search["geolocation"] == {"in": ["SE"]}
    with pytest.raises(NoCapacity):
        await desk.provider.quote(desk.resources(region="JP"))


@pytest.mark.parametrize("desk", ["lambda"], indirect=True)
async def test_lambda_launches_in_the_region_or_not_at_all(desk: Desk) -> None:
    order = await desk.ordered(region="us-west-1")
    assert order["region_name"] == "us-west-1"
    with pytest.raises(NoCapacity, match="mars-1"):
        await desk.provider.quote(desk.resources(region="mars-1"))


@pytest.mark.parametrize("desk", ["prime-intellect"], indirect=True)
async def test_prime_quotes_only_offers_with_the_region_and_image(desk: Desk) -> None:
    for wish in ({"region": "nowhere"}, {"image": "me/not-there"}):
        with pytest.raises(NoCapacity):
            await desk.provider.quote(desk.resources(**wish))


@pytest.mark.parametrize("desk", ["runpod"], indirect=True)
@pytest.mark.parametrize("options", [{"flavor": "x"}, {"image": 7}, {"image": "-v /:/host"}, {"region": ""}])
async def test_an_invalid_wish_is_refused(desk: Desk, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        settled(desk.ctx, JobSpec(platform="runpod", command=("true",), options=options))


@pytest.mark.parametrize("desk", ["lambda"], indirect=True)
async def test_a_platform_without_images_names_its_options(desk: Desk, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        settled(desk.ctx, JobSpec(platform="lambda", command=("true",), options={"image": "x"}))
    wording(refused, "lambda", "region", "image")


@pytest.mark.parametrize("desk", ["runpod"], indirect=True)
async def test_a_job_with_wishes_can_be_rehearsed(desk: Desk) -> None:
    spec = JobSpec(platform="rehearsal/runpod", command=("true",), options={"image": "me/x", "region": "EU"})
    assert wanted(settled(desk.ctx, spec)).options == {"image": "me/x", "region": "EU"}


def test_a_conflicting_flag_and_option_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--platform", "local", "--image", "a", "--option", "image=b", "--json", "--", "true"]
    assert run(words) != 0
    assert "differ" in capsys.readouterr().out
