"""How SkyPilot's SDK is reached and its answers are read, without SkyPilot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, NoCapacity, NotFound, NotSupported, Unreachable
from gpuwarden.core.models import Resources
from gpuwarden.providers.sky import SkyProvider
from gpuwarden.remote.sky import client
from gpuwarden.remote.sky.client import SkyClient, sky_python
from gpuwarden.remote.sky.rows import Done, cluster_name, minutes, task, token_of
from lifecycle_kit import open_house

pytestmark = pytest.mark.anyio


def interpreter(folder: Path, answer: str) -> dict[str, str]:
    """Return an environment whose interpreter answers every question with one line."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\nwhile read question; do {answer}; done\n")
    file.chmod(0o755)
    return {"GPUWARDEN_SKY_PYTHON": str(file), "PATH": "/usr/bin:/bin"}


def test_the_interpreter_is_the_one_beside_the_program(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    for name in ("sky", "python"):
        (tmp_path / "venv" / name).write_text("#!/bin/sh\n")
        (tmp_path / "venv" / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sky").symlink_to(tmp_path / "venv/sky")
    assert sky_python({"PATH": str(tmp_path / "bin")}) == str(tmp_path / "venv/python")
    assert sky_python({"PATH": "", "GPUWARDEN_SKY_PYTHON": "/opt/python"}) == "/opt/python"
    with pytest.raises(NotSupported) as missing:
        sky_python({"PATH": str(tmp_path)})
    assert "uv tool install skypilot" in str(missing.value.next_steps)


@pytest.mark.parametrize(
    ("python", "error"), [(sys.executable, "No module named 'sky'"), ("/nowhere/python", "/nowhere/python")]
)
async def test_an_interpreter_without_skypilot_is_named(tmp_path: Path, python: str, error: str) -> None:
    with pytest.raises(NotSupported, match=error):
        await SkyClient({"GPUWARDEN_SKY_PYTHON": python, "HOME": str(tmp_path)}).ask(Done, "info")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("echo hello", BadReply),
        ("echo '[1, 2]'", BadReply),
        ("""echo '{"ok": true, "value": {"done": "perhaps"}}'""", BadReply),
        ("""echo '{"ok": true, "value": {"done": true, "more": 1}}'""", BadReply),
        ("""echo '{"ok": false}'""", BadReply),
        ("exit 3", Unreachable),
        ("sleep 2", Unreachable),
        *(
            (f"""echo '{{"ok": false, "error": ["{name}", "Exception"], "message": "said"}}'""", kind)
            for name, kind in {
                "ClusterDoesNotExist": NotFound, "ResourcesUnavailableError": NoCapacity, "BadTask": BadRequest,
                "NoCloudAccessError": AuthFailed, "ApiServerConnectionError": Unreachable, "ValueError": BadReply,
            }.items()
        ),
    ],
)  # fmt: skip
async def test_what_is_no_answer_is_never_read_as_one(tmp_path: Path, answer: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await SkyClient(interpreter(tmp_path, answer)).ask(Done, "act", timeout_s=0.5 if "sleep" in answer else 30)


async def test_a_process_that_ended_is_started_again(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    answer = f"""[ -e {flag} ] || {{ touch {flag}; exit 1; }}; echo '{{"ok": true, "value": {{"done": true}}}}'"""
    sky = SkyClient(interpreter(tmp_path, answer))
    with pytest.raises(Unreachable):
        await sky.ask(Done, "act")
    assert (await sky.ask(Done, "act")).done and (await sky.ask(Done, "act")).done


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End the processes of a test with it."""
    yield
    while client._HELPERS:
        helper = client._HELPERS.popitem()[1]
        if helper.process.returncode is None:
            helper.end()


@pytest.mark.parametrize("token", ["", "a b", "a_b", "../x", "ü", "x" * 70, "end-"])
def test_a_token_that_no_cluster_can_have_is_refused(token: str) -> None:
    with pytest.raises(BadRequest):
        cluster_name(token)


def test_a_name_that_leads_elsewhere_has_no_token() -> None:
    assert token_of("gw-j1-i1") == "j1-i1"
    odd = (
        "gw-",
        "gw-..",
        "gw-../../x",
        "gw-a/b",
        "gw-a\0",
        "gw-a\n",
        "j1",
        "gw--",
        f"gw-{'x' * 70}",
        "sky-jobs-controller-1",
    )
    assert not any(map(token_of, odd))


@pytest.mark.parametrize(
    ("given", "resources"),
    [
        ({}, {"infra": "aws"}),
        ({"gpu": "A100", "gpu_count": 2, "disk_gb": 9}, {"accelerators": {"A100": 2}, "disk_size": 9, "infra": "aws"}),
        ({"interruptible": True, "options": {"region": "eu"}}, {"infra": "aws/eu", "use_spot": True}),
        ({"options": {"zone": "eu-a", "cpus": "4+"}}, {"infra": "aws/*/eu-a", "cpus": "4+"}),
    ],
)
def test_a_request_is_a_task_that_runs_nothing(given: dict[str, Any], resources: dict[str, Any]) -> None:
    assert task("aws", Resources.model_validate(given)) == {"name": "gpuwarden", "resources": resources}


def test_the_switch_is_never_earlier_than_the_deadline() -> None:
    assert [minutes(s) for s in (1, 60, 61, 7_200, None)] == [1, 1, 2, 120, 60]


def test_one_infrastructure_of_many_is_rented_under_its_own_name(tmp_path: Path) -> None:
    ctx = open_house(tmp_path, SystemClock())
    ctx.env = {"SKYPILOT_SERVICE_ACCOUNT_TOKEN": "sky_" + "t" * 20}
    provider = ctx.provider("sky/aws")
    assert isinstance(provider, SkyProvider) and (provider.infra, provider.profile.id) == ("aws", "sky/aws")
    assert "sky" not in ctx.configured(), "nobody named an infrastructure"
