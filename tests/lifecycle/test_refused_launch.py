"""A repeated launch that is refused: the earlier call may have started the job, so a refusal does not end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeClock
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, NotFound, RateLimited, Unreachable, WardenError
from gpuwarden.core.models import Unknown
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import check
from lifecycle_kit import PLATFORM, clock_of_today, launch, moves_on, open_house, over, rent_cloud, training
from waiting import soon

pytestmark = pytest.mark.anyio


class Played:
    """A backend whose `submit` calls end as given in `ends`. Of these, only the first `after` calls take effect."""

    def __init__(
        self, ctx: Context, patch: pytest.MonkeyPatch, *ends: WardenError, after: int = 1, platform: str = PLATFORM
    ) -> None:
        self.backend = ctx.backend(ctx.profile(platform).backend)
        self.plain: Callable[..., Any] = self.backend.submit
        self.ends, self.after, self.calls = ends, after, 0
        patch.setattr(self.backend, "submit", self.submit)

    async def submit(self, *given: Any, **more: Any) -> Any:
        self.calls += 1
        end = self.ends[self.calls - 1] if self.calls <= len(self.ends) else None
        if end is not None and self.calls > self.after:
            raise end
        handle = await self.plain(*given, **more)
        if end is not None:
            raise end
        return handle


@pytest.fixture
def house(tmp_path: Path) -> Any:
    clock: FakeClock = clock_of_today()
    ctx = open_house(tmp_path / "home", clock)
    cloud = rent_cloud(ctx)
    yield ctx, cloud, tmp_path / "said"
    ctx.ledger.close()


async def ends(ctx: Context, cloud: Any, job: str) -> Any:
    async def look() -> Any:
        moves_on(cloud, 5)
        return await check(ctx, job)

    return await soon(look, every=0.1, good=over)


@pytest.mark.parametrize("refusal", [AuthFailed, RateLimited, Conflict, BadRequest, NotFound])
async def test_a_refused_repeat_does_not_lose_the_job(
    house: Any, monkeypatch: pytest.MonkeyPatch, refusal: type[WardenError]
) -> None:
    ctx, cloud, said = house
    Played(ctx, monkeypatch, Unreachable("the reply was lost"), refusal("not this time"))
    job = await launch(ctx, training(said))
    seen = await ends(ctx, cloud, job)
    assert (seen.job.state, seen.job.reason) == (Job.SUCCEEDED, Code.EXITED)
    assert len(said.read_text().splitlines()) == 1, "it was started once"


async def test_a_job_that_a_refused_call_started_is_kept(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, cloud, said = house
    Played(ctx, monkeypatch, AuthFailed("the job is there, its secret is not allowed"))
    job = await launch(ctx, training(said))
    assert (await ends(ctx, cloud, job)).job.state is Job.SUCCEEDED


async def test_a_refused_repeat_fails_the_job_only_if_it_is_known_absent(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, cloud, said = house
    played = Played(ctx, monkeypatch, *[Unreachable("lost"), *[AuthFailed("no")] * 99], after=0, platform="local")
    real, silent = played.backend.find, [3]

    async def find(place: Any, token: str) -> Any:
        silent[0] -= 1
        return Unknown("no answer") if silent[0] >= 0 else await real(place, token)

    monkeypatch.setattr(played.backend, "find", find)
    job = await launch(ctx, training(said, platform="local", max_cost_usd=None))
    seen = await ends(ctx, cloud, job)
    assert (seen.job.state, seen.job.reason) == (Job.FAILED, Code.REFUSED_LAUNCH)
    assert played.calls >= 4 and not said.exists(), "as long as no answer came, it was no end"
