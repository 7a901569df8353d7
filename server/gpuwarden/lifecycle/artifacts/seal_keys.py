"""Authenticate a machine's seals, which are digests that gpuwarden's sealer computes on the machine right after a save.

A job runs as the same user as the sealer, so it can write arbitrary lines into the seal log. Therefore each line has a
MAC that is computed with a job-specific key. The runner receives that key over stdin; the key is not stored on the
machine. A line without a valid MAC does not count as a seal, and the report mentions it.

SECURITY.md describes the limits of seals.
"""

from __future__ import annotations

from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.core.models import Manifest
from gpuwarden.known_secrets import installation_key
from gpuwarden.lifecycle.context import Context

SEAL_KEY = "GPUWARDEN_SEAL_KEY"
"""Name of the key among the secrets that the runner receives; the runner removes it before the job starts."""
CLOCK_S = 300.0
"""Maximum difference in seconds between a machine's clock and its disks' clocks. Network disks have separate clocks."""


def job_key(ctx: Context, job_id: str) -> str:
    """Return the key for a job's seals. It is derived from the installation's key and is not stored."""
    return installation_key(ctx.home, f"seal/{job_id}").hex()


def with_authentic_seals(ctx: Context, job_id: str, manifest: Manifest) -> Manifest:
    """Return the manifest with the sealed digest of each file that has an authentic seal with a plausible time."""
    if not any(f.seal for f in manifest.files):
        return manifest
    key = job_key(ctx, job_id).encode()
    files = []
    for file in manifest.files:
        seal = file.seal
        if seal is not None:
            signed = seal.model_dump() | dict(zip(seal_log.STAMP, file.stamp, strict=True))
            # a seal must be newer than the file's last change and older than the manifest
            timely = file.ctime_ns / 1e9 - CLOCK_S <= seal.sealed_at <= manifest.taken_at + CLOCK_S
            if timely and seal_log.made_with(key, signed):
                fields = ("sha256", "sealed_at", "part_size", "parts_sha256")
                file = file.model_copy(update={name: getattr(seal, name) for name in fields})
        files.append(file)
    return manifest.model_copy(update={"files": tuple(files)})
