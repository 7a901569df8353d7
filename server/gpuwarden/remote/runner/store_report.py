"""Record a run's outcome in the artifact store's manifest, which can be read while the machine is off.

Each manifest is signed with a job-specific key that is never written to the machine's disks. This key differs from the
seal key, because the upload may use a Python that the job installed.
"""

from __future__ import annotations

import json
import os

from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.inventory import disclose
from gpuwarden.remote.runner.manifest import Listing
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.status import read_status

LOOK = "/keep.look"  # the self-stop process's request for a final manifest; the manifest repeats the request's text
GOES_ON = "-"  # prefix of a request if the machine keeps running
MOST_LOOK = 100
REPORTED = (
    "state", "attempt", "reason", "why", "exit_code", "signal", "step", "total_steps", "started_at", "ended_at",
    "updated_at", "log_bytes",
)  # fmt: skip


def report_key(seal_key: str) -> str:
    """Return the key for signing a job's manifests, derived from its seal key; empty if it has no seal key."""
    import hashlib
    import hmac

    return hmac.new(seal_key.encode("ascii"), b"artifact store", hashlib.sha256).hexdigest() if seal_key else ""


def report_mac(body: Json, key: str) -> str:
    """Return the MAC of a manifest, computed over all fields except `mac`."""
    import hashlib
    import hmac

    text = json.dumps({name: value for name, value in body.items() if name != "mac"}, sort_keys=True)
    return hmac.new(key.encode("ascii"), text.encode("ascii"), hashlib.sha256).hexdigest()


def sign_report(body: Json, key: str) -> Json:
    """Return a manifest with its MAC, or unchanged if the key is empty."""
    return {**body, "mac": report_mac(body, key)} if key else body


def latest_request(folder: str) -> str:
    """Return the latest request from the self-stop process, or an empty string."""
    try:
        return read_small(folder + LOOK, MOST_LOOK).decode("ascii")
    except (OSError, UnicodeError):
        return ""


def end_of_run(folder: str, order: Json, listing: Listing, look: str) -> Json:
    """Return the job's final status, the outputs missing from the listing, and the machine's other processes and files.

    `look` is the request from the self-stop process if the machine is about to stop itself.
    """
    status = read_status(folder) or {}
    other = disclose(folder, {**order, "exclude": []})
    return {
        "outputs": list(order.get("outputs") or []),
        "status": {name: status[name] for name in REPORTED if name in status},
        "missing": listing.missing,
        "skipped": listing.skipped,
        "more_skipped": listing.more_skipped,
        "disclosed": {name: other[name] for name in ("processes", "files", "complete")},
        "look": look,
    }


def last_of(folder: str, attempt: object) -> bool:
    """Return whether the run folder exists and `attempt` (None: any) is its current attempt and has ended."""
    status = read_status(folder) if os.path.isdir(folder) else None
    return status is not None and status["state"] != "running" and attempt in (None, status.get("attempt"))
