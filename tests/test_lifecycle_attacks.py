"""What an agent, a job or a machine may try in order to get past a gate, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from doors import JOB, quick_warden
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import JobSpec
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.lifecycle.check import Checked, check
from gpuwarden.lifecycle.records import job_ids
from gpuwarden.lifecycle.submit import submit
from gpuwarden.lifecycle.warden import Warden

pytestmark = pytest.mark.anyio

# Saves one tensor as the safetensors library does; a test's own lines follow.
SAVE = """
import json, os, struct, sys, time
def save(path):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<4f", 1, 2, 3, 4))
"""


def job(lines: str = 'save("out/model.safetensors")', **more: object) -> JobSpec:
    return JobSpec.model_validate({**JOB, "script": SAVE + lines, **more})


async def ended(w: Warden, spec: JobSpec) -> Checked:
    """Launch a job and look until it has ended."""
    first = await submit(w, spec)
    done = await submit(w, spec, receipt=first.receipt)
    assert done.job is not None
    with anyio.fail_after(30):
        while True:
            seen = await check(w, done.job.id)
            if seen.job.state in TERMINAL_JOBS:
                return seen
            await anyio.sleep(0.05)


@pytest.fixture
def w(tmp_path: Path) -> Warden:
    return quick_warden(tmp_path / "home")


async def test_a_dry_run_with_a_receipt_launches_nothing(w: Warden) -> None:
    checked = await submit(w, job(), dry_run=True)
    with pytest.raises(BadRequest, match="dry_run"):
        await submit(w, job(), dry_run=True, receipt=checked.receipt)
    assert job_ids(w.ledger) == []
