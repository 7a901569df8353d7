"""Shared fixtures, and the rule for real parts: required in CI, a named skip on a laptop."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from waiting import PATIENCE
from warm_children import Children

REQUIRE_REAL = os.environ.get("GPUWARDEN_REQUIRE_REAL") == "1"
ENDURANCE = os.environ.get("GPUWARDEN_ENDURANCE") == "1"
PROTECTS = (
    "alternatives", "cli_approve", "crash", "fan_out_l", "http_approving", "kept", "ledger", "lifecycle", "next_step",
    "parking", "pausing", "policy", "private", "rehearsal_crash", "relaunch", "remote_cuts", "remote_disasters",
    "remote_hostile", "sandbox", "serve_mcp", "standing_orders", "team",
    "checkpoints_hostile", "checkpoints_inert", "checkpoints_pickle", "checkpoints_savelib", "checkpoints_sealing",
)  # fmt: skip
"""How the names of the modules begin whose tests protect money or data: ledger, kills, gates, teardown, exploit files.

`.ci/run` runs their proofs. A failed one is never run again, because a race there is a bug.
"""

# A busy machine is not a failure. CI draws the same examples each time; a run by hand looks further.
settings.register_profile(
    "gpuwarden", deadline=None, derandomize=REQUIRE_REAL, database=None if REQUIRE_REAL else settings.default.database
)
settings.load_profile("gpuwarden")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests before `-m` and `-k` choose among them, and put those that take long first afterwards.

    What an attack declares, and whose client runs, goes among the test's properties for `tools/attacks.py`.
    """
    for item in items:
        if item.path.stem.removeprefix("test_").startswith(PROTECTS):
            item.add_marker(pytest.mark.protects)
            item.add_marker(pytest.mark.flaky(reruns=0))
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


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests so that every worker starts with its share of the long ones.

    `--dist worksteal` first cuts the list into one equal stretch for each worker. A long test at the end of a stretch
    would keep one worker busy while the others have nothing left.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = long[worker::workers]
        more = max(0, (len(items) - len(ordered)) // (workers - worker) - len(share))
        ordered += share + rest[:more]
        del rest[:more]
    return ordered


def amount(part: int, full: int) -> int:
    """Return how much a test marked `endurance` plays: all under `make endurance`, else the part for `make prove`."""
    return full if ENDURANCE else part


def need(what: str, present: bool) -> None:
    """Skip by name where a real part is missing; fail where real parts are required."""
    if present:
        return
    if REQUIRE_REAL:
        pytest.fail(f"{what} is missing, and GPUWARDEN_REQUIRE_REAL=1 asks for the real thing")
    pytest.skip(f"{what} is not installed here")


@pytest.fixture
def need_program() -> Callable[[str], str]:
    """Return the path of a program, or skip or fail."""

    def find(name: str) -> str:
        path = shutil.which(name)
        need(name, path is not None)
        assert path is not None
        return path

    return find


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def warm_children() -> Iterator[None]:
    """Fork the processes that load files from one that has imported torch."""
    if not sys.platform.startswith("linux"):
        yield
        return
    children = Children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuwarden.checkpoints.load.subprocess", children)
        yield
    children.close()


_USERS = count()


@pytest.fixture(autouse=True)
def fresh_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test an account without a ledger and a policy, whatever whoever runs the tests has."""
    home = tmp_path_factory.getbasetemp() / f"account{next(_USERS)}"
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setattr("gpuwarden.policy_record.account_home", lambda: Path(home))
