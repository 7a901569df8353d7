"""Pytest hooks, and the fixtures that every test uses. The kits define the others."""

from __future__ import annotations

import gc
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import httpcore2
import pytest
from hypothesis import settings
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata, func_metadata

from long_first import long_first
from real_parts import REQUIRE_REAL, need
from waiting import PATIENCE
from warm import start_forks

PROTECTS = (
    "backends/test_slurm.py::test_a_preempted", "backends/test_slurm.py::test_the_whole_life",
    "checkpoints/test_hostile", "checkpoints/test_inert", "checkpoints/test_pickle", "checkpoints/test_promises",
    "checkpoints/test_savelib", "checkpoints/test_sealing", "interfaces/cli/test_approve",
    "interfaces/http/test_approving", "interfaces/http/test_page_approvals", "interfaces/http/test_whole_life_browser",
    "interfaces/mcp/test_conformance", "interfaces/mcp/test_mcp",
    "interfaces/test_plugins_real", "ledger/",
    "lifecycle/fan_out/test_l", "lifecycle/test_", "package/test_policy", "package/test_private",
    "rehearsal/test_crash", "remote/test_cuts", "remote/test_disasters", "remote/test_hostile", "remote/test_artifact",
    "remote/test_sandbox",
)  # fmt: skip
"""Prefixes of the ids of tests that protect money or data: ledger, kills, gates, teardown, exploit files.

They also select tests of the plugins in real clients, of protocol conformance, and of jobs on a real Slurm.

`.ci/run` runs the `prove` tests among them. A failed test is never rerun, because a race there is a bug.
"""

# No deadline, because a busy machine is not a failure. CI always draws the same examples; local runs draw new ones.
settings.register_profile(
    "gpuwarden", deadline=None, derandomize=REQUIRE_REAL, database=None if REQUIRE_REAL else settings.default.database
)
settings.load_profile("gpuwarden")

# Kits with fixtures, registered before any of them is imported, so that pytest rewrites their assertions.
pytest_plugins = [
    "cli_kit", "client_kit", "clouds_house", "clouds_kit", "cutting", "artifact_store_kit", "orders_kit",
    "plugin_kit", "ray_kit", "runner_kit", "sky_kit", "slurm_kit", "small_disk", "ssh_house",
    "ssh_kit", "sshd", "timed_again", "wording",
]  # fmt: skip
pytest.register_assert_rewrite(*pytest_plugins)


# Workers of pytest use every processor already, so torch's threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# By its end, a worker holds millions of objects. Collecting garbage as often as a small program does takes a sixth of
# the whole run. Most of the objects are the tests themselves, which `pytest_collection` excludes.
gc.set_threshold(20_000, 20, 20)
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Send the messages of pytest-rerunfailures immediately.

    With `--reruns`, a worker writes twice and then reads, for every test. Without TCP_NODELAY, the kernel delays the
    second write until the first is acknowledged, 40 ms later: 165 s for 12,000 tests and three workers.
    """
    if connection := getattr(getattr(config, "failures_db", None), "sock", None):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests before `-m` and `-k` select from them, and move the long ones to the front afterwards.

    Also record each test's declared attack and each real client in the test's properties, for `tools/attacks.py`.
    """
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(PROTECTS):
            item.add_marker(pytest.mark.protects)
            item.add_marker(pytest.mark.flaky(reruns=0))
        if "wording" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.texts)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout((600 if item.get_closest_marker("prove") else 120) * PATIENCE))
        if marker := item.get_closest_marker("attack"):
            area, what = marker.args
            item.user_properties.append(("attack", (area, what)))
        elif (marker := item.get_closest_marker("real")) and "_clients" in item.path.stem:
            platform = item.path.stem.rpartition("clients")[2].strip("_") or "the Hub"
            client = next((name for name in ("skypilot", "dstack", "runpodctl") if name in item.name), marker.args[0])
            item.user_properties.append(("client", (platform, client)))
    yield
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = long_first(items, workers)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests and the imported modules from garbage collection, and enable it."""
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture
def need_program() -> Callable[[str], str]:
    """Return a function that finds a program's path. If the program is missing, it skips or fails the test."""

    def find(name: str) -> str:
        path = shutil.which(name)
        need(name, path is not None)
        assert path is not None
        return path

    return find


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> None:
    """Start gpuwarden's own programs as forks of processes that have imported their libraries."""
    start_forks()


@pytest.fixture(scope="session", autouse=True)
def built_once() -> Iterator[None]:
    """Build each tool's schemas once and read the certificates once, because hundreds of tests need them."""
    schemas: dict[object, FuncMetadata] = {}

    def schema(tool: FunctionType, **options: Any) -> FuncMetadata:
        key = (tool.__code__, tool.__defaults__, repr(options))  # each server defines its tools again
        if key not in schemas:
            schemas[key] = func_metadata(tool, **options)
        return schemas[key].model_copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcp.server.mcpserver.tools.base.func_metadata", schema)
        patch.setattr("httpcore2.default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[Callable[[int], None]]:
    """Skip disk syncs in this process, and yield the real `os.fsync`.

    Only a machine crash would lose unsynced writes, and tests only kill processes. A sync takes milliseconds, and there
    are tens of thousands. Processes that tests start still sync, as for a user.
    """
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        patch.setattr("gpuwarden.ledger.opening.SYNCHRONOUS", "OFF")
        yield fsync


_USERS = count()


@pytest.fixture(autouse=True)
def fresh_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test an account without a ledger or a policy, independent of the account that runs the tests."""
    home = tmp_path_factory.getbasetemp() / f"account{next(_USERS)}"
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setattr("gpuwarden.policy_record.account_home", lambda: Path(home))
