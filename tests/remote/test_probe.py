"""The probe on this machine and with fake GPUs, and the findings from its facts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.rules import Severity
from gpuwarden.remote.host import probe
from gpuwarden.remote.host.probe_findings import ProbeContext, judge
from wording import Wording

SOURCE = Path(probe.__file__).read_bytes()

SMI = """#!{python}
import sys
ROWS = {rows}
asked = " ".join(sys.argv[1:])
if "--query-gpu=" in asked:
    fields = asked.split("--query-gpu=")[1].split(" ")[0].split(",")
    for row in ROWS:
        if any(f not in row for f in fields):
            print('Field "%s" is not a valid field to query.' % fields[0])
            sys.exit(2)
        print(", ".join(row[f] for f in fields))
elif "--query-compute-apps" in asked:
    print({apps!r}, end="")
else:
    print("| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: {cuda}  |")
"""

CARD = {
    "index": "0", "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54.15", "memory.total": "81559",
    "memory.used": "4", "utilization.gpu": "0", "pci.bus_id": "00000000:3B:00.0", "temperature.gpu": "31",
    "compute_cap": "9.0", "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.pending": "No",
    "remapped_rows.failure": "No", "clocks_throttle_reasons.active": "0x0000000000000001",
}  # fmt: skip


XID = "[1.0] NVRM: Xid"


def run_probe(request: dict[str, Any], path: str = os.environ["PATH"]) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-I", "-", json.dumps(request)],
        input=SOURCE,
        capture_output=True,
        timeout=300,
        check=True,
        env={"PATH": path},
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def box(folder: Path, *, apps: str = "", cuda: str = "12.4", dmesg: str = "", **changes: str) -> str:
    """Return a PATH with fake versions of nvidia-smi and dmesg that print the given values."""
    card = {k: v for k, v in {**CARD, **changes}.items() if v}
    (folder / "nvidia-smi").write_text(SMI.format(python=sys.executable, rows=[card], apps=apps, cuda=cuda))
    (folder / "dmesg").write_text(f"#!/bin/sh\ncat <<'END'\n{dmesg}\nEND\n")
    for name in ("nvidia-smi", "dmesg"):
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def said(facts: dict[str, Any], asked: ProbeContext | None = None) -> dict[str, Severity]:
    """Return the worst severity per rule."""
    worst: dict[str, Severity] = {}
    order = list(Severity)
    for finding in judge(facts, asked or ProbeContext("/tmp", metered=True)):
        before = worst.get(finding.rule, Severity.INFO)
        worst[finding.rule] = min(before, finding.severity, key=order.index)
    return worst


def test_the_probe_parses_as_python_3_8() -> None:
    ast.parse(SOURCE, feature_version=(3, 8))


def test_a_machine_without_a_gpu_gets_a_finding(tmp_path: Path, wording: Wording) -> None:
    facts = run_probe({"paths": [str(tmp_path / "not" / "yet")], "urls": []}, path="/nonexistent")
    wording(facts["gpus"]["why"], "nvidia-smi")
    (disk,) = facts["disks"]["list"]
    assert not disk["exists"] and disk["writable"] and disk["free"] > 0 and disk["mount"].startswith("/")
    assert facts["limits"]["cpus"] == os.cpu_count()
    assert "why" in facts["xids"]
    assert said(facts)["PF-GPU-001"] is Severity.ERROR
    assert said(facts, ProbeContext("/tmp"))["PF-GPU-001"] is Severity.INFO


def test_a_healthy_gpu_gets_no_gpu_warnings(tmp_path: Path) -> None:
    facts = run_probe({"paths": ["/tmp"], "urls": []}, path=box(tmp_path))
    (gpu,) = facts["gpus"]["list"]
    assert (gpu["name"], gpu["compute_cap"], gpu["throttle"], gpu["remap_failure"]) == (CARD["name"], "9.0", 1.0, 0.0)
    assert facts["gpus"]["cuda"] == "12.4"
    # Findings about the installed torch, if any, don't concern the GPU.
    rules = said(facts)
    assert {r: s for r, s in rules.items() if r.startswith("PF-GPU")} == {"PF-GPU-001": Severity.INFO}


@pytest.mark.parametrize(
    ("changes", "rule", "severity"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "PF-GPU-002", Severity.ERROR),
        ({"remapped_rows.failure": "Yes"}, "PF-GPU-002", Severity.ERROR),
        ({"remapped_rows.pending": "Yes"}, "PF-GPU-002", Severity.WARNING),
        ({"remapped_rows.pending": "", "retired_pages.pending": "Yes"}, "PF-GPU-002", Severity.WARNING),
        ({"clocks_throttle_reasons.active": "0x0000000000000040"}, "PF-GPU-003", Severity.WARNING),
        ({"temperature.gpu": "91"}, "PF-GPU-003", Severity.WARNING),
        ({"memory.used": "40000"}, "PF-GPU-004", Severity.WARNING),
        ({"memory.used": "40000", "apps": "123, 39000\n"}, "PF-GPU-004", None),
        (
            {"dmesg": "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."},
            "PF-GPU-005",
            Severity.ERROR,
        ),
        (
            {"dmesg": "[1.0] NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."},
            "PF-GPU-005",
            Severity.INFO,
        ),
        ({"dmesg": f"{XID} (PCI:0000:3b:00): 31, pid=1, MMU Fault"}, "PF-GPU-005", Severity.INFO),
        ({"dmesg": ""}, "PF-GPU-005", None),
    ],
)
def test_an_unhealthy_gpu_gets_the_matching_finding(
    tmp_path: Path, changes: dict[str, str], rule: str, severity: Severity | None
) -> None:
    facts = run_probe({"paths": [], "urls": []}, path=box(tmp_path, **changes))
    assert said(facts).get(rule) is severity


def test_a_failing_driver_is_an_error(tmp_path: Path) -> None:
    path = box(tmp_path)
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    found = judge(run_probe({}, path=path), ProbeContext("/tmp", metered=True))
    assert "version mismatch" in found[0].message and found[0].severity is Severity.ERROR


GOOD: dict[str, Any] = {
    "now": 1000.0,
    "gpus": {"list": [{"index": 0, "name": "RTX 5090", "compute_cap": "12.0"}], "cuda": "12.8"},
    "torch": {"version": "2.6.0", "cuda": "12.4"},
    "disks": {"list": [{"path": "/w", "mount": "/w", "fs": "ext4", "free": 1 << 40}]},
}


def but(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def disk(**changes: Any) -> dict[str, Any]:
    return {"list": [{"path": "/w", "mount": "/w", "fs": "ext4", "free": 1 << 40, **changes}]}


ASKED = ProbeContext("/w", durable=["/w"], metered=True, sent=999.0, received=1001.0)


@pytest.mark.parametrize(
    ("facts", "rule", "severity"),
    [
        (but(), "PF-CUDA-002", Severity.ERROR),
        (but(torch={"version": "2.7", "cuda": "12.8"}), "PF-CUDA-002", None),
        (but(torch={"version": "2.7", "cuda": "13.0"}), "PF-CUDA-001", Severity.ERROR),
        (but(torch={"version": "2.7", "cuda": None}), "PF-CUDA-001", Severity.ERROR),
        (but(torch={"version": None}), "PF-CUDA-001", None),
        (but(), "PF-DISK-002", None),
        (but(disks=disk(free=5 << 30)), "PF-DISK-002", Severity.WARNING),
        (but(disks=disk(free=5)), "PF-DISK-002", Severity.ERROR),
        (but(disks=disk(inodes=1000, inodes_free=20)), "PF-DISK-003", Severity.WARNING),
        (but(disks=disk(inodes=0, inodes_free=0)), "PF-DISK-003", None),
        (but(disks=disk(mount="/")), "PF-DISK-004", Severity.ERROR),
        (but(disks=disk(read_only=True)), "PF-DISK-001", Severity.ERROR),
        (but(disks={"why": "no"}), "PF-DISK-001", Severity.UNKNOWN),
        (but(limits={"memory_max": 1 << 34, "cpu_quota": 4.0, "memory_total": 1 << 40}), "PF-HOST-003", Severity.INFO),
        (but(limits={"oom_kills": 2}), "PF-HOST-003", Severity.WARNING),
        (but(limits={"shm": 64 << 20}), "PF-HOST-004", Severity.WARNING),
        (but(), "PF-HOST-005", None),
        (but(now=5000.0), "PF-HOST-005", Severity.WARNING),
        (
            but(now=5000.0, web={"list": [{"url": "u", "ok": True, "date": "Thu, 01 Jan 1970 01:23:20 GMT"}]}),
            "PF-HOST-005",
            None,
        ),
        (but(web={"list": [{"url": "u", "ok": False, "why": "blocked"}]}), "PF-NET-001", Severity.WARNING),
        ({"now": "soon"}, "PF-HOST-002", Severity.UNKNOWN),
        ({}, "PF-HOST-002", Severity.UNKNOWN),
    ],
)
def test_facts_give_the_matching_finding(facts: dict[str, Any], rule: str, severity: Severity | None) -> None:
    assert said(facts, ASKED).get(rule) is severity
