"""Prepare a job for its backend: its secrets, its inputs, and the limits of this attempt."""

from __future__ import annotations

import anyio.to_thread

from gpuwarden.backends.base import ArrayTask
from gpuwarden.core.errors import NotFound
from gpuwarden.core.store_address import OWN_KEYS, StoreAddress
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.relaunch import resumed_from
from gpuwarden.lifecycle.execution.reporting import report_secrets
from gpuwarden.lifecycle.records import JobRecord


def secrets_of(ctx: Context, job: JobRecord, *, seals: bool) -> dict[str, str]:
    """Return the secrets for a job.

    Raises NotFound if a secret has no value in this process. `seals` is true if gpuwarden's sealer runs alongside the
    job; the secrets then include the sealer's key, which the runner removes before the job starts.
    """
    store = StoreAddress.parse(job.spec.artifact_store) if job.spec.artifact_store else None
    missing = [name for name in (*job.spec.secrets, *(store.secrets if store else ())) if not ctx.env.get(name)]
    if missing:
        raise NotFound(
            f"job {job.id} needs secrets that have no value in this process: {', '.join(missing)}",
            "Set them in gpuwarden's environment, then repeat the call; the job waits until then.",
        )
    secrets = {name: ctx.env[name] for name in job.spec.secrets}
    if store:  # for the uploader; the runner removes them before the job starts
        secrets |= {OWN_KEYS + name: value for name, value in store.handed(ctx.env).items()}
    names = (*job.spec.secrets, *(store.credentials if store else ()))
    ctx.known_secrets.remember(ctx.env[name] for name in names if ctx.env.get(name))
    if seals:
        from gpuwarden.lifecycle.artifacts.seal_keys import SEAL_KEY, job_key  # slow import

        secrets[SEAL_KEY] = job_key(ctx, job.id)
    return secrets | report_secrets(ctx, job, runner=seals)


async def order_of(ctx: Context, job: JobRecord, secrets: dict[str, str], attempt: int) -> ArrayTask:
    """Return the task that the backend launches for one attempt of a job, with the paths of the local input files."""
    from gpuwarden.lifecycle.submission.input_store import staged  # slow import

    inputs = await anyio.to_thread.run_sync(staged, ctx.input_store, job.inputs)
    inputs |= await anyio.to_thread.run_sync(resumed_from, ctx, job)
    spec = job.spec if job.limit_s is None else job.spec.model_copy(update={"timeout_s": job.limit_s})
    return ArrayTask(spec, job.id, secrets, attempt, inputs)
