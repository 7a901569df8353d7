"""Provide a job with the two keys and the address for reporting metrics and alerts.

The keys are secrets: they are sent with the job's secrets, over stdin to a runner, and are not stored. A job with a
runner posts to the runner's relay on its machine, so it needs no other address; a serverless job posts to the server's
public address, which the user sets as `server` in `notes.toml`.
"""

from __future__ import annotations

from typing import Final

from gpuwarden.job_tokens import job_token
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord

REPORT_KEYS: Final = "GPUWARDEN_REPORT_"
"""Prefix of the names under which the keys are sent to the runner, which removes them from the secrets."""
METRICS_PATH: Final = "/api/training/local/metrics"
ALERTS_PATH: Final = "/api/alerts/trigger"


def report_secrets(ctx: Context, job: JobRecord, *, runner: bool) -> dict[str, str]:
    """Return the keys and addresses that are added to a job's secrets for its reports."""
    server = ctx.notes.server.rstrip("/") if ctx.notes.server else ""
    token, key = job_token(ctx.home, job.id, "metrics"), job_token(ctx.home, job.id, "alerts")
    if runner:
        given = {"TOKEN": token, "KEY": key, **({"URL": server} if server else {})}
        return {REPORT_KEYS + name: value for name, value in given.items()}
    own = {*job.spec.env, *job.spec.secrets}
    if not server or own & {"METRICS_API_URL", "ALERT_API_URL"}:
        return {}  # gpuwarden's keys must not be sent to an address that the user set
    variables = {
        "JOB_ID": job.id,
        "USER_ID": "local",
        "JOB_TOKEN": token,
        "INTERNAL_API_KEY": key,
        "METRICS_API_URL": server + METRICS_PATH,
        "ALERT_API_URL": server + ALERTS_PATH,
    }
    return {name: value for name, value in variables.items() if name not in own}
