"""Reaching SkyPilot's SDK and reading its answers, tested without SkyPilot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.backends.sky_jobs import SkyJobsBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, NoCapacity, NotFound, NotSupported, Unreachable
from gpuwarden.core.models import Handle, Place, Resources
from gpuwarden.providers.sky import SkyProvider
from gpuwarden.remote.sky import client, sdk_helper
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


def test_the_interpreter_next_to_the_sky_program_is_used(tmp_path: Path) -> None:
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
async def test_a_failed_or_malformed_answer_raises(tmp_path: Path, answer: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await SkyClient(interpreter(tmp_path, answer)).ask(Done, "act", timeout_s=0.5 if "sleep" in answer else 30)


async def test_an_ended_process_is_restarted(tmp_path: Path) -> None:
    flag = tmp_path / "once"
    answer = f"""[ -e {flag} ] || {{ touch {flag}; exit 1; }}; echo '{{"ok": true, "value": {{"done": true}}}}'"""
    sky = SkyClient(interpreter(tmp_path, answer))
    with pytest.raises(Unreachable):
        await sky.ask(Done, "act")
    assert (await sky.ask(Done, "act")).done and (await sky.ask(Done, "act")).done


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End a test's processes when the test ends."""
    yield
    while client._HELPERS:
        helper = client._HELPERS.popitem()[1]
        if helper.process.returncode is None:
            helper.end()


@pytest.mark.parametrize("most", [100, 1 << 20])
async def test_a_long_log_keeps_its_end_and_cursors_count_from_the_start(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    lines = [f"step {n}\n" for n in range(100)]
    pieces = [
        "SkyPilot's own line\n",
        *(f"\x1b[36m(train, pid=7)\x1b[0m {line}" for line in lines),
        None,
        "after the end",
    ]
    monkeypatch.setattr(sdk_helper, "MAX_LOG", most)
    for name in ("sdk", "jobs_sdk"):
        monkeypatch.setattr(sdk_helper, name, SimpleNamespace(tail_logs=lambda *_, **__: iter(pieces)), raising=False)
    row: dict[str, Any] = {"id": 1, "name": "gw-t-a1", "status": "RUNNING", "recoveries": 0}
    row |= dict.fromkeys(("schedule", "cloud", "where", "resources", "why", "cluster"), "")
    row |= dict.fromkeys(("submitted_at", "started_at", "ended_at"))

    class Played(SkyClient):
        async def ask(self, shape: Any, ask: str, **given: Any) -> Any:
            return shape.model_validate(getattr(sdk_helper, ask)(**given) if ask != "managed" else {"rows": [row]})

    place = Place(platform="sky-jobs/aws", run_root="/managed")
    handle = Handle(backend="sky_jobs", token="t", run_dir="/managed/gw-t", place=place)
    read, whole = partial(SkyJobsBackend(SystemClock(), Played()).logs, handle), "".join(lines)
    end = await read(-30)
    assert (end.text, end.next, end.size) == (whole[-30:], len(whole), len(whole))
    assert ((await read(0)).text == whole) is (most > 100)
    assert whole.endswith((await read(0)).text) and (await read(len(whole) - 8)).text == "step 99\n"
    assert (await read(end.next)).text == ""
    log = sdk_helper.logs("c", 1)
    assert log["text"].endswith("step 99\n") and len(log["text"]) + log["missing"] == sum(
        len(sdk_helper.plain(piece)) for piece in pieces[:-2]
    )


@pytest.mark.parametrize("token", ["", "a b", "a_b", "../x", "ü", "x" * 70, "end-"])
def test_a_token_unfit_for_a_cluster_name_is_refused(token: str) -> None:
    with pytest.raises(BadRequest):
        cluster_name(token)


def test_a_foreign_or_unsafe_name_has_no_token() -> None:
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
def test_resources_become_a_task_that_runs_nothing(given: dict[str, Any], resources: dict[str, Any]) -> None:
    assert task("aws", Resources.model_validate(given)) == {"name": "gpuwarden", "resources": resources}


def test_autostop_never_comes_before_the_deadline() -> None:
    assert [minutes(s) for s in (1, 60, 61, 7_200, None)] == [1, 1, 2, 120, 60]


def test_each_sky_infrastructure_has_its_own_platform_name(tmp_path: Path) -> None:
    ctx = open_house(tmp_path, SystemClock())
    ctx.env = {"SKYPILOT_SERVICE_ACCOUNT_TOKEN": "sky_" + "t" * 20}
    provider = ctx.provider("sky/aws")
    assert isinstance(provider, SkyProvider) and (provider.infra, provider.profile.id) == ("aws", "sky/aws")
    assert "sky" not in ctx.configured(), "nobody named an infrastructure"
