"""Fan-outs through MCP and the terminal: the same tools and commands, states and next steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client

from gpuwarden.core.guidance import Action, do
from gpuwarden.interfaces.cli.wording import command
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from lifecycle_kit import PLATFORM, clock_of_today, moves_on, open_house, promises, records, rent_cloud
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio

SCRIPT = """
import json, os, sys
os.makedirs("out")
values = dict(word[2:].split("=") for word in sys.argv[1:])
with open("out/result.json", "w") as file:
    json.dump({"objective": {"name": "loss", "value": float(values["lr"]) + int(values["seed"])}}, file)
sys.exit(3 if values["lr"] == "9" else 0)
"""
CALL: dict[str, Any] = {
    "platform": PLATFORM,
    "script": SCRIPT,
    "outputs": ["out"],
    "timeout_s": 60,
    "max_cost_usd": 20.0,
    "grid": {"lr": ["1", "2"]},
    "seeds": 2,
    "max_machines": 2,
}


@pytest.fixture(autouse=True)
def _without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    body = (await client.call_tool(tool, arguments)).structured_content
    assert body is not None
    return body


@pytest.mark.slow
async def test_an_agent_fans_out_with_the_single_job_tools(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today(), actor="mcp")
    cloud = rent_cloud(ctx)
    async with Client(make_server(ctx)) as client:
        asked = await _call(client, "submit_job", **CALL)
        assert asked["code"] == "checked" and asked["fan_out"]["cells"] == 4 and records(cloud) == []
        assert asked["next"][0]["parameters"] == {"receipt": asked["receipt"]} and asked["receipt"] in asked["hint"]
        other = await _call(client, "submit_job", **{**CALL, "seeds": 3}, receipt=asked["receipt"])
        assert other["code"] == "conflict" and records(cloud) == []
        seen = await _call(client, "submit_job", **CALL, receipt=asked["receipt"])
        assert seen["fan_out"]["states"] == {"running": 4} and len(seen["fan_out"]["jobs"]) == 2
        step = seen["next"][0]
        assert (step["action"], step["parameters"]) == ("check", {"job_id": seen["job_id"]})
        paused = await _call(client, "cancel_job", job_id=seen["job_id"], action="pause")
        assert paused["code"] == "not_supported"

        async def next_look() -> dict[str, Any]:
            moves_on(cloud, 1)
            return await _call(client, "check_job", job_id=seen["job_id"])

        seen = await soon(next_look, every=0.1, good=lambda now: now["state"] != "running")
        assert seen["code"] == "complete" and seen["fan_out"]["states"] == {"verified": 4}
        assert [row["mean"] for row in seen["fan_out"]["table"]] == [1.5, 2.5]
        assert "teardown" in [step["action"] for step in seen["next"]], seen["hint"]  # its machines are billed
    assert promises(ctx.ledger, cloud) == []


async def test_an_invalid_fan_out_is_refused_before_a_receipt_is_issued(tmp_path: Path, wording: Wording) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today(), actor="mcp")
    cloud = rent_cloud(ctx)
    async with Client(make_server(ctx)) as client:
        for change in (
            {"grid": {"lr": ["1", "1"]}},
            {"grid": {"seed": ["1"]}},
            {"grid": {"lr": []}},
            {"grid": {"lr": [str(n) for n in range(600)]}},
            {"script": None, "command": ["true"]},
        ):
            body = await _call(client, "submit_job", **{**CALL, **change})
            assert body["code"] == "bad_request", body
            wording(body["message"])
        body = await _call(client, "submit_job", **{**CALL, "grid": {"l r": ["1"]}})
        assert body["code"] == "bad_request" and "pattern" in body["message"], "that is Pydantic's"
        serverless = await _call(client, "submit_job", **{**CALL, "platform": "hf-jobs"})
        assert serverless["code"] == "not_supported"
        wording(serverless["message"])
        gone = await _call(client, "check_job", job_id="f0123456789")
        assert gone["code"] == "not_found"
    assert ctx.ledger.events(kind="receipt.issued") == [] and records(cloud) == []


def test_the_terminal_names_the_fan_out_command() -> None:
    assert command(do(Action.CHECK, job_id="f0123456789")) == "gpuwarden fan-out f0123456789"
    assert command(do(Action.RESUME, job_id="f0123456789")) == "gpuwarden fan-out --resume f0123456789"
    assert command(do(Action.CHECK, job_id="j0123456789")) == "gpuwarden check j0123456789"
