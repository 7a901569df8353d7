"""Create and check the tokens that a job's program uses to report metrics and alerts.

Tokens are derived from the installation's key and are not stored. A token is valid for one job and one purpose, and
the server checks it without reading a file. A token from another installation or for another job does not match.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from gpuwarden.known_secrets import installation_key

Purpose = Literal["metrics", "alerts"]
PREFIXES: Final[dict[Purpose, str]] = {"metrics": "gwj", "alerts": "gwk"}
"""Prefixes of a job's token (`JOB_TOKEN`) and of its key for alerts (`INTERNAL_API_KEY`)."""
MAX_TOKEN: Final = 256


def job_token(home: Path, job_id: str, purpose: Purpose) -> str:
    """Return a job's token for one purpose."""
    proof = hmac.new(_key(home, purpose), job_id.encode(), hashlib.sha256).digest()
    name = base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")
    return f"{PREFIXES[purpose]}_{name}.{base64.urlsafe_b64encode(proof).decode().rstrip('=')}"


def job_of(home: Path, token: str) -> tuple[str, Purpose] | None:
    """Return the job and the purpose for which a token is valid, or None if it is invalid."""
    if len(token) > MAX_TOKEN:
        return None
    for purpose, prefix in PREFIXES.items():
        name, dot, _proof = token.removeprefix(f"{prefix}_").partition(".")
        if not token.startswith(f"{prefix}_") or not dot:
            continue
        try:
            job_id = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:
            return None
        same = hmac.compare_digest(job_token(home, job_id, purpose).encode(), token.encode("utf-8", "replace"))
        return (job_id, purpose) if same else None
    return None


@lru_cache(maxsize=16)
def _key(home: Path, purpose: Purpose) -> bytes:
    """Return the key for a purpose. It is cached, because a server checks thousands of tokens per second."""
    return installation_key(home, f"job {purpose}")
