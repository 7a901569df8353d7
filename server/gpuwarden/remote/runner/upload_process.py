"""Start the process that uploads to an artifact store, and read its report."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gpuwarden.remote.runner.files import read_small, write_all, write_atomic
from gpuwarden.remote.runner.protocol import Json

STORE_KEYS = "GPUWARDEN_STORE_"  # prefix of the store's credentials among the secrets
MOST_REQUEST = 60_000  # must fit into the pipe's buffer, where it stays until a Python with the client is found
UPLOAD_REPORT = "keep.json"  # in the run folder: the upload's state, for the supervisor and the user


def take_keys(secrets: dict[str, str]) -> dict[str, str]:
    """Remove a store's credentials from the secrets and return them; the job does not get them."""
    return {name[len(STORE_KEYS) :]: secrets.pop(name) for name in list(secrets) if name.startswith(STORE_KEYS)}


def secret_keys(keys: dict[str, str]) -> list[str]:
    """Return the values that must never be written to a file or log. Regions and endpoints are not secret."""
    return [value for name, value in keys.items() if "KEY" in name or "TOKEN" in name]


def start_uploader(folder: str, spec: Json, job: Json, keys: dict[str, str], key: str) -> Any:
    """Start the upload alongside the job at low priority. Return None if no upload is configured or the start fails.

    `job` contains the token and the attempt; `key` signs the store's manifests. The key and the credentials are sent
    only on stdin. Closing stdin means that no more files will be saved: the process uploads the remaining files and
    exits.
    """
    import shutil
    import subprocess

    if not spec.get("keep"):
        return None
    ionice = shutil.which("ionice")
    where = spec["keep"]
    how = [folder, str(where["scheme"]), "boxed" if spec.get("sandbox") else "open"]
    own = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "keep", *how]
    fields = ("keep", "outputs", "root", "mounts", "within", "marker", "keep_bytes_s", "keep_every_s", "recovers")
    order = {name: spec[name] for name in fields if name in spec}
    token = str(job["token"])
    order.update(attempt=job["attempt"], key=key, self_stops=bool(spec.get("self_stop")))
    order.update(token=token, keys=keys, prefix="/".join(part for part in (where["path"], token) if part) + "/")
    request = json.dumps(order).encode("ascii") + b"\n"
    if len(request) > MOST_REQUEST:
        text = "nothing is uploaded to the artifact store: the names of the declared outputs are too long in total"
        write_atomic(folder + "/" + UPLOAD_REPORT, json.dumps({"state": "failed", "error": text}).encode("ascii"))
        return None
    try:
        with open(os.devnull, "r+b") as null:
            uploader = subprocess.Popen(
                [*([ionice, "-c3"] if ionice else []), *own],
                cwd="/", stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, bufsize=0,
            )  # fmt: skip
        if uploader.stdin:
            write_all(uploader.stdin.fileno(), request)
        return uploader
    except (OSError, subprocess.SubprocessError):
        return None


def upload_report(folder: str) -> Json:
    """Return the upload's state; empty if no report exists."""
    try:
        report = json.loads(read_small(folder + "/" + UPLOAD_REPORT, 65536))
        return report if isinstance(report, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def upload_trouble(folder: str) -> str:
    """Return the upload's current error, or an empty string."""
    return str(upload_report(folder).get("error") or "")[:300]
