"""A stand-in for nvidia-smi, which emulated machines lack: it reports a healthy H100."""

from __future__ import annotations

from pathlib import Path

SMI = """#!/usr/bin/env python3
import sys
CARD = {"index": "0", "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54.15", "memory.total": "81559",
        "memory.used": "4", "utilization.gpu": "0", "pci.bus_id": "00000000:3B:00.0", "temperature.gpu": "31",
        "compute_cap": "9.0", "ecc.errors.uncorrected.volatile.total": "%d", "remapped_rows.pending": "No",
        "remapped_rows.failure": "No", "clocks_throttle_reasons.active": "0x0000000000000001"}
asked = " ".join(sys.argv[1:])
if "--query-gpu=" in asked:
    print(", ".join(CARD[f] for f in asked.split("--query-gpu=")[1].split(" ")[0].split(",")))
elif "--query-compute-apps" not in asked:
    print("| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.8  |")
"""


def put_gpu(folder: Path, errors: int = 0) -> None:
    """Write the stand-in into a folder on the machine's PATH. `errors` are uncorrected memory errors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi").write_text(SMI.replace("%d", str(errors)))
    (folder / "nvidia-smi").chmod(0o755)
