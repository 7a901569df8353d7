#!/usr/bin/env python3
# ruff: noqa: B905, D103 (stands alone, Python 3.8)
"""Check the health of this machine's GPUs: driver, ECC, remapped rows, throttling, processes, Xids.

    python3 gpu_health.py [--json]

Needs only Python 3.8 or newer and `nvidia-smi`, and changes nothing. Exit code 0: no problem found; 1: a value is
unusual or could not be read; 2: use another machine; 3: the machine has no NVIDIA GPU, so nothing was checked.
"""

import argparse
import json
import re
import subprocess
import sys

FIELDS = [
    "index", "uuid", "name", "driver_version", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu",
    "power.draw", "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active",
    "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure",
]  # fmt: skip
THROTTLE = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "hardware power brake"}
FATAL_XIDS = {48, 64, 79, 95, 119}
ODD_XIDS = {74, 63, 92, 94, 120}
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
HOT = 83
VERDICTS = [
    "PASS: no problem found", "ODD: read the lines above", "FAIL: use another machine", "NO CARD: nothing to check",
]  # fmt: skip


def command(*words, timeout=30):
    """Run a command; return (output, None), or (None, reason) if it failed."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    except FileNotFoundError:
        return None, f"{words[0]} is not installed"
    except subprocess.TimeoutExpired:
        return None, f"{words[0]} did not answer within {timeout} s"
    text = done.stdout.decode("utf-8", "replace").strip()
    return (text, None) if done.returncode == 0 else (None, text.splitlines()[-1][:200] if text else "no output")


def cards(fields):
    """Return (GPUs, reason for a failure). Each GPU is a dict of its `fields`, without those unknown to the driver."""
    fields = list(fields)
    while True:
        text, why = command("nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits")
        unknown = re.search(r'Field "([^"]+)" is not a valid field', why or "")
        if unknown is None or unknown.group(1) not in fields:
            break
        fields.remove(unknown.group(1))
    if text is None:
        return [], why
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(fields, row)) for row in rows if len(row) == len(fields)], None


def number(text):
    """Return the text as a number, or None if it isn't one (`[N/A]`, `[Not Supported]`)."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except (AttributeError, ValueError):
        return None


def judge(card):
    """Yield (level, sentence) for each problem with one GPU; level 2: use another machine, 1: unusual."""
    who = "GPU {}".format(card["index"])
    ecc = number(card.get("ecc.errors.uncorrected.volatile.total"))
    if ecc:
        yield 2, f"{who}: {ecc:.0f} uncorrected ECC errors since the last reset"
    if card.get("remapped_rows.failure", "").lower() in {"yes", "1"}:
        yield 2, f"{who}: a row could not be remapped"
    if card.get("remapped_rows.pending", "").lower() in {"yes", "1"}:
        yield 1, f"{who}: a row will be remapped at the next reset"
    mask = int(number(card.get("clocks_throttle_reasons.active")) or 0)
    for bit, name in THROTTLE.items():
        if mask & bit:
            yield 1, f"{who}: throttled ({name})"
    heat = number(card.get("temperature.gpu"))
    if heat is not None and heat >= HOT:
        yield 1, f"{who}: the temperature is {heat:.0f} degrees Celsius"
    used, util = number(card.get("memory.used")), number(card.get("utilization.gpu"))
    if used and used > 1024 and not util:
        yield 1, f"{who}: {used:.0f} MiB in use, but its utilization is 0; see vram_zombies.py"


def xids():
    """Yield (level, sentence) for each Xid in the kernel's log, or one for a log that can't be read."""
    text, why = command("dmesg")
    if text is None:
        yield 1, f"the kernel's log can't be read here ({why}), so Xids are unknown"
        return
    for place, code in XID.findall(text):
        if int(code) in FATAL_XIDS:
            yield 2, f"Xid {code} at {place}: use another machine"
        elif int(code) in ODD_XIDS:
            yield 1, f"Xid {code} at {place}: use another machine if it occurs again"


def report():
    """Return the GPUs, their processes and the findings."""
    found, why = cards(FIELDS)
    if not found:
        # Without a driver, there is no GPU to check. A driver that does not answer is a fault.
        level = 3 if not why or "is not installed" in why or "No devices were found" in why else 2
        return {"cards": [], "processes": [], "findings": [(level, why or "nvidia-smi lists no GPU")]}
    text, why = command("nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv,noheader")
    findings = [finding for card in found for finding in judge(card)]
    if text is None:
        findings.append((1, f"processes can't be listed: {why}"))
    return {"cards": found, "processes": (text or "").splitlines(), "findings": findings + list(xids())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    asked = parser.parse_args()
    found = report()
    level = max((level for level, _ in found["findings"]), default=0)
    if asked.json:
        print(json.dumps(dict(found, level=level)))
        return level
    for card in found["cards"]:
        row = [card.get(key, "?") for key in ("index", "name", "driver_version", "memory.used", "memory.total")]
        print("GPU {}: {}, driver {}, {} of {} MiB".format(*row))
    for line in found["processes"]:
        print("process " + line)
    for rank, sentence in found["findings"]:
        print(VERDICTS[rank].partition(":")[0].ljust(4), sentence)
    print(VERDICTS[level])
    return level


if __name__ == "__main__":
    sys.exit(main())
