"""The end of a run as an artifact store reports it: whoever reads it when the machine is off learns what was there
last.

Each list of a store is signed with a key of this job that is on no disk of the machine. It is not the key of the
seals: the upload may run in a Python of the job's own.
"""

from __future__ import annotations

import json
import os

from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.inventory import disclose
from gpuwarden.remote.runner.manifest import Listing
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.status import read_status

LOOK = "/keep.look"  # the parker's question before it stops the machine, answered by the same
GOES_ON = "-"  # what such a question begins with where the machine goes on
MOST_LOOK = 100
REPORTED = (
    "state", "attempt", "reason", "why", "exit_code", "signal", "step", "total_steps", "started_at", "ended_at",
    "updated_at", "log_bytes",
)  # fmt: skip


def keep_key(seal_key: str) -> str:
    """Return the key of a job's lists, derived from that of its seals; empty without one."""
    import hashlib
    import hmac

    return hmac.new(seal_key.encode("ascii"), b"artifact store", hashlib.sha256).hexdigest() if seal_key else ""


def keep_mac(body: Json, key: str) -> str:
    """Return the MAC of a list, over all of it but its MAC."""
    import hashlib
    import hmac

    text = json.dumps({name: value for name, value in body.items() if name != "mac"}, sort_keys=True)
    return hmac.new(key.encode("ascii"), text.encode("ascii"), hashlib.sha256).hexdigest()


def sign_kept(body: Json, key: str) -> Json:
    """Return a list with its MAC, as it is without a key."""
    return {**body, "mac": keep_mac(body, key)} if key else body


def asked_look(folder: str) -> str:
    """Return the parker's last question; empty without one."""
    try:
        return read_small(folder + LOOK, MOST_LOOK).decode("ascii")
    except (OSError, UnicodeError):
        return ""


def end_of_run(folder: str, order: Json, listing: Listing, look: str) -> Json:
    """Return how the job ended and what else is on the machine, beside the listed files.

    `look` is what the parker asked with, where the machine is about to stop itself.
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
    """Return whether a run folder is there, and still that of an attempt which has ended."""
    status = read_status(folder) if os.path.isdir(folder) else None
    return status is not None and status["state"] != "running" and attempt in (None, status.get("attempt"))
