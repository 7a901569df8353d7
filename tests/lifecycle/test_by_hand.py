"""Platforms that the user rents on: gpuwarden submits, prices and ends nothing there; their rules can be rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from gpuwarden.core.errors import NotSupported, Refused
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.profiles import load_profile, profile_names
from lifecycle_kit import open_house, training
from wording import Wording

pytestmark = pytest.mark.anyio
BY_HAND = [n for n in profile_names() if load_profile(n).by_hand]


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return open_house(tmp_path / "home", FakeClock())


@pytest.mark.parametrize("platform", BY_HAND)
async def test_a_job_for_a_manual_platform_is_refused_and_rents_nothing(
    ctx: Context, tmp_path: Path, platform: str, wording: Wording
) -> None:
    with pytest.raises(Refused) as caught:
        await submit(ctx, training(tmp_path / "said", platform=platform))
    [finding] = [f for f in caught.value.findings if f.rule == "PF-PLT-003"]
    wording(finding.message, platform)
    assert ctx.ledger.subjects("lease") == []


@pytest.mark.parametrize("platform", BY_HAND)
def test_a_manual_platform_has_no_provider(ctx: Context, platform: str) -> None:
    with pytest.raises(NotSupported, match=platform):
        ctx.provider(platform)


@pytest.mark.parametrize("platform", BY_HAND)
async def test_a_manual_platforms_rules_can_be_rehearsed(ctx: Context, tmp_path: Path, platform: str) -> None:
    spec = training(tmp_path / "said", platform=f"rehearsal/{platform}")
    assert (await submit(ctx, spec, dry_run=True)).receipt
    lost = spec.model_copy(update={"outputs": ("/opt/out",)})
    dies = "PF-OUT-002"
    try:
        findings = (await submit(ctx, lost, dry_run=True)).findings
    except Refused as refused:
        findings = refused.findings
    assert dies in [f.rule for f in findings]
