"""Call a Ray cluster through its dashboard's Jobs API, and parse the replies.

The module uses the HTTP client that gpuwarden already has. Ray's own client takes up 380 MB, must match the cluster's
version, and sends the same six requests. A list in an unknown format is never treated as an empty list.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

import anyio

from gpuwarden.backends._slurm_rows import Row
from gpuwarden.core.engine import UNLIMITED, EngineLimits, EngineRequest, Queue
from gpuwarden.core.errors import AuthFailed, BadReply, NotSupported, Unreachable
from gpuwarden.core.models import Allocation, Place
from gpuwarden.core.sanitize import line

PORT: Final = 8265
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
CONNECT_S: Final = 10.0
REPLY_S: Final = 40.0
MAX_REPLY: Final = 256 << 20
OLDEST: Final = (2, 8)
"""The first version that reports the exit code of a job's command."""
MARK: Final = "gpuwarden_job"
FOLDER: Final = "gpuwarden_folder"
ATTEMPT: Final = "gpuwarden_attempt"
RESERVES: Final = "gpuwarden_reserves"
"""Keys of a job's metadata: its stem, its run folder, its attempt, and whether it reserves resources.

Ray's list does not contain the resources.
"""

_ATTEMPT: Final = re.compile(r"[1-9][0-9]{0,3}")
_PYTHON: Final = re.compile(r"/lib(?:64)?/python([0-9])\.([0-9]{1,2})/(?:site|dist)-packages/ray/")
_VERSION: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")

# Ray's job states, mapped to the states that `_slurm_observation` combines with the runner's status.
_STATES: Final = {
    "PENDING": "PENDING",
    "RUNNING": "RUNNING",
    "SUCCEEDED": "COMPLETED",
    "STOPPED": "CANCELLED",
    "FAILED": "FAILED",
}
_QUEUE_TIMEOUT: Final = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
_TAKEN: Final = frozenset(
    {
        "JOB_SUPERVISOR_ACTOR_DIED",
        _QUEUE_TIMEOUT,
        "JOB_SUPERVISOR_ACTOR_START_FAILURE",
        "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
    }
)
"""Failures of the node or of Ray's supervisor process, not of the command."""


def submission_id(stem: str, attempt: int, run_dir: str) -> str:
    """Return the submission id of an attempt. Ray rejects a second job with the same id."""
    return f"{stem}-a{attempt}-{hashlib.sha256(run_dir.encode()).hexdigest()[:8]}"


def address(place: Place) -> tuple[str, int]:
    """Return the host and port of a cluster's dashboard."""
    text = place.host or "127.0.0.1"
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.startswith("[")) and 0 < int(port) < 65_536:
        return host.strip("[]"), int(port)
    return text.strip("[]"), PORT


def is_here(host: str) -> bool:
    """Return whether a host is this machine, that is, whether one of its addresses can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: an invalid DNS name
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return True
        except OSError:
            continue
    return False


async def ask(place: Place, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Send one request. Return the status and the parsed JSON of the reply, or its text if it is not JSON.

    Raises `Unreachable` if no complete reply arrives, or `AuthFailed` if the cluster requires a token.
    """
    import httpx2

    host, port = address(place)
    secure = port == 443
    url = f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}{path}"
    headers = {"Accept": "application/json"}
    if (token := os.environ.get("RAY_AUTH_TOKEN")) and (secure or host in LOOPBACK):
        headers["Authorization"] = f"Bearer {token}"  # never send the token unencrypted over a network
    raw = bytearray()
    try:
        with anyio.fail_after(REPLY_S):
            async with (
                httpx2.AsyncClient(
                    timeout=httpx2.Timeout(REPLY_S, connect=CONNECT_S), trust_env=False, follow_redirects=False
                ) as client,
                client.stream(method, url, json=body, headers=headers) as reply,
            ):
                async for piece in reply.aiter_bytes():
                    raw += piece
                    if len(raw) > MAX_REPLY:
                        raise BadReply(
                            f"Ray's reply is longer than {MAX_REPLY >> 20} MiB", "The reply was ignored; try again."
                        )
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        why = f"Ray does not answer at {host}:{port} ({type(error).__name__})"
        raise Unreachable(why, "Check that `ray start --head` is running and its dashboard is reachable.") from error
    if reply.status_code in {401, 403}:
        raise AuthFailed(
            f"Ray at {host}:{port} requires a token",
            "Set RAY_AUTH_TOKEN. It is sent only over TLS or to this machine; for other clusters, use an SSH tunnel.",
        )
    try:
        return reply.status_code, json.loads(raw)
    except (ValueError, RecursionError):
        return reply.status_code, raw[-2_000:].decode("utf-8", "replace")


def rows_of(status: int, found: Any, folders: Mapping[str, str]) -> dict[str, Row]:
    """Return the last attempt of each job in `folders`, by stem. `folders` maps the stem of each job to its run folder.

    A job belongs to gpuwarden only if both its metadata and its id match the folder, because another user could copy
    one of them. All other fields of other jobs are ignored, so an invalid field can't make gpuwarden's jobs unreadable.
    """
    if status >= 500:
        raise Unreachable(f"Ray does not list its jobs: {last_line(found)}", "Try again.")
    if status != 200 or not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise BadReply("Ray's job list has an unknown format", "Check that Ray's dashboard answers at this address.")
    if not all(row.get("type") == "DRIVER" or isinstance(row.get("submission_id"), str) for row in found):
        raise BadReply("Ray lists jobs in an unknown format", "The list was ignored; try again.")
    rows: dict[str, Row] = {}
    for raw in found:
        marks = raw.get("metadata")
        if not isinstance(marks, dict):
            continue
        stem, folder, attempt = (str(marks.get(name)) for name in (MARK, FOLDER, ATTEMPT))
        if folders.get(stem) != folder or not _ATTEMPT.fullmatch(attempt):
            continue
        if raw.get("submission_id") != submission_id(stem, int(attempt), folder):
            continue
        row = _row(raw, stem, int(attempt))
        if stem not in rows or row.attempt > rows[stem].attempt:
            rows[stem] = row
    return rows


def _row(raw: Mapping[str, Any], stem: str, attempt: int) -> Row:
    state = _STATES.get(str(raw.get("status")))
    if state is None:
        raise BadReply("Ray lists one of gpuwarden's jobs in an unknown format", "The list was ignored; try again.")
    error, code = str(raw.get("error_type") or ""), raw.get("driver_exit_code")
    if state == "FAILED" and error in _TAKEN:
        state = "NODE_FAIL"
    # A job that reserves nothing does not wait for resources, so its runtime environment took too long.
    dropped = error == _QUEUE_TIMEOUT and raw["metadata"].get(RESERVES) == "yes"
    code = code if type(code) is int and abs(code) < 1 << 31 and state in {"FAILED", "COMPLETED"} else None
    message = last_line(raw.get("message"))
    return Row(
        stem=stem,
        attempt=attempt,
        id=0,
        state=state,
        flags=frozenset(),
        exit_code=code if code is None or code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        submitted_at=_seconds(raw.get("start_time")) or 0.0,
        started_at=_seconds(raw.get("start_time")),
        ended_at=_seconds(raw.get("end_time")),
        allocation=Allocation(
            engine="ray",
            id=line(raw["submission_id"], 120),
            state=line(error or raw.get("status"), 60),
            why=message if state == "PENDING" else "",
            nodes=line(raw.get("driver_node_id") or "", 80),
        ),
        message=message if state in {"FAILED", "NODE_FAIL"} else "",
        dropped=dropped,
    )


def last_line(text: object) -> str:
    """Return the last line of a message from Ray, which names the cause. A log or traceback may precede it."""
    lines = [row.strip() for row in str(text or "").splitlines() if row.strip(" .\t")]
    return line(lines[-1] if lines else "no reason given", 300)


def _seconds(value: object) -> float | None:
    return value / 1000 if isinstance(value, int | float) and 0 < value < 1e15 else None


def read_limits(
    version: tuple[int, Any], nodes: tuple[int, Any], cluster: tuple[int, Any], request: EngineRequest
) -> EngineLimits:
    """Return a cluster's limits from its version, its list of nodes and its autoscaler's report."""
    number = version[1].get("ray_version") if version[0] == 200 and isinstance(version[1], dict) else None
    parts = _VERSION.match(str(number or ""))
    if parts is None:
        raise BadReply("Ray's dashboard reports no version", "Check that Ray answers at this address.")
    if (int(parts[1]), int(parts[2])) < OLDEST:
        raise NotSupported(f"Ray {line(number, 40)} is too old: it does not report exit codes", "Use Ray 2.8 or newer.")
    # If there is no autoscaler, Ray's monitor reports a made-up type for each node. Only such a report proves that no
    # node will be added. It appears a few seconds after the head node starts, and never with KubeRay.
    kinds = _part(cluster[1], "data", "clusterStatus", "autoscalerReport", "nodeTypeMapping")
    made_up = isinstance(kinds, Mapping) and bool(kinds) and all(kinds[node] == f"node_{node}" for node in kinds)
    queue = _queue(nodes[1], fixed=made_up and nodes[0] == cluster[0] == 200)
    return EngineLimits(engine="ray", version=line(number, 40), request=request, queues=(queue,), requeue_s=0.0)


def python_of(nodes: tuple[int, Any]) -> tuple[int, int] | None:
    """Return a cluster's Python version, read from Ray's path on each node; None if the paths do not show a single
    version.

    Ray's dashboard does not report the version, and Ray accepts only nodes with the same version.
    """
    listed = _part(nodes[1], "data", "summary")
    found = set()
    for node in listed if nodes[0] == 200 and isinstance(listed, list) else ():
        words = _part(node, "cmdline")
        if _part(node, "raylet", "state") == "ALIVE":
            found.add(
                _PYTHON.search(words[0]) if isinstance(words, list) and words and isinstance(words[0], str) else None
            )
    versions = {(int(match[1]), int(match[2])) if match else None for match in found}
    return versions.pop() if len(versions) == 1 else None


def _part(value: object, *names: str) -> object:
    """Return a value from nested objects, or None if it is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _queue(found: object, *, fixed: bool) -> Queue:
    """Return the maximum resources of one node: unlimited unless the list of nodes is known and fixed."""
    plain = Queue(name="cluster", default=True, open=True, max_s=UNLIMITED)
    listed = _part(found, "data", "result", "result")
    rows = listed if isinstance(listed, list) else []
    live = [_part(node, "resources_total") for node in rows if _part(node, "state") != "DEAD"]
    if not fixed or not live or not all(isinstance(has, Mapping) for has in live):
        return plain
    gpus: dict[str, int] = {}
    most = {"CPU": 0.0, "memory": 0.0}
    for has in live:
        amounts = {
            str(name): float(n)
            for name, n in (has.items() if isinstance(has, Mapping) else ())
            if isinstance(n, int | float) and 0 < n < 1e18
        }
        most = {name: max(most[name], amounts.get(name, 0)) for name in most}
        kinds = [name.partition(":")[2].lower() for name in amounts if name.startswith("accelerator_type:")]
        for kind in kinds or [""] if "GPU" in amounts else []:
            gpus[kind] = max(gpus.get(kind, 0), int(amounts["GPU"]))
    cpus, memory_mb = int(most["CPU"]), int(most["memory"] / 2**20)
    return plain.model_copy(update={"nodes": len(live), "cpus": cpus, "memory_mb": memory_mb or None, "gpus": gpus})
