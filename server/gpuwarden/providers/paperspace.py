"""Provider `paperspace`: Paperspace (DigitalOcean) machines.

| variable | meaning |
|---|---|
| `PAPERSPACE_API_KEY`, `PAPERSPACE_API_KEY_FILE` | a key of the team |
| `PAPERSPACE_TEMPLATE` | id of the template of new machines; needed, for it differs by region and machine type |
| `PAPERSPACE_REGION` | region of new machines; needed |
| `PAPERSPACE_NETWORK`, `PAPERSPACE_STARTUP_SCRIPT` | ids of a private network and of a startup script, where wanted |

New Linux machines accept the SSH keys of the account. The API reports no prices and no balance, so a price cap can't be
enforced, every price is unknown, and the end of the balance can't be predicted. A machine has to be off before it can
be deleted. A deadline becomes its auto-shutdown, which cuts hard; without one the auto-shutdown is turned off.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotFound, NotSupported, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._http import Api, ApiResponse, Ident, ResponseModel, is_safe_id
from gpuwarden.providers._rented import MAX_PAGES, Findings, Rented, epoch, gpu_matches, no_such

_S = InstanceState
PAGE: Final = 100
DISKS_GB: Final = (50, 100, 250, 500, 1000, 2000)
MOST_HOURS: Final = 168
MACHINES: Final = ("H100", "A100-80G", "A100", "A6000", "A5000", "A4000", "V100", "V100-32G", "P6000")
NEEDED: Final = ("PAPERSPACE_TEMPLATE", "PAPERSPACE_REGION")
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


class _Machine(ResponseModel):
    id: Ident
    name: str
    state: Literal[
        "provisioning", "starting", "restarting", "upgrading", "serviceready", "ready", "stopping", "off", "failed"
    ]
    publicIp: str | None = None  # noqa: N815
    dtCreated: datetime | None = None  # noqa: N815
    autoShutdownEnabled: Any = None  # noqa: N815
    autoShutdownTimeout: Any = None  # noqa: N815


class _Wrapped(ResponseModel):
    data: _Machine


class _Page(ResponseModel):
    items: tuple[_Machine, ...]
    hasMore: bool  # noqa: N815
    nextPage: str | None = None  # noqa: N815


_Changed: TypeAlias = _Wrapped | _Machine
"""The description shows a machine; the service has been seen to wrap it with the event that changes it."""


class _Team(ResponseModel):
    id: Ident


class _Session(ResponseModel):
    team: _Team


class _Deleted(ResponseModel):
    """Whatever object comes with a deletion, unless it is an error."""

    code: None = None
    message: None = None
    error: None = None


def _refusal(reply: ApiResponse, said: str) -> WardenError | None:
    code, text = reply.text("code").upper(), reply.text("message", "error").casefold()
    if reply.status == 404 and (code == "NOT_FOUND" or "not found" in text):
        return NotFound(f"Paperspace does not have it: {said}")
    if 400 <= reply.status < 500 and ("out of capacity" in text or code == "OUT_OF_CAPACITY"):
        return NoCapacity(
            f"Paperspace has no capacity for it now ({said})", "Try another machine type or region, or later."
        )
    return None


class Paperspace(Rented):
    """A `Provider` over one Paperspace team."""

    name = "paperspace"
    api = Api(
        platform="Paperspace",
        url="https://api.paperspace.com/v1",
        url_variable="GPUWARDEN_PAPERSPACE_URL",
        key_variable="PAPERSPACE_API_KEY",
        refusal=_refusal,
        says=("message", "error", "code"),
    )
    max_name = 64

    async def check_account(self) -> Findings:
        """Return findings on settings that are required for renting."""
        missing = [name for name in NEEDED if not self.env.get(name)]
        return [
            self.finding(Severity.ERROR, f"{name} is not set, and a machine needs it", "Set it.") for name in missing
        ]

    async def ask_account(self) -> Answer[str]:
        """Return the team of the key."""
        answer = await self.client.ask("GET", "/auth/session", _Session)
        return answer if isinstance(answer, Unknown) else Known(answer.value.team.id)

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return a quote without a price: the API reports none."""
        kind = self._machine_type(resources)
        source = "Paperspace, which reports no prices through its API"
        note = f"{kind}; see the price list at paperspace.com/pricing"
        return Known(
            Quote(platform=self.profile.id, price_usd_per_hour=None, source=source, at=self.clock.now(), note=note)
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent one machine; it starts by itself."""
        order = self._order(self.label(token), resources)
        shape: Any = _Changed
        answer: Answer[_Changed] = await self.client.ask("POST", "/machines", shape, body=order, creates=True)
        if isinstance(answer, Unknown):
            return answer
        made = answer.value.data if isinstance(answer.value, _Wrapped) else answer.value
        seen = self._view(made).model_copy(update={"token": token, **self._end(order, made)})
        if seen.state not in {_S.BOOTING, _S.RUNNING}:  # the reply is as old as the request
            seen = seen.model_copy(update={"state": _S.BOOTING, "meter": None})
        return Known(seen)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one machine."""
        answer = await self.client.ask("GET", f"/machines/{id}", _Machine)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every machine of the team, page by page."""
        found: dict[str, _Machine] = {}
        params: dict[str, str | int] = {"limit": PAGE}
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            answer = await self.client.ask("GET", "/machines", _Page, params=params)
            if isinstance(answer, Unknown):
                return answer
            before = len(found)
            found |= {m.id: m for m in answer.value.items}
            if not answer.value.hasMore:
                return Known(tuple(self._view(m) for m in found.values()))
            after = answer.value.nextPage
            if not after or after in seen or len(found) == before:
                return Unknown("Paperspace's list continues without a cursor")
            seen.add(after)
            params["after"] = after
        return Unknown("Paperspace's list of machines does not end")

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a machine that is off; a dynamic address changes then."""
        return await self._patch(id, "start")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Ask for a power off; storage and addresses bill on."""
        return await self._patch(id, "stop")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Delete. Raises Conflict unless the machine is off."""
        if not is_safe_id(id):
            return Known(None)
        before = await self.get(id)
        if isinstance(before, Unknown):
            return before
        if before.value is None:
            return Known(None)
        if before.value.state not in {_S.STOPPED, _S.FAILED}:
            raise Conflict(
                f"machine {id} is {before.value.state}; Paperspace deletes only ones that are off", "Stop it."
            )
        try:
            answer = await self.client.ask("DELETE", f"/machines/{id}", _Deleted, empty=True)
        except NotFound:
            return Known(None)
        return answer if isinstance(answer, Unknown) else Known(None)

    # ------------------------------------------------------------------------------------------------------ inside

    def _end(self, order: dict[str, object], made: _Machine) -> dict[str, object]:
        """Return the requested shutdown time, unless the reply differs: Paperspace may ignore unknown fields."""
        hours = order.get("autoShutdownTimeout")
        if not isinstance(hours, int):
            return {}
        off, other = made.autoShutdownEnabled is False, made.autoShutdownTimeout not in (None, hours, str(hours))
        if off or other:
            return {"why": f"state {made.state}; Paperspace did not take the shutdown after {hours} h"}
        return {"ends_at": self.clock.now() + hours * 3600}

    async def _patch(self, id: str, verb: str) -> Answer[None]:  # noqa: A002
        if not is_safe_id(id):
            raise no_such("Paperspace", id)
        answer: Answer[_Changed] = await self.client.ask("PATCH", f"/machines/{id}/{verb}", _Changed)  # type: ignore[arg-type]
        return answer if isinstance(answer, Unknown) else Known(None)

    def _machine_type(self, resources: Resources) -> str:
        asked = self.refuse_unsold(resources)
        kind = next((m for m in MACHINES if gpu_matches(asked, (m,))), asked)
        if not is_safe_id(kind):
            raise BadRequest(f"Paperspace has no machine type {asked!r}", f"Known are: {', '.join(MACHINES)}.")
        return kind if resources.gpu_count == 1 else f"{kind}x{resources.gpu_count}"

    def _order(self, label: str, resources: Resources) -> dict[str, object]:
        kind = self._machine_type(resources)
        if resources.max_price_usd_per_hour is not None:
            raise NotSupported(
                "Paperspace reports no prices through its API, so a price cap can't be enforced",
                "Leave the price cap out; the job's own cost cap still bounds it.",
            )
        missing = [name for name in NEEDED if not self.env.get(name)]
        if missing:
            raise BadRequest(f"{' and '.join(missing)} must be set to rent from Paperspace", do(Action.DOCTOR))
        disk_gb = resources.disk_gb or DISKS_GB[1]
        sizes = [size for size in DISKS_GB if size >= disk_gb]
        if not sizes:
            raise BadRequest(f"Paperspace's largest disk has {DISKS_GB[-1]} GB; {disk_gb} were asked for")
        order: dict[str, object] = {
            "name": label,
            "machineType": kind,
            "templateId": self.env["PAPERSPACE_TEMPLATE"],
            "region": self.env["PAPERSPACE_REGION"],
            "diskSize": sizes[0],
            "publicIpType": "dynamic",
            "startOnCreate": True,
            "autoShutdownEnabled": False,
        }
        # Paperspace's own shutdown at the deadline, in whole hours rounded up; off where its longest ends earlier. The
        # fields are those of DigitalOcean's own documentation; descriptions by others name them differently.
        if resources.deadline_s is not None and (hours := math.ceil(resources.deadline_s / 3600)) <= MOST_HOURS:
            order |= {"autoShutdownEnabled": True, "autoShutdownTimeout": hours}
        for field, name in (("networkId", "PAPERSPACE_NETWORK"), ("startupScriptId", "PAPERSPACE_STARTUP_SCRIPT")):
            if value := self.env.get(name):
                order[field] = value
        return order

    def _view(self, m: _Machine) -> Instance:
        state, meter = STATES[m.state]
        return Instance(
            id=m.id,
            token=self.token_in(m.name),
            state=state,
            place=self.place(m.id, m.publicIp, None) if state is _S.RUNNING and m.publicIp else None,
            meter=meter,
            created_at=epoch(m.dtCreated),
            why=f"state {m.state}",
        )


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
    key_variables=ACCOUNT_KEYS,
)


def create(profile: Profile, state: Path, clock: Clock) -> Paperspace:
    """Return the provider for one profile. It keeps no files."""
    return Paperspace(profile, clock)
