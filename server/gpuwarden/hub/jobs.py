"""Hugging Face Jobs over the Hub's REST API, shared by the backend and the provider.

The client library's own calls are not used: reading a live log blocks for seconds, listing jobs ignores the given
token, and running a local script prints to standard output, which the MCP server needs for its protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import anyio

from gpuwarden.core.errors import (
    AuthFailed,
    BadReply,
    BadRequest,
    NoCapacity,
    NotFound,
    NotSupported,
    Unreachable,
)
from gpuwarden.core.models import Known, Quote
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubClient, HubResponse

JOB, ATTEMPT, LEASE = "gpuwarden-job", "gpuwarden-attempt", "gpuwarden-lease"
FINAL = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
STAGES = FINAL | {"SCHEDULING", "RUNNING"}
IDLE_S = 1.5
USAGE_S = 2.5
_ID = re.compile(r"[0-9a-f]{24}")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="next"')


async def namespace(hub: HubClient) -> str:
    """Return the name of the token's account, which owns the jobs. Raises AuthFailed or Unreachable."""
    if not hub.config.token:
        raise AuthFailed("no Hugging Face token is set", "Set HF_TOKEN in gpuwarden's environment.")
    from gpuwarden.hub.preflight_facts import read_account  # slow import

    account = await read_account(hub)
    if not isinstance(account, Known):
        raise Unreachable(f"the token's account could not be looked up: {account.why}")
    if not account.value.name:
        raise AuthFailed("the Hub rejected the token", "Create a new token at huggingface.co/settings/tokens.")
    return account.value.name


async def submit(hub: HubClient, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start one job. Raises Unreachable if it is unknown whether the job was started."""
    return checked(await hub.send("POST", f"/api/jobs/{owner}", dict(body)))


async def inspect(hub: HubClient, owner: str, job_id: str) -> dict[str, Any] | None:
    """Return one job; None if no job has that id."""
    reply = await hub.get(f"/api/jobs/{owner}/{job_id}")
    return None if reply.status == 404 else checked(reply)


async def cancel(hub: HubClient, owner: str, job_id: str) -> None:
    """Cancel a job. No error is raised if it has ended or does not exist."""
    reply = await hub.send("POST", f"/api/jobs/{owner}/{job_id}/cancel")
    if reply.status not in {200, 404, 409}:
        refuse(reply)


async def listed(hub: HubClient, owner: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every job with these labels, from all pages. Raises BadReply for a page in an unknown format."""
    rows = await paged(hub, f"/api/jobs/{owner}", {"label": [f"{k}={v}" for k, v in labels.items()]})
    found = [checked(HubResponse(200, row, {})) for row in rows]
    return [j for j in found if all(labels_of(j).get(k) == v for k, v in labels.items())]


async def live(hub: HubClient, owner: str) -> list[dict[str, Any]]:
    """Return every running or starting job in a namespace."""
    rows = await paged(hub, f"/api/jobs/{owner}", {"stage": ["RUNNING", "SCHEDULING"]})
    return [checked(HubResponse(200, row, {})) for row in rows]


async def scheduled(hub: HubClient, owner: str) -> list[dict[str, Any]]:
    """Return the scheduled jobs in a namespace. Each one starts jobs automatically unless it is suspended."""
    rows = await paged(hub, f"/api/scheduled-jobs/{owner}")
    for row in rows:
        if not _ID.fullmatch(str(row.get("id"))) or not isinstance(row.get("jobSpec"), dict):
            raise BadReply("the Hub listed a scheduled job in an unknown format", "Try again.")
    return rows


async def paged(
    hub: HubClient,
    path: str,
    params: Mapping[str, Any] | None = None,
    *,
    missing: Sequence[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of all pages. For a 404, `missing` is used as the page's rows. Raises BadReply for an
    invalid page.
    """
    rows: list[dict[str, Any]] = []
    for _ in range(1_000):
        reply = await hub.get(path, params)
        if reply.status == 404 and missing is not None:
            return [*rows, *missing]
        if reply.status != 200:
            refuse(reply)
        if not isinstance(reply.json, list) or not all(isinstance(row, dict) for row in reply.json):
            raise BadReply(f"the Hub's response to {path} is not a JSON list", "The response was ignored; try again.")
        rows += reply.json
        more = _NEXT.search(reply.headers.get("link", ""))
        if not more or not more[1].startswith(hub.config.endpoint + "/"):
            return rows
        path, params = more[1].removeprefix(hub.config.endpoint), {}
    raise BadReply(f"the Hub's list at {path} has too many pages")


async def make_bucket(hub: HubClient, bucket: str) -> None:
    """Create a private bucket if it does not exist."""
    reply = await hub.get(f"/api/buckets/{bucket}")
    if reply.status == 404:
        reply = await hub.send("POST", f"/api/buckets/{bucket}", {"visibility": "private"})
    if reply.status not in {200, 409}:
        refuse(reply)


async def usage(hub: HubClient, owner: str, job_id: str) -> dict[str, Any]:
    """Return a running job's current usage, which the Hub measures once a second; empty if no data arrives in time."""
    with anyio.move_on_after(USAGE_S):
        async with hub.stream("GET", f"/api/jobs/{owner}/{job_id}/metrics", timeout_s=USAGE_S) as response:
            if response.status_code != 200:
                return {}
            async for row in response.aiter_lines():
                if row.startswith("data:"):
                    try:
                        event = json.loads(row[5:])
                    except ValueError:
                        return {}
                    return event if isinstance(event, dict) else {}
    return {}


MOST_MICRO_USD: Final = 10**15
"""Higher prices, in millionths of a US dollar, are ignored, so that sums stay finite."""


async def prices(hub: HubClient) -> dict[str, float]:
    """Return the hardware flavors that the Hub currently offers, with their prices in US dollars per hour."""
    reply = await hub.get("/api/jobs/hardware")
    if reply.status != 200 or not isinstance(reply.json, list):
        raise BadReply(f"the Hub returned HTTP {reply.status} for its hardware list: {reply.message}")
    found = {}
    for item in (item for item in reply.json if isinstance(item, dict)):
        cost, unit = item.get("unitCostMicroUSD"), {"minute": 60, "hour": 1}.get(str(item.get("unitLabel")))
        if isinstance(item.get("name"), str) and isinstance(cost, int | float) and unit and 0 <= cost < MOST_MICRO_USD:
            found[item["name"]] = cost * unit / 1e6
    return found


def flavor_of(gpu: str | None, count: int, known: Mapping[str, float]) -> str:
    """Return the flavor for a request such as `a100-large` or `a100` x 4. Raises BadRequest, with the known
    flavors, if none matches.
    """
    word = (gpu or "cpu-basic").lower()
    stem = word.removesuffix("-large").removesuffix("-small")
    wishes = [word] if count == 1 else [f"{word}x{count}", f"{stem}x{count}"]
    wishes += [f"{word}x1", f"{word}-large", f"{word}-small"] if count == 1 else []
    for wish in wishes:
        if wish in known:
            return wish
    named = f"{word} x {count}" if count > 1 else word
    raise BadRequest(
        f"Hugging Face Jobs has no flavor for {line(named, 60)}", f"Use one of {', '.join(sorted(known))}."
    )


def quote(platform: str, flavor: str, known: Mapping[str, float], at: float) -> Quote:
    """Return the price of a flavor."""
    return Quote(
        platform=platform,
        price_usd_per_hour=known[flavor],
        source="the Hub's hardware list",
        at=at,
        note=f"{flavor}, billed by the minute while starting and running",
    )


async def read_log(hub: HubClient, owner: str, job_id: str, upto: int) -> tuple[bytes, bool]:
    """Return about the first `upto` bytes of the log, and whether the log was read to its current end.

    A running job's stream stays open. The log counts as read to its end after `IDLE_S` seconds without data.
    """
    text = bytearray()
    try:
        async with hub.stream("GET", f"/api/jobs/{owner}/{job_id}/logs", timeout_s=60) as response:
            if response.status_code != 200:
                raise NotFound(f"the Hub returned HTTP {response.status_code} for the log of {job_id}")
            lines = response.aiter_lines().__aiter__()
            while len(text) < upto:
                row = ""
                with anyio.move_on_after(IDLE_S) as quiet:
                    row = await lines.__anext__()
                if quiet.cancelled_caught:
                    return bytes(text), True
                text += _event(row)
    except StopAsyncIteration:
        return bytes(text), True
    return bytes(text), False


def _event(row: str) -> bytes:
    if not row.startswith("data:"):
        return b""
    try:
        data = json.loads(row[5:]).get("data")
    except (ValueError, AttributeError):
        return b""
    if not isinstance(data, str) or data.startswith("===== Job started"):
        return b""
    return data.encode("utf-8", "replace") + b"\n"


def checked(reply: HubResponse) -> dict[str, Any]:
    """Return a job as the Hub describes it. Raises BadReply for an unknown format, and the same errors as `refuse`."""
    if reply.status not in {200, 201}:
        refuse(reply)
    job = reply.json
    if not isinstance(job, dict) or not _ID.fullmatch(str(job.get("id"))) or stage_of(job) not in STAGES:
        raise BadReply("the Hub's response about a job has an unknown format", "The response was ignored; try again.")
    return job


def refuse(reply: HubResponse) -> None:
    """Raise the `WardenError` that corresponds to the HTTP status."""
    message = reply.message
    if reply.status in {401, 403}:
        raise AuthFailed(
            f"the Hub denied access: {message}", "The token needs write access and the account needs credits."
        )
    if reply.status == 402:
        raise NoCapacity(
            f"the account can't pay for this: {message}", "Add credits at huggingface.co/settings/billing."
        )
    if reply.status in {400, 422}:
        raise BadRequest(f"the Hub refused the job: {message}", "Fix the job, then submit it again.")
    if reply.status == 404:
        raise NotSupported(f"this account can't use Hugging Face Jobs: {message}", "Check the token's account.")
    raise BadReply(f"the Hub returned HTTP {reply.status}: {message}")


def stage_of(job: Mapping[str, Any]) -> str:
    """Return the job's stage, or an empty string if the Hub reports none."""
    status = job.get("status")
    return str(status.get("stage")) if isinstance(status, dict) else ""


def moment(text: object) -> float | None:
    """Convert a time from the Hub to seconds since the epoch; return None if it is not a valid time."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


def message_of(job: Mapping[str, Any]) -> str:
    """Return the platform's message about the stage. A timeout has no separate stage, only this message."""
    status = job.get("status")
    return line((status.get("message") if isinstance(status, dict) else "") or "", 300)


def labels_of(job: Mapping[str, Any]) -> dict[str, str]:
    """Return a job's labels."""
    labels = job.get("labels")
    return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}
