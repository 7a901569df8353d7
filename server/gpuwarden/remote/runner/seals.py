"""Start the sealer, which computes digests of finished checkpoints, and read its seal log."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from gpuwarden.remote.runner.files import read_small, write_all
from gpuwarden.remote.runner.path_mapping import PathMapping, inside
from gpuwarden.remote.runner.protocol import Json

MAX_BOOK = 64 << 20  # as in checkpoints/sealing/seal_log.py
SEAL_AFTER_S = 5.0  # the sealer starts after this time; the pull seals the outputs of a shorter job
SHA256, MAC = re.compile("[0-9a-f]{64}"), re.compile("([0-9a-f]{64})?")
ARCHIVE = re.compile(r"gpuwarden-checkpoints-[0-9a-f]{16}\.pyz")


def start_sealer(folder: str, spec: Json, key: str) -> Any:
    """Start the sealer (the archive) alongside the job at low priority. On failure, return None; the pull then seals.

    The sealer exits when its stdin closes, so it also exits soon after the supervisor is killed. The key is sent only
    on stdin.
    """
    import shutil
    import subprocess

    archive = find_archive(folder, spec.get("archive"))
    located = [PathMapping(spec).locate(folder, str(p)) for p in spec.get("outputs") or []]
    tops = [real for top, bound in located if inside(real := os.path.realpath(top), os.path.realpath(bound))]
    if not archive or not tops:
        return None
    ionice = shutil.which("ionice")
    argv = [*([ionice, "-c3"] if ionice else []), sys.executable, "-I", "-S", archive, "seal", *tops]
    argv += ["--log", folder + "/seals.jsonl", "--attached"]
    argv += ["--quiet", str(spec.get("seal_quiet_s") or 30), "--every", str(spec.get("seal_every_s") or 10)]
    argv += ["--keyed"] if key else []
    argv += ["--parts"] if spec.get("keep") else []
    try:
        with open(os.devnull, "r+b") as null:
            sealer = subprocess.Popen(
                argv, cwd="/", stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, bufsize=0
            )
        if key and sealer.stdin:
            write_all(sealer.stdin.fileno(), key.encode("ascii") + b"\n")
        return sealer
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return None


def find_archive(folder: str, name: Any) -> str:
    """Return the path of the archive with this name; an empty string if it is missing or its digest is wrong."""
    if not isinstance(name, str) or not ARCHIVE.fullmatch(name):
        return ""
    import hashlib

    path = folder + "/" + name
    try:
        digest = hashlib.sha256(read_small(path, 1 << 22)).hexdigest()
    except OSError:
        return ""
    return path if digest[:16] in name else ""  # the job may write to this folder


def seals(folder: str) -> dict[str, Json]:
    """Return the most recent seal for each real path in the seal log. Incomplete lines are skipped.

    The lines are not authenticated here, although the job can write to the log. The key's owner verifies `mac`.
    """
    try:
        data = read_small(folder + "/seals.jsonl", MAX_BOOK)
    except OSError:
        return {}
    rows: dict[str, Json] = {}
    for line in data.splitlines():
        try:
            row = json.loads(line.decode("ascii"))
            known = {k: row[k] for k in ("size", "mtime_ns", "ctime_ns", "sha256", "sealed_at")}
            plain = all(type(known[k]) is int for k in ("size", "mtime_ns", "ctime_ns"))
            dated = type(known["sealed_at"]) in (int, float) and 0 <= known["sealed_at"] < 1e12
            known["mac"] = row.get("mac") or ""
            if type(row.get("part_size")) is int and SHA256.fullmatch(row["parts_sha256"]):
                known.update(part_size=row["part_size"], parts_sha256=row["parts_sha256"])
            sound = plain and dated and SHA256.fullmatch(known["sha256"]) and MAC.fullmatch(known["mac"])
            path = str(row["path"])
            if sound and (path not in rows or known["sealed_at"] >= rows[path]["sealed_at"]):
                rows[path] = known
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return rows
