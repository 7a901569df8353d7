"""Handle gpuwarden's requests with SkyPilot's SDK. Runs in the interpreter in which SkyPilot is installed.

SkyPilot's pinned dependencies conflict with gpuwarden's (uvicorn below 0.36), so they never share an interpreter. A
request is one line of JSON on stdin, and the reply is one line on stdout. The SDK's output goes to stderr. The helper
never starts an API server, because a new server without clusters would hide the fact that the user's server is down. It
requires only SkyPilot 0.14 and Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, Optional

Json = Dict[str, Any]

SETTLE_S = 8.0
"""Seconds to wait for an error from a long-running request. After that, the request continues on the API server."""
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
MAX_LOG = 8 << 20
CONTROLLERS = ("sky-jobs-controller-", "sky-serve-controller-")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
MANAGED = [
    "job_id", "job_name", "status", "schedule_state", "cloud", "infra", "resources", "cluster_resources",
    "submitted_at", "start_at", "end_at", "recovery_count", "failure_reason", "current_cluster_name",
]  # fmt: skip
_PRINTED = re.compile(r"^\([^()\n]{1,250}, (?:rank=\d+, )?pid=\d+(?:, ip=[^()\n]{1,60})?\) ")
"""The prefix that SkyPilot adds to each line that a job prints."""
_NAME = re.compile(r"^name:\s*['\"]?([^'\"\n]+)", re.MULTILINE)


class BadTask(Exception):
    """The SDK rejected the task before anything was sent."""


class ControllerStopped(Exception):
    """The jobs controller's machine is stopped."""


def task_of(config: Json) -> Any:
    """Convert a task from JSON to the SDK's type. Raises BadTask."""
    try:
        return sky.Task.from_yaml_config(dict(config))
    except ValueError as error:
        raise BadTask(str(error)) from error


def settled(request: str) -> bool:
    """Wait up to `SETTLE_S` seconds for a request to end, and raise its error if it failed. Return whether it ended."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        found = sdk.api_status([request], all_status=True)
        if found and found[0].status in FINAL:
            sdk.get(request)
            return True
        time.sleep(0.25)
    return False


def info() -> Json:
    """Return the server's address and version, the user, and the enabled infrastructure."""
    health = sdk.api_info()
    user = health.get("user") or {}
    return {
        "url": server_common.get_server_url(),
        "version": str(health.get("version")),
        "api": str(health.get("api_version")),
        "user": str(user.get("id") or common_utils.get_user_hash()),
        "infra": [str(name).lower() for name in sdk.get(sdk.enabled_clouds())],
    }


def stops(resources: Any) -> bool:
    """Return whether a machine can be stopped and restarted, and can stop itself."""
    features = sky.clouds.CloudImplementationFeatures
    try:
        resources.cloud.check_features_are_supported(resources, {features.STOP, features.AUTOSTOP})
    except sky.exceptions.NotSupportedError:
        return False
    return True


def quote(task: Json, name: str) -> Json:
    """Dry-run a launch and return the catalog's cheapest offer for the task's GPU; the price is None without an offer.

    The catalog is used because the server reports a dry run's price only in its log.
    """
    made = task_of(task)
    sdk.get(sdk.launch(made, cluster_name=name, dryrun=True))
    (asked,) = made.resources
    offers = []
    for gpu, count in (asked.accelerators or {}).items():
        found = sdk.get(
            sdk.list_accelerators(
                name_filter=f"^{re.escape(gpu)}$", region_filter=asked.region, quantity_filter=count,
                clouds=str(asked.cloud).lower(),
            )
        )  # fmt: skip
        for offer in found.get(gpu, []):
            usd = offer.spot_price if asked.use_spot else offer.price
            if usd and usd > 0 and asked.instance_type in (None, offer.instance_type):
                offers.append((float(usd), str(offer.instance_type), str(offer.region)))
    usd, instance, region = min(offers, default=(None, "no offer in the catalog", "any region"))
    return {"usd": usd, "plan": f"{instance} in {region}", "cloud": str(asked.cloud).lower(), "stops": stops(asked)}


def launch(task: Json, name: str, idle_minutes: int, at_once: bool) -> Json:
    """Launch a cluster without a job, unless a cluster with that name exists or is being launched."""
    if any(r["live"] for r in requests_of(name)) or sdk.get(sdk.status([name], all_users=True)):
        return {"adopted": True}
    made = task_of(task)
    can = all(stops(one) for one in made.resources if one.cloud is not None)
    # If a machine can't stop itself, autostop is not set, because SkyPilot would terminate it with all its data.
    idle = idle_minutes if can else None
    wait = autostop_lib.AutostopWaitFor.NONE if at_once else autostop_lib.AutostopWaitFor.JOBS
    settled(
        sdk.launch(made, cluster_name=name, idle_minutes_to_autostop=idle, wait_for=wait if idle else None, down=False)
    )
    return {"adopted": False, "idle_minutes": idle}


def requests_of(name: str) -> List[Json]:
    """Return a cluster's launches that are still in the server's records, newest first."""
    found = sdk.api_status(all_status=True, limit=200, cluster_name=name)
    kept = [r for r in found if r.name in ("sky.launch", "sky.start") and r.cluster_name == name]
    kept.sort(key=lambda r: -r.created_at)
    return [
        {"status": str(r.status), "live": r.status not in FINAL, "at": r.created_at, "id": r.request_id} for r in kept
    ]


def clusters(names: Optional[List[str]], fresh: bool, reach: bool = False) -> Json:
    """Return clusters from the server's records. If `fresh` is true, the server queries the cloud first.

    If `reach` is true, also write the SSH configuration for the clusters, as `sky status` does.
    """
    refresh = sky.StatusRefreshMode.FORCE if fresh else sky.StatusRefreshMode.AUTO
    launches = requests_of(names[0]) if names is not None and len(names) == 1 else []  # before `status`, as in `jobs`
    records = sdk.get(sdk.status(names, refresh=refresh, all_users=names is not None, _include_credentials=reach))
    for record in records if reach else ():
        write_alias(record)
    why = ""
    if not records and launches and launches[0]["status"] == "FAILED":
        try:
            sdk.get(launches[0]["id"])
        except Exception as error:
            why = plain(error)
    return {"clusters": [cluster(r) for r in records], "requests": launches, "why": why}


def managed(match: str = "", finished: bool = False) -> Json:
    """Return all users' managed jobs whose names contain `match`, including jobs that have ended if `finished` is true.

    Cluster lists do not include the machines of managed jobs. `sent` contains the names of jobs that are being
    submitted to the controller, and `failed` maps names to the errors from failed submissions.
    """
    # Request this before the queue, as in `jobs`. Running requests are listed separately, because the second list has
    # only the last 200 requests.
    asked = [*sdk.api_status(), *sdk.api_status(all_status=True, limit=200)] if finished else []
    launches = [
        (json.loads(request.request_body or "{}").get("name") or "", request)
        for request in {request.request_id: request for request in asked}.values()
        if request.name == "sky.jobs.launch"
    ]
    try:
        found = sdk.get(
            jobs_sdk.queue_v2(
                refresh=False, skip_finished=not finished, all_users=True, fields=MANAGED, name_match=match or None
            )
        )
    except sky.exceptions.ClusterNotUpError:
        if finished and any(c["name"].startswith(CONTROLLERS[0]) for c in sdk.get(sdk.status(all_users=True))):
            raise ControllerStopped("SkyPilot's jobs controller is stopped, so its jobs can't be listed") from None
        found = []  # no controller exists, so no job is running
    rows = [managed_job(job) for job in (found[0] if isinstance(found, tuple) else found)]
    rows = [row for row in rows if match in row["name"]]
    known, failed = {row["name"] for row in rows}, {}
    for name, request in sorted(launches, key=lambda one: one[1].created_at):
        if request.status == "FAILED" and match in name and name not in known:
            try:
                sdk.get(request.request_id)
            except Exception as error:
                failed[name] = plain(error)[:600]
    return {"rows": rows, "sent": [n for n, r in launches if match in n and r.status not in FINAL], "failed": failed}


def managed_job(job: Any) -> Json:
    """Return one managed job as a JSON object."""
    return {
        "id": int(job.job_id),
        "name": job.job_name or "",
        "status": job.status.value,
        "schedule": str(job.schedule_state or "").rpartition(".")[2],
        "cloud": (job.cloud or "").lower(),
        "where": job.infra or "",
        "resources": job.cluster_resources or job.resources or "",
        "submitted_at": job.submitted_at,
        "started_at": job.start_at,
        "ended_at": job.end_at,
        "recoveries": int(job.recovery_count or 0),
        "why": plain(job.failure_reason or ""),
        "cluster": job.current_cluster_name or "",
    }


def submit_managed(name: str, task: Json, run: str, secrets: Dict[str, str]) -> Json:
    """Submit a managed job, unless a job with that name has already been submitted.

    If the connection breaks, the SDK repeats the request, and each request that arrives rents a machine. All jobs with
    that name except the first are therefore canceled.
    """
    before = managed(name, finished=True)
    adopted = name in before["sent"] or any(row["name"] == name for row in before["rows"])
    if not adopted:
        made = task_of({**task, "name": name})
        made.run = run
        made.update_secrets(secrets)
        settled(jobs_sdk.launch(made, name=name))
    same = [row for row in (before if adopted else managed(name, finished=True))["rows"] if row["name"] == name]
    if len(same) > 1:
        settled(jobs_sdk.cancel(job_ids=sorted(row["id"] for row in same)[1:]))
    return {"adopted": adopted}


def cancel_managed(job_id: int, graceful: bool) -> Json:
    """Ask SkyPilot to cancel a managed job."""
    return {"done": settled(jobs_sdk.cancel(job_ids=[job_id], graceful=graceful))}


def managed_logs(job_id: int) -> Json:
    """Return a managed job's output, or SkyPilot's messages if the job printed nothing."""
    whole, printed = End(), End()
    for line in lines_of(jobs_sdk.tail_logs(job_id=job_id, follow=False, preload_content=False)):
        whole.add(line)
        bare, count = _PRINTED.subn("", line, count=1)
        if count:
            printed.add(bare)
    return (printed if printed.lines else whole).reply()


def write_alias(record: Any) -> None:
    """Write the SSH alias for a running cluster. SkyPilot's command line does this, but its SDK does not."""
    handle, credentials = record.get("handle"), record.get("credentials")
    if handle is None or not credentials or not handle.cached_external_ips or record["status"].value != "UP":
        return
    from sky.client.cli import command

    command._write_ssh_config_for_cluster(handle, credentials, command._get_ws_proxy_command())


def cluster(record: Any) -> Json:
    """Return one cluster as a JSON object."""
    handle = record.get("handle")
    resources: Any = getattr(handle, "launched_resources", None)
    inside = getattr(handle, "cached_cluster_info", None)
    try:
        usd: Optional[float] = float(resources.get_cost(3600)) * int(record["nodes"])
    except Exception:  # the catalog has no price or is unavailable
        usd = None
    try:
        can: Optional[bool] = stops(resources)
    except Exception:
        can = None
    cloud = record.get("cloud") or (resources.cloud if resources is not None else "")
    return {
        "name": record["name"],
        "hash": record["cluster_hash"],
        "status": record["status"].value,
        "kind": record.get("init_kind") or "",
        "why": plain(record.get("init_status_reason") or record.get("last_event") or ""),
        "cloud": str(cloud).lower(),
        "user": record["user_hash"],
        "launched_at": float(record["launched_at"]),
        "nodes": int(record["nodes"]),
        "autostop": int(record["autostop"]),
        "to_down": bool(record["to_down"]),
        "controller": record["name"].startswith(CONTROLLERS),
        "usd": usd,
        "stops": can,
        "ids": sorted(str(one) for one in (getattr(inside, "instances", None) or {})),
    }


def jobs(cluster: str) -> Json:
    """Return a cluster's queue, and the names of jobs being submitted to it."""
    sent: List[str] = []
    # In this order, a job that starts between the two requests appears in both lists rather than in neither.
    for request in sdk.api_status(cluster_name=cluster):
        if request.name == "sky.exec" and request.status not in FINAL and request.cluster_name == cluster:
            sent += _NAME.findall(json.loads(request.request_body or "{}").get("task") or "")[-1:]
    rows = sdk.get(sdk.queue(cluster, all_users=True))
    found = [
        {
            "id": int(row["job_id"]),
            "name": row["job_name"],
            "status": row["status"].value,
            "submitted_at": float(row["submitted_at"]),
            "started_at": None if row["start_at"] is None else float(row["start_at"]),
            "ended_at": None if row["end_at"] is None else float(row["end_at"]),
            "resources": str(row["resources"]),
        }
        for row in rows
    ]
    return {"rows": found, "sent": sent}


def execute(cluster: str, name: str, run: str, secrets: Dict[str, str]) -> Json:
    """Submit a job to a cluster, unless a job with that name has already been submitted."""
    queue = jobs(cluster)
    if name in queue["sent"] or any(row["name"] == name for row in queue["rows"]):
        return {"adopted": True}
    settled(sdk.exec(sky.Task(name=name, run=run, secrets=secrets), cluster_name=cluster))
    return {"adopted": False}


def logs(cluster: str, job_id: int) -> Json:
    """Return SkyPilot's log for a job."""
    whole = End()
    for line in lines_of(sdk.tail_logs(cluster, job_id, follow=False, preload_content=False)):
        whole.add(line)
    if not whole.lines:
        sdk.get(sdk.queue(cluster))  # raises an error if the cluster no longer exists
    return whole.reply()


def lines_of(pieces: Any) -> Iterator[str]:
    """Yield a log's lines without color codes. The SDK yields whole lines, and None at the end."""
    for piece in pieces:
        if piece is None:
            return
        yield from plain(piece).splitlines(True)


class End:
    """The last lines of a log, up to `MAX_LOG` bytes. `missing` is the number of bytes before them."""

    def __init__(self) -> None:
        self.lines: Deque[bytes] = deque()
        self.size = self.missing = 0

    def add(self, line: str) -> None:
        """Add the next line. The last line is always kept, regardless of its length."""
        self.lines.append(line.encode("utf-8", "replace"))
        self.size += len(self.lines[-1])
        while self.size > MAX_LOG and len(self.lines) > 1:
            gone = len(self.lines.popleft())
            self.size, self.missing = self.size - gone, self.missing + gone

    def reply(self) -> Json:
        """Return the kept lines as one string, and the number of missing bytes."""
        return {"text": b"".join(self.lines).decode(), "missing": self.missing}


def cost(names: List[str]) -> List[Json]:
    """Return SkyPilot's cost report for the clusters with these names, including terminated ones."""
    rows = [row for row in sdk.get(sdk.cost_report()) if row["name"] in names]
    return [
        {
            "name": row["name"],
            "hash": row["cluster_hash"],
            "usd": None if row.get("total_cost") is None else float(row["total_cost"]),
            "seconds": None if row.get("duration") is None else float(row["duration"]),
            "live": row.get("status") is not None,
        }
        for row in rows
    ]


def act(verb: str, cluster: str, **more: Any) -> Json:
    """Request `stop`, `down`, `start` or `cancel`, and wait briefly for an error."""
    if "idle_minutes" in more:
        more["idle_minutes_to_autostop"] = more.pop("idle_minutes")
    return {"done": settled(getattr(sdk, verb)(cluster, **more))}


def autostop(cluster: str, idle_minutes: int, at_once: bool) -> Json:
    """Set the time after which a cluster stops itself. The cluster never terminates itself."""
    wait = autostop_lib.AutostopWaitFor.NONE if at_once else autostop_lib.AutostopWaitFor.JOBS
    return {"done": settled(sdk.autostop(cluster, idle_minutes, wait_for=wait, down=False))}


def plain(text: object) -> str:
    """Return text without color codes."""
    return _COLOR.sub("", str(text))


VERBS: Dict[str, Any] = {
    f.__name__: f
    for f in (
        info, quote, launch, clusters, managed, submit_managed, cancel_managed, managed_logs, jobs, execute, logs, cost,
        act, autostop,
    )
}  # fmt: skip

if __name__ == "__main__":
    os.environ["SKYPILOT_DISABLE_LOCAL_API_SERVER"] = "1"
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import sky
    from sky.client import sdk
    from sky.jobs.client import sdk as jobs_sdk
    from sky.server import common as server_common
    from sky.skylet import autostop_lib
    from sky.utils import common_utils

    for line in sys.stdin:
        request = json.loads(line)
        server_common.get_api_server_status_response.cache_clear()  # the SDK caches even the status "down"
        try:
            answer = {"ok": True, "value": VERBS[request.pop("ask")](**request)}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = {"ok": False, "error": kinds, "message": plain(error)[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
