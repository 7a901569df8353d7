"""Authenticate the seals of a machine: digests that gpuwarden's sealer took there right after a save.

A job runs as the same user as the sealer, so it can write whatever it likes into the book of seals. Each line therefore
carries a MAC under a key of this job, which the runner is given over stdin and which is on no disk of the machine. A
line whose maker can't be shown counts as no seal, and the report says so.

SECURITY.md lists what a seal can't prove.
"""

from __future__ import annotations

from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.core.models import Manifest
from gpuwarden.known_secrets import installation_key
from gpuwarden.lifecycle.context import Context

SEAL_KEY = "GPUWARDEN_SEAL_KEY"
"""The name that the key has among the secrets on its way to the runner, which takes it out of them."""
CLOCK_S = 300.0
"""Seconds between the clocks of one machine's files, where some are on a network disk."""


def job_key(ctx: Context, job_id: str) -> str:
    """Return the key of a job's seals. It is derived from the installation's key, the only one that is stored."""
    return installation_key(ctx.home, f"seal/{job_id}").hex()


def believed(ctx: Context, job_id: str, manifest: Manifest) -> Manifest:
    """Return the manifest, whose files have the digest of the save where that is shown to be our sealer's."""
    if not any(f.seal for f in manifest.files):
        return manifest
    key = job_key(ctx, job_id).encode()
    files = []
    for file in manifest.files:
        seal = file.seal
        if seal is not None:
            signed = seal.model_dump() | dict(zip(seal_log.STAMP, file.stamp, strict=True))
            # a seal comes after the file's last change and before the manifest
            timely = file.ctime_ns / 1e9 - CLOCK_S <= seal.sealed_at <= manifest.taken_at + CLOCK_S
            if timely and seal_log.made_with(key, signed):
                fields = ("sha256", "sealed_at", "part_size", "parts_sha256")
                file = file.model_copy(update={name: getattr(seal, name) for name in fields})
        files.append(file)
    return manifest.model_copy(update={"files": tuple(files)})
