"""Submit a script by its path over MCP, and launch with the receipt alone: the text is sent once or never."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cli_kit import OPTIONS, Cli
from doors import JOB, PLATFORM, TRAIN, quick_warden
from gpuwarden.ledger.events import JobAccepted, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from talk_kit import talking
from wording import Wording

pytestmark = pytest.mark.anyio
BY_PATH: dict[str, Any] = {**JOB, "script": "train.py"}


@pytest.fixture(name="ctx")
def w_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    return quick_warden(tmp_path / "home")


@pytest.mark.slow
async def test_script_given_by_path_is_launched_by_its_receipt_alone(ctx: Context) -> None:
    async with talking(ctx) as talk:
        checked = await talk.call("submit_job", **BY_PATH)
        assert checked["code"] == "checked"
        assert f"submit_job with receipt={checked['receipt']}" in checked["hint"]
        issued = ctx.ledger.last(f"receipt/{checked['receipt']}", ReceiptIssued)
        assert (
            issued and issued.data.script_file == "train.py" and issued.data.spec and issued.data.spec.script == TRAIN
        )
        taken = await talk.call("submit_job", receipt=checked["receipt"])
        assert taken["code"] == "accepted" and taken["job_id"]
        accepted = ctx.ledger.last(f"job/{taken['job_id']}", JobAccepted)
        assert accepted and accepted.data.spec.script == TRAIN and accepted.data.receipt == checked["receipt"]
        Path("train.py").unlink()  # if the reply is lost and the file is removed, a retry finds the same job
        again = await talk.call("submit_job", receipt=checked["receipt"])
        assert again["job_id"] == taken["job_id"] and again["adopted"]


@pytest.mark.slow
async def test_the_text_and_the_path_are_the_same_job(ctx: Context) -> None:
    async with talking(ctx) as talk:
        receipt = (await talk.call("submit_job", **BY_PATH))["receipt"]
        assert (await talk.call("submit_job", **JOB, receipt=receipt))["code"] == "accepted"


def outside_link() -> str:
    os.symlink("/etc/hostname", "link")
    return "link"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda: Path("train.py").write_text(TRAIN + "#\n"), id="changed"),
        pytest.param(lambda: Path("train.py").unlink(), id="gone"),
        pytest.param(lambda: os.replace(outside_link(), "train.py"), id="a link"),
    ],
)
async def test_launch_by_receipt_refuses_a_changed_or_missing_file(ctx: Context, change: Any, wording: Wording) -> None:
    async with talking(ctx) as talk:
        receipt = (await talk.call("submit_job", **BY_PATH))["receipt"]
        change()
        refused = await talk.error("submit_job", receipt=receipt)
    assert refused["code"] == "conflict"
    wording(refused["message"], "train.py")
    assert not ctx.ledger.events(kind="job.accepted")


@pytest.mark.slow
async def test_arguments_that_contradict_the_receipt_are_refused(ctx: Context) -> None:
    async with talking(ctx) as talk:
        receipt = (await talk.call("submit_job", **JOB))["receipt"]
        for more in ({"timeout_s": 601}, {"args": ["--lr", "1"]}, {"platform": "rehearsal/runpod"}, {"gpu_count": 2}):
            assert (await talk.error("submit_job", receipt=receipt, **more))["code"] == "conflict", more
        same = {name: value for name, value in JOB.items() if name != "script"}
        assert (await talk.call("submit_job", receipt=receipt, **same))["code"] == "accepted"


async def test_unknown_or_unlaunchable_receipt_is_refused(ctx: Context, wording: Wording) -> None:
    old = ReceiptIssued(spec_digest="", facts_digest="", expires_at=1e10)
    ctx.ledger.add("receipt/r0", old)
    async with talking(ctx) as talk:
        assert (await talk.error("submit_job", receipt="r1"))["code"] == "not_found"
        wording((await talk.error("submit_job", receipt="r0"))["message"])
        assert (await talk.error("submit_job", script=TRAIN))["code"] == "bad_request"
        assert (await talk.error("submit_job"))["code"] == "bad_request"


@pytest.mark.attack("boundary", "names a script outside of the working directory")
@pytest.mark.parametrize(
    "name",
    [
        "../out.py",
        "/etc/hosts.py",
        "link.py",
        "linked/out.py",
        ".hidden.py",
        "none.py",
        "folder.py",
        "pipe.py",
        "a\0.py",
    ],
)
async def test_script_outside_the_working_directory_is_refused(ctx: Context, tmp_path: Path, name: str) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "out.py").write_text("SECRET = 1\n")
    (tmp_path.parent / "out.py").write_text("SECRET = 1\n")
    Path("link.py").symlink_to(outside / "out.py")
    Path("linked").symlink_to(outside)
    Path(".hidden.py").write_text("SECRET = 1\n")
    Path("folder.py").mkdir()
    os.mkfifo("pipe.py")
    async with talking(ctx) as talk:
        refused = await talk.error("submit_job", **{**JOB, "script": name})
    assert refused["code"] == "bad_request" and "SECRET" not in str(refused)


async def test_a_link_inside_of_the_working_directory_is_followed(ctx: Context) -> None:
    Path("latest.py").symlink_to("train.py")
    async with talking(ctx) as talk:
        assert (await talk.call("submit_job", **{**JOB, "script": "latest.py"}))["code"] == "checked"


@pytest.mark.slow
async def test_a_fan_out_is_launched_by_its_receipt_alone(ctx: Context) -> None:
    plan = {**BY_PATH, "grid": {"lr": ["1", "2"]}, "max_cost_usd": 20}
    async with talking(ctx) as talk:
        checked = await talk.call("submit_job", **plan)
        assert f"receipt={checked['receipt']}" in checked["hint"]
        taken = await talk.call("submit_job", receipt=checked["receipt"])
        assert taken["job_id"].startswith("f") and taken["fan_out"]["cells"] == 2


@pytest.mark.slow
def test_receipt_alone_launches_from_the_command_line(ctx: Context, run: Cli) -> None:
    checked = run("submit", *OPTIONS, "train.py", "--lr", "2e-5")[1]
    assert f"gpuwarden submit --receipt {checked['receipt']}" in checked["hint"]
    assert run("submit", "--receipt", checked["receipt"], "--dry-run")[1]["code"] == "bad_request"
    assert run("submit", "--receipt", checked["receipt"], "--gpu", "H100")[1]["code"] == "conflict"
    taken = run("submit", "--receipt", checked["receipt"])[1]
    accepted = ctx.ledger.last(f"job/{taken['job_id']}", JobAccepted)
    assert taken["code"] == "accepted" and accepted and accepted.data.spec.args == ("--lr", "2e-5")
    assert "--platform" in run("submit", "train.py")[1]["message"]
    assert "WHAT" in run("submit", "--platform", PLATFORM)[1]["message"]
