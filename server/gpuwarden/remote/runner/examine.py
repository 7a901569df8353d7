"""Examine checkpoints on this machine by running the packed checkpoints package."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gpuwarden.remote.runner.output_json import reply
from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.seals import find_archive

MAX_FINDINGS = 8 << 20


def examine(folder: str, request: Json) -> Json:
    """Examine outputs with the archive. Print progress lines and the result for each output."""
    archive = find_archive(folder, request.get("archive"))
    if not archive:
        raise Problem("no_archive", "the archive for examining checkpoints is not on this machine")
    paths = [str(p) for p in request.get("paths") or []]
    seconds = min(max(float(request.get("seconds") or 0), 1.0), 86400.0)
    lines, code = answered(archive_command(folder, archive, paths, seconds, request), seconds + 30)
    if len(lines) != len(paths):
        raise Problem("io_error", f"only {len(lines)} of {len(paths)} outputs were examined (exit code {code})")
    for number, line in enumerate(lines):
        reply({"output": paths[number], "found": line})
    return {"ok": True, "outputs": len(lines)}


def archive_command(folder: str, archive: str, paths: list[str], seconds: float, request: Json) -> list[str]:
    """Return the argument list that starts the archive."""
    mapping = PathMapping(request)
    tops = [bounded(folder, mapping, path) for path in paths]
    argv = [sys.executable, "-I", archive, "examine", *tops, "--log", folder + "/seals.jsonl"]
    argv += ["--seconds", str(seconds), *(["--structure"] if request.get("structure") else [])]
    if request.get("deeper") in ("load", "resume"):
        argv.append("--" + request["deeper"])
    if request.get("against"):
        argv.append("--against=" + bounded(folder, mapping, str(request["against"])))
    return argv


def answered(argv: list[str], seconds: float) -> tuple[list[Json], int]:
    """Run a command. Return the JSON lines that it prints within `seconds`, and its exit code."""
    import subprocess
    import threading

    child = subprocess.Popen(argv, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        lines = passed_on(child)
    finally:
        timer.cancel()
        child.kill()
        code = child.wait()
    return lines, code


def bounded(folder: str, mapping: PathMapping, path: str) -> str:
    """Return the real path for a declared path. Raises Problem for a link that points outside its folder."""
    top, bound = mapping.locate(folder, path)
    real = os.path.realpath(top)
    if not inside(real, bound):
        raise Problem("bad_request", f"{printable(path)} is a link that points outside its folder")
    return real


def passed_on(child: Any) -> list[Json]:
    """Return the JSON lines that a child prints. Print a progress line after every 5 s of silence.

    Raises Problem if the child prints more than `MAX_FINDINGS` bytes, or anything other than JSON.
    """
    import select

    data = bytearray()
    while True:
        if not select.select([child.stdout], [], [], 5)[0]:
            reply({"progress": len(data)})
            continue
        part = os.read(child.stdout.fileno(), 1 << 16)
        data += part
        if len(data) > MAX_FINDINGS:
            raise Problem("io_error", f"the examination printed more than {MAX_FINDINGS} bytes")
        if not part:
            break
    try:
        return [json.loads(line.decode("ascii")) for line in bytes(data).splitlines()]
    except (ValueError, RecursionError):
        raise Problem("io_error", "the output of the examination is not JSON") from None
