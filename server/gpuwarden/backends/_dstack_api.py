"""Call a dstack server over its REST API: models for the relevant parts of its replies, and one method per request.

dstack's Python package is not used. Its client has no time limit for requests, reserves ports and opens SSH tunnels on
its own, and repeats requests after a lost connection, even those that start a run.

Requests omit the client version, so the server replies in its newest format. A server older than `OLDEST` is rejected,
because its API differs. dstack returns an empty list for a project that the token can't read, so another request checks
that the project is accessible before an empty list is accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadReply, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import Answer, Known
from gpuwarden.core.sanitize import line
from gpuwarden.providers._http import Api, ApiClient, ApiResponse, Ident, ResponseModel

T = TypeVar("T")
OLDEST: Final = (0, 21)
"""The oldest supported server version. Since this version, runs can be started only in fleets."""
PAGE: Final = 100
MAX_PAGES: Final = 100
JOB, ATTEMPT, LEASE = "gpuwarden-job", "gpuwarden-attempt", "gpuwarden-lease"
ENDED: Final = frozenset({"terminated", "failed", "done"})


class InstanceType(ResponseModel):
    """The hardware of an offer or instance."""

    name: str = ""


class Offer(ResponseModel):
    """One machine that a run could use, and its price in USD per hour."""

    backend: str
    region: str
    price: float
    availability: str
    instance: InstanceType


class JobPlan(ResponseModel):
    """The offers for one job in a run, in the order in which dstack tries them."""

    offers: tuple[Offer, ...]


class Plan(ResponseModel):
    """The result of a dry run."""

    user: str
    job_plans: tuple[JobPlan, ...]


class Provisioned(ResponseModel):
    """The machine that a submission uses. `instance_id` is the cloud's id for the machine."""

    backend: str
    instance_id: str
    region: str
    price: float
    hostname: str | None = None
    instance_type: InstanceType = InstanceType()


class Submission(ResponseModel):
    """One submission of a job. If dstack's own `retry` setting applies, dstack creates another submission."""

    id: Ident
    status: str
    submitted_at: str
    finished_at: str | None = None
    termination_reason: str | None = None
    termination_reason_message: str | None = None
    exit_status: int | None = None
    job_provisioning_data: Provisioned | None = None


class _Job(ResponseModel):
    job_submissions: tuple[Submission, ...] = ()


class _Configuration(ResponseModel):
    tags: dict[str, str] | None = None


class _Spec(ResponseModel):
    run_name: str
    configuration: _Configuration


class _Fleet(ResponseModel):
    name: str


class Run(ResponseModel):
    """One run. After a run has ended, another run can reuse its name but never its id."""

    id: Ident
    project_name: str
    user: str
    submitted_at: str
    status: str
    status_message: str = ""
    termination_reason: str | None = None
    run_spec: _Spec
    jobs: tuple[_Job, ...]
    cost: float
    fleet: _Fleet | None = None

    @property
    def tags(self) -> Mapping[str, str]:
        """Return the run's tags; empty if it has none."""
        return self.run_spec.configuration.tags or {}

    @property
    def ours(self) -> bool:
        """Return whether gpuwarden started the run. A copy of its configuration has the same tags, but another name."""
        return self.tags.get(JOB) == self.run_spec.run_name

    @property
    def attempt(self) -> int:
        """Return the attempt number in the run's tags, or 1 if they lack a valid number."""
        text = self.tags.get(ATTEMPT, "1")
        return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else 1

    @property
    def ended(self) -> bool:
        """Return whether dstack reports that the run has ended."""
        return self.status in ENDED

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Return the submissions of the run's only job, oldest first."""
        return self.jobs[0].job_submissions if self.jobs else ()

    @property
    def machine(self) -> Provisioned | None:
        """Return the newest submission's machine."""
        return self.submissions[-1].job_provisioning_data if self.submissions else None


class FleetInstance(ResponseModel):
    """One machine in a fleet."""

    id: Ident
    name: str
    status: str
    created: str
    hostname: str | None = None
    price: float | None = None
    backend: str | None = None
    region: str | None = None
    fleet_name: str | None = None


class Fleet(ResponseModel):
    """A group of machines on which runs are started."""

    name: str
    instances: tuple[FleetInstance, ...]


class Gateway(ResponseModel):
    """A machine that publishes services. It is billed as long as it exists."""

    id: Ident
    name: str
    status: str


class LogEvent(ResponseModel):
    """A log entry, encoded in base64."""

    message: str


class Logs(ResponseModel):
    """One page of a log. `next_token` is None on the last page."""

    logs: tuple[LogEvent, ...]
    next_token: str | None = None


class _Info(ResponseModel):
    server_version: str | None


class _User(ResponseModel):
    username: str  # the reply also contains the user's token and private key, which are ignored


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Return the error if a reply contains one of dstack's error codes; otherwise None."""
    if reply.status == 400 and reply.at("detail.0.code") == "resource_not_exists":
        return NotFound(f"dstack did not find the requested object: {message}")
    if reply.status == 404 and isinstance(reply.at("detail.msg"), str):
        return NotFound("the dstack server has no such project", "Run `dstack project list` to list the projects.")
    if reply.status == 403 and isinstance(reply.at("detail.msg"), str):
        return AuthFailed(
            f"dstack refused the token: {message}", "Check DSTACK_TOKEN, and that its user is a member of the project."
        )
    return None


API: Final = Api(
    platform="dstack",
    url="http://127.0.0.1:3000",
    url_variable="DSTACK_SERVER_URL",
    key_variable="DSTACK_TOKEN",
    refusal=_refusal,
    message_fields=("detail.0.msg", "detail.msg", "detail"),
)


class DstackServer:
    """A client for one server that uses one user's token."""

    def __init__(self, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        self._client = ApiClient(API, clock, os.environ if env is None else env)
        self._version = ""

    @property
    def url(self) -> str:
        """Return the server's address."""
        return self._client.url

    def digest(self, salt: str) -> str:
        """Return a salted digest of the token and the server's address."""
        return self._client.digest(salt)

    async def _ask(self, path: str, shape: type[T], body: Mapping[str, Any], *, safe: bool = True) -> T:
        await self.version()
        return _value(await self._client.ask("POST", path, shape, body=dict(body), safe=safe))

    async def version(self) -> str:
        """Return the server's version, which is requested only once. Raises NotSupported if it is too old."""
        if not self._version:
            path = "/api/server/get_info"
            found = _value(await self._client.ask("POST", path, _Info, body={}, safe=True)).server_version or "dev"
            parts = re.match(r"(\d{1,4})\.(\d{1,4})", found)
            if parts is not None and (int(parts[1]), int(parts[2])) < OLDEST:
                raise NotSupported(
                    f"dstack {line(found, 40)} is too old: gpuwarden needs {OLDEST[0]}.{OLDEST[1]} or newer",
                    "Update the dstack server.",
                )
            if parts is None and found != "dev":
                raise BadReply(
                    f"the dstack server reports the unknown version {line(found, 40)}",
                    "Check that a dstack server is running at this address.",
                )
            self._version = found
        return self._version

    async def user(self) -> str:
        """Return the name of the token's user."""
        return (await self._ask("/api/users/get_my_user", _User, {})).username

    async def run_named(self, project: str, name: str) -> Run | None:
        """Return the run that currently has this name, or None."""
        return await self._one(project, {"run_name": name})

    async def run_with_id(self, project: str, ident: str) -> Run | None:
        """Return the run with this id, even if it was deleted; None if the project never had such a run."""
        return await self._one(project, {"id": ident})

    async def _one(self, project: str, body: Mapping[str, str]) -> Run | None:
        try:
            run = await self._ask(f"/api/project/{project}/runs/get", Run, body)
        except NotFound as refusal:
            if refusal.next_steps:  # the project itself is missing
                raise
            return None
        if body not in ({"run_name": run.run_spec.run_name}, {"id": run.id}):
            raise BadReply("dstack did not return the requested run", "Try again.")
        return run

    async def runs(self, project: str, *, active: bool, since: float | None = None) -> list[Run]:
        """Return a project's runs, newest first: only active runs, or all runs back to the time `since`."""
        found: list[Run] = []
        page: dict[str, Any] = {"project_name": project, "only_active": active, "limit": PAGE}
        for _ in range(MAX_PAGES):
            rows = await self._ask("/api/runs/list", tuple[Run, ...], page | {"job_submissions_limit": 10})
            found += rows
            if len(rows) < PAGE or (since is not None and (epoch(rows[-1].submitted_at) or since) < since):
                if not found:
                    await self.fleets(project)  # raises if the list is empty because the project is not accessible
                return found
            page |= {"prev_submitted_at": rows[-1].submitted_at, "prev_run_id": rows[-1].id}
        raise BadReply(f"dstack lists more than {PAGE * MAX_PAGES:,} runs", "Delete old runs in the project.")

    async def plan(self, project: str, spec: Mapping[str, Any]) -> Plan:
        """Return dstack's plan for a run, without starting it."""
        return await self._ask(
            f"/api/project/{project}/runs/get_plan", Plan, {"run_spec": dict(spec), "max_offers": 50}
        )

    async def apply(self, project: str, spec: Mapping[str, Any]) -> Run:
        """Start a run. dstack rejects the name of an active run, and deletes the record of an ended run with the same
        name.
        """
        body = {"plan": {"run_spec": dict(spec), "current_resource": None}, "force": False}
        return await self._ask(f"/api/project/{project}/runs/apply", Run, body, safe=False)

    async def stop(self, project: str, name: str, *, abort: bool) -> None:
        """Ask dstack to stop a run. The reply is empty, even for a run that does not exist."""
        body = {"runs_names": [name], "abort": abort}
        await self._ask(f"/api/project/{project}/runs/stop", type(None), body)

    async def fleets(self, project: str) -> tuple[Fleet, ...]:
        """Return a project's fleets with their machines."""
        return await self._ask(f"/api/project/{project}/fleets/list", tuple[Fleet, ...], {})

    async def gateways(self, project: str) -> tuple[Gateway, ...]:
        """Return a project's gateways."""
        return await self._ask(f"/api/project/{project}/gateways/list", tuple[Gateway, ...], {})

    async def logs(self, project: str, run: Run, submission: str, token: str | None) -> Logs:
        """Return the page of a submission's log that `token` identifies; None selects the first page."""
        body: dict[str, Any] = {"run_name": run.run_spec.run_name, "job_submission_id": submission, "limit": 1000}
        return await self._ask(
            f"/api/project/{project}/logs/poll", Logs, body | ({"next_token": token} if token else {})
        )


def _value(answer: Answer[T]) -> T:
    """Return the server's reply. Raises Unreachable if no reply arrived or its format is unknown."""
    if isinstance(answer, Known):
        return answer.value
    raise Unreachable(answer.why, "The request may have been carried out; the next call will check.")


def epoch(text: str | None) -> float | None:
    """Convert a time from dstack to seconds since the epoch; None if it is not a valid time."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None
