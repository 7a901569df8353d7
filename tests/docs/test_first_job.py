"""The policy in "Your first real job" allows the page's jobs, and its first command passes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from cli_kit import Cli
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Policy
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import over_caps
from paths import ROOT

PAGE = (ROOT / "docs/first-job.md").read_text("utf-8")
POLICY = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]
COMMANDS = [
    shlex.split(line.replace("\\\n", " "), comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
PLATFORMS = {words[words.index("--platform") + 1] for words in COMMANDS if "--platform" in words}


def test_each_platform_on_the_page_is_allowed_by_its_policy() -> None:
    policy = Policy.model_validate(tomllib.loads(POLICY))
    assert len(PLATFORMS) == 4 and all(policy.allows(platform) for platform in PLATFORMS)


@pytest.mark.parametrize("platform", ["hf-jobs", "runpod"])
def test_a_job_within_the_caps_of_the_page_needs_no_approval(ctx: Context, home: Path, platform: str) -> None:
    (home.parent / "policy.toml").write_text(POLICY)
    spec = build(JobSpec, {"platform": platform, "command": ["true"], "timeout_s": 3_600})
    assert over_caps(ctx, spec, 1.99, "") == ""
    assert "per_job_usd" in over_caps(ctx, spec, 2.01, "")


def test_the_first_command_passes(run: Cli, train: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.parent / "policy.toml").write_text(POLICY)
    monkeypatch.chdir(train.parent)
    code, reply = run(*COMMANDS[0][1:])
    assert (code, reply["code"]) == (0, "checked"), reply
