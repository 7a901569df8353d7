"""Provider `paperspace`: Paperspace (DigitalOcean) machines.

| variable | meaning |
|---|---|
| `PAPERSPACE_API_KEY`, `PAPERSPACE_API_KEY_FILE` | one of the team's API keys |
| `PAPERSPACE_TEMPLATE` | id of the template for new machines; default: the newest ML-in-a-Box for the machine type |
| `PAPERSPACE_REGION` | region for new machines; required |
| `PAPERSPACE_NETWORK`, `PAPERSPACE_STARTUP_SCRIPT` | optional ids of a private network and of a startup script |

New Linux machines accept the account's SSH keys. The API does not report a price list or the balance. Only existing
machines have a price, so a quote uses the price of a machine of the same type in the team, and a price cap can't be
enforced. Without a balance, gpuwarden can't predict when the credit runs out. A machine must be off before it can be
deleted. A deadline becomes the machine's auto-shutdown, which is a hard power-off; without a deadline, auto-shutdown is
disabled.

The API description does not specify the unit of the usage rate or the storage rate. Paperspace's older API had an
hourly rate for usage and a monthly rate for storage. Every disk in the price list costs less than a dollar an hour and
at least a dollar a month, so a storage rate of at least one dollar is treated as monthly.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotFound, NotSupported, WardenError, nothing_sent
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._http import (
    Api,
    ApiResponse,
    Ident,
    Readable,
    ResponseModel,
    is_safe_id,
    readable,
    unclear_instance,
)
from gpuwarden.providers._rented import MAX_PAGES, Findings, HttpProvider, epoch, gpu_matches, no_such, positive_price

D = TypeVar("D")
_S = InstanceState
PAGE: Final = 100
DISKS_GB: Final = (50, 100, 250, 500, 1000, 2000)
MOST_HOURS: Final = 168
MACHINES: Final = ("H100", "A100-80G", "A100", "A6000", "A5000", "A4000", "V100", "V100-32G", "P6000")
HOURS_A_MONTH: Final = 730
USUAL_TEMPLATE: Final = "ml-in-a-box"
STATES: Final[dict[str, tuple[InstanceState, bool | None]]] = {
    "provisioning": (_S.BOOTING, None),
    "starting": (_S.BOOTING, None),
    "restarting": (_S.BOOTING, True),
    "upgrading": (_S.BOOTING, None),
    "serviceready": (_S.BOOTING, True),
    "ready": (_S.RUNNING, True),
    "stopping": (_S.STOPPING, True),
    "off": (_S.STOPPED, False),
    "failed": (_S.FAILED, None),
}


class _MachineId(ResponseModel):
    id: Ident
    name: str


class _Machine(_MachineId):
    state: Literal[
        "provisioning", "starting", "restarting", "upgrading", "serviceready", "ready", "stopping", "off", "failed"
    ]
    publicIp: str | None = None  # noqa: N815
    dtCreated: datetime | None = None  # noqa: N815
    machineType: str | None = None  # noqa: N815
    usageRate: float | None = None  # noqa: N815
    storageRate: float | None = None  # noqa: N815


class _Wrapped(ResponseModel):
    data: _Machine


class _Page(ResponseModel, Generic[D]):
    items: tuple[D, ...]
    hasMore: bool  # noqa: N815
    nextPage: str | None = None  # noqa: N815


class _Fits(ResponseModel):
    machineTypeLabel: str  # noqa: N815
    isAvailable: bool  # noqa: N815


class _Template(ResponseModel):
    id: str
    name: str
    dtCreated: datetime  # noqa: N815
    availableMachineTypes: tuple[_Fits, ...]  # noqa: N815

    def fits(self, kind: str) -> bool:
        """Return whether machines of a type can be created from the template."""
        return any(f.machineTypeLabel == kind and f.isAvailable for f in self.availableMachineTypes)


class _Availability(ResponseModel):
    available: bool


_Changed: TypeAlias = _Wrapped | _Machine
"""According to the API description, the reply is a machine, but the service may wrap it together with an event."""


class _Team(ResponseModel):
    id: Ident


class _Session(ResponseModel):
    team: _Team


class _Deleted(ResponseModel):
    """The reply to a deletion: any object that is not an error."""

    code: None = None
    message: None = None
    error: None = None


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    code, text = reply.text("code").upper(), reply.text("message", "error").casefold()
    if reply.status == 404 and (code == "NOT_FOUND" or "not found" in text):
        return NotFound(f"Paperspace did not find the requested object: {message}")
    if 400 <= reply.status < 500 and ("out of capacity" in text or code == "OUT_OF_CAPACITY"):
        return NoCapacity(
            f"Paperspace currently has no free capacity ({message})",
            "Try another machine type or region, or try again later.",
        )
    return None


class Paperspace(HttpProvider):
    """A `Provider` for one Paperspace team."""

    name = "paperspace"
    machine_options = frozenset({"region"})
    api = Api(
        platform="Paperspace",
        url="https://api.paperspace.com/v1",
        url_variable="GPUWARDEN_PAPERSPACE_URL",
        key_variable="PAPERSPACE_API_KEY",
        refusal=_refusal,
        message_fields=("message", "error", "code"),
    )
    max_name = 64

    async def check_account(self) -> Findings:
        """Return a finding if a setting that is required to rent a machine is missing."""
        if self.env.get("PAPERSPACE_REGION"):
            return []
        return [self.finding(Severity.ERROR, "PAPERSPACE_REGION is not set, but a machine needs a region", "Set it.")]

    async def ask_account(self) -> Answer[str]:
        """Return the id of the team that the key belongs to."""
        answer = await self.client.ask("GET", "/auth/session", _Session)
        return answer if isinstance(answer, Unknown) else Known(answer.value.team.id)

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the highest price among the team's machines of this type, if any. Raises NoCapacity if the
        region has no free machine of this type.
        """
        kind, region = self._machine_type(resources), self.option(resources, "region", "PAPERSPACE_REGION")
        if region:
            where = {"machineType": kind, "region": region}
            answer = await self.client.ask("GET", "/machine-availability", _Availability, params=where)
            if isinstance(answer, Known) and not answer.value.available:
                raise NoCapacity(
                    f"Paperspace has no {kind} available in {region}", "Try another region, or try again later."
                )
        machines = await self._machines()
        same = (
            []
            if isinstance(machines, Unknown)
            else [
                m for m in readable(machines.value, _Machine) if m.machineType == kind and positive_price(m.usageRate)
            ]
        )
        dearest = max(same, key=lambda m: m.usageRate or 0.0, default=None)
        source = "Paperspace (its API has no price list)"
        note = f"{kind}; see the price list at paperspace.com/pricing"
        if dearest is not None:
            source = "Paperspace, from a machine of the same type in this team"
            note = f"{kind}, like machine {dearest.id}"
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=None if dearest is None else _usd_per_hour(dearest),
                source=source,
                at=self.clock.now(),
                note=note,
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent one machine. It starts automatically."""
        with nothing_sent():
            order = self._order(self.label(token), resources)
            template = await self._template(str(order["machineType"]))
        if isinstance(template, Unknown):
            return template
        order["templateId"] = template.value
        shape: Any = _Changed
        answer: Answer[_Changed] = await self.client.ask("POST", "/machines", shape, body=order, creates=True)
        if isinstance(answer, Unknown):
            return answer
        made = answer.value.data if isinstance(answer.value, _Wrapped) else answer.value
        seen = self._view(made).model_copy(update={"token": token})
        if seen.state not in {_S.BOOTING, _S.RUNNING}:  # the reply contains the state before the request
            seen = seen.model_copy(update={"state": _S.BOOTING, "meter": None})
        return Known(seen)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one machine."""
        answer = await self.client.ask("GET", f"/machines/{id}", _Machine)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every machine in the team, from all pages."""
        answer = await self._machines()
        if isinstance(answer, Unknown):
            return answer
        if answer.value and not readable(answer.value, _Machine):
            return Unknown(f"none of the {len(answer.value)} machines that Paperspace listed could be read")
        return Known(tuple(self._view(m) for m in answer.value))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a machine that is off. A dynamic address changes."""
        return await self._patch(id, "start")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a power-off; storage and addresses are still billed."""
        return await self._patch(id, "stop")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Delete a machine. Raises Conflict unless it is off."""
        if not is_safe_id(id):
            return Known(None)
        before = await self.get(id)
        if isinstance(before, Unknown):
            return before
        if before.value is None:
            return Known(None)
        if before.value.state not in {_S.STOPPED, _S.FAILED}:
            raise Conflict(
                f"machine {id} is {before.value.state}, but Paperspace deletes only machines that are off", "Stop it."
            )
        try:
            answer = await self.client.ask("DELETE", f"/machines/{id}", _Deleted, empty=True)
        except NotFound:
            return Known(None)
        return answer if isinstance(answer, Unknown) else Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _machines(self) -> Answer[tuple[_Machine | _MachineId, ...]]:
        answer = await self._pages("/machines", _Page[_Machine | _MachineId])
        return answer if isinstance(answer, Unknown) else Known(tuple({m.id: m for m in answer.value}.values()))

    async def _pages(self, path: str, shape: type[_Page[D]]) -> Answer[tuple[D, ...]]:
        """Return the items of all pages, or Unknown if a cursor is missing or repeats."""
        found: tuple[D, ...] = ()
        params: dict[str, str | int] = {"limit": PAGE}
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            answer = await self.client.ask("GET", path, shape, params=params)
            if isinstance(answer, Unknown):
                return answer
            found += answer.value.items
            if not answer.value.hasMore:
                return Known(found)
            after = answer.value.nextPage
            if not after or after in seen or not answer.value.items:
                return Unknown(f"Paperspace's list of {path} continues without a cursor")
            seen.add(after)
            params["after"] = after
        return Unknown(f"Paperspace's list of {path} does not end")

    async def _template(self, kind: str) -> Answer[str]:
        """Return the template id for a new machine.

        Raises BadRequest if the template does not support the machine type.
        """
        given = self.env.get("PAPERSPACE_TEMPLATE")
        templates: list[_Template] = []
        for path in ("/os-templates", *(("/custom-templates",) if given else ())):
            answer = await self._pages(path, _Page[Readable[_Template]])
            if isinstance(answer, Unknown) and not given:
                return answer
            templates += [] if isinstance(answer, Unknown) else readable(answer.value, _Template)
        fitting = sorted((t for t in templates if t.fits(kind)), key=lambda t: (epoch(t.dtCreated), t.id))
        usual = [t for t in fitting if USUAL_TEMPLATE in t.name.casefold()]
        ways = ", ".join(f"{t.id} ({t.name})" for t in reversed(fitting[-8:])) or "none in the list"
        if given and any(t.id == given for t in templates) and all(t.id != given for t in fitting):
            raise BadRequest(f"the template {given} does not support {kind}", f"Compatible templates: {ways}.")
        if not given and not usual:
            raise BadRequest(
                f"Paperspace lists no ML-in-a-Box template for {kind}",
                f"Set PAPERSPACE_TEMPLATE; compatible templates: {ways}.",
            )
        return Known(given or usual[-1].id)

    async def _patch(self, id: str, verb: str) -> Answer[None]:  # noqa: A002
        if not is_safe_id(id):
            raise no_such("Paperspace", id)
        answer: Answer[_Changed] = await self.client.ask("PATCH", f"/machines/{id}/{verb}", _Changed)  # type: ignore[arg-type]
        return answer if isinstance(answer, Unknown) else Known(None)

    def _machine_type(self, resources: Resources) -> str:
        asked = self.refuse_unsold(resources)
        kind = next((m for m in MACHINES if gpu_matches(asked, (m,))), asked)
        if not is_safe_id(kind):
            raise BadRequest(f"Paperspace has no machine type {asked!r}", f"Known types: {', '.join(MACHINES)}.")
        return kind if resources.gpu_count == 1 else f"{kind}x{resources.gpu_count}"

    def _order(self, label: str, resources: Resources) -> dict[str, object]:
        kind = self._machine_type(resources)
        if resources.max_price_usd_per_hour is not None:
            raise NotSupported(
                "Paperspace's API has no price list, so a price cap can't be enforced",
                "Omit the price cap; the job's own cost cap still applies.",
            )
        if not (region := self.option(resources, "region", "PAPERSPACE_REGION")):
            raise BadRequest("PAPERSPACE_REGION is not set, but Paperspace requires a region", do(Action.DOCTOR))
        disk_gb = resources.disk_gb or DISKS_GB[1]
        sizes = [size for size in DISKS_GB if size >= disk_gb]
        if not sizes:
            raise BadRequest(f"Paperspace's largest disk has {DISKS_GB[-1]} GB; the request needs {disk_gb} GB")
        order: dict[str, object] = {
            "name": label,
            "machineType": kind,
            "region": region,
            "diskSize": sizes[0],
            "publicIpType": "dynamic",
            "startOnCreate": True,
            "autoShutdownEnabled": False,
        }
        # Paperspace shuts the machine down at the deadline, rounded up to whole hours. This is disabled if the deadline
        # exceeds the maximum. gpuwarden does not promise a shutdown time, because no source confirms that the shutdown
        # works. The field names are those in DigitalOcean's documentation; other descriptions name them differently.
        if resources.deadline_s is not None and (hours := math.ceil(resources.deadline_s / 3600)) <= MOST_HOURS:
            order |= {"autoShutdownEnabled": True, "autoShutdownTimeout": hours}
        for field, name in (("networkId", "PAPERSPACE_NETWORK"), ("startupScriptId", "PAPERSPACE_STARTUP_SCRIPT")):
            if value := self.env.get(name):
                order[field] = value
        return order

    def _view(self, m: _Machine | _MachineId) -> Instance:
        if not isinstance(m, _Machine):
            return unclear_instance(m.id, self.token_in(m.name), self.api.platform)
        state, meter = STATES[m.state]
        return Instance(
            id=m.id,
            token=self.token_in(m.name),
            state=state,
            place=self.place(m.id, m.publicIp, None) if state is _S.RUNNING and m.publicIp else None,
            meter=meter,
            price_usd_per_hour=None if state is _S.STOPPED else _usd_per_hour(m),
            stopped_usd_per_hour=_storage_usd_per_hour(m),
            created_at=epoch(m.dtCreated),
            why=f"state {m.state}",
        )


def _usd_per_hour(m: _Machine) -> float | None:
    """Return the hourly price of a running machine, including its disk, or None if its usage rate is unknown."""
    usage = positive_price(m.usageRate)
    return None if usage is None else usage + (_storage_usd_per_hour(m) or 0.0)


def _storage_usd_per_hour(m: _Machine) -> float | None:
    """Return the hourly price of the disk, which is the same while the machine is off.

    A rate of one dollar or more is monthly.
    """
    rate = positive_price(m.storageRate)
    return rate / HOURS_A_MONTH if rate is not None and rate >= 1 else rate


ACCOUNT_KEYS: Final = (Paperspace.api.key_variable, "PAPERSPACE_APIKEY", "GRADIENT_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={
        "pspace": (
            "machine|machines delete|destroy|stop|restart",
            "notebook|notebooks|deployment|deployments|cluster|clusters|shared-drive|sharedDrives delete|stop",
        )
    },
    aliases={"paperspace": "pspace", "paperspace-node": "pspace", "gradient": "pspace"},
    hosts=("paperspace.com", "paperspace.io"),
    requests=(r"/stop\b", r"destroyMachine"),
    servers=("paperspace", "gradient"),
)


def create(profile: Profile, state: Path, clock: Clock) -> Paperspace:
    """Return the provider for one profile. The provider stores no files."""
    return Paperspace(profile, clock)
