"""Provider `autodl`: AutoDL's Pro instances, through the official API.

| variable | meaning |
|---|---|
| `AUTODL_TOKEN`, `AUTODL_TOKEN_FILE` | the developer token of a verified account; all tokens have full access |
| `AUTODL_IMAGE` | uuid of the image for new instances |
| `AUTODL_CNY_PER_USD` | yuan per dollar; without it, prices are unknown, because AutoDL reports them in yuan |

The API does not report the account. After the token is replaced, the new token counts as another account's until a
request confirms that it can access the instance.

The API reports prices only for rented instances, so a price cap can't be enforced. The GPU is one of `SPECS`, or
AutoDL's own id for a GPU type. An instance must be stopped before it can be released.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import (
    AuthFailed,
    BadRequest,
    Conflict,
    NoCapacity,
    NotFound,
    NotSupported,
    RateLimited,
    WardenError,
    nothing_sent,
)
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import authorize_key
from gpuwarden.providers._http import Api, ApiResponse, Ident, ResponseModel, is_safe_id, readable, unclear_instance
from gpuwarden.providers._rented import (
    MAX_PAGES,
    Findings,
    HttpProvider,
    epoch,
    gpu_matches,
    no_such,
    positive_price,
)

D = TypeVar("D")
_S = InstanceState
_PRO = "/api/v1/dev/instance/pro"
DEFAULT_IMAGE: Final = "base-image-l2t43iu6uk"
CUDA_FROM: Final = 118
SYSTEM_DISK_GB: Final = 30
MOST_DISK_GB: Final = 500
MOST_GPUS: Final = 4
PAGE: Final = 50
SPECS: Final = {
    "H800 80G": "h800",
    "RTX 4090 48G": "v-48g",
    "RTX PRO 6000 96G": "pro6000-p",
    "RTX 4080 32G": "v-32g-p",
    "RTX 3090 48G": "v-48g-350w",
    "RTX 5090 32G": "5090-p",
    "RTX 4090D": "4090D",
}
"""GPU types by name, from AutoDL's documentation as of 2026-09. Other types are requested by their AutoDL id."""
STATES: Final[dict[str, tuple[InstanceState, bool | None]]] = {
    "creating": (_S.BOOTING, None),
    "created": (_S.BOOTING, None),
    "starting": (_S.BOOTING, None),
    "running": (_S.RUNNING, True),
    "shutting_down": (_S.STOPPING, True),
    "stopping": (_S.STOPPING, True),
    "shutdown": (_S.STOPPED, False),
    "stopped": (_S.STOPPED, False),
    "releasing": (_S.TERMINATING, None),
}


class _Envelope(ResponseModel, Generic[D]):
    """The envelope of every successful reply. Any code except Success is a failure, regardless of the HTTP status."""

    code: Literal["Success"]
    data: D


class _RowId(ResponseModel):
    uuid: Ident
    name: str


class _Row(_RowId):
    status: str
    created_at: datetime


class _Page(ResponseModel):
    list: tuple[_Row | _RowId, ...]
    max_page: int
    result_total: int


class _Snapshot(ResponseModel):
    """The fields in use of an instance's snapshot. Fields with secrets are not parsed."""

    proxy_host: str
    ssh_port: int
    payg_price: int | None = None


class _Wallet(ResponseModel):
    assets: int


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Map AutoDL's refusals to errors. A refusal has HTTP status 200, one of a few codes, and a message in Chinese."""
    code, text = reply.text("code"), reply.text("msg")
    if code in {"", "Success"}:
        return None
    detail = f"({code}: {message})"
    if code == "RecordNotFoundError":
        return NotFound(f"AutoDL did not find the requested object {detail}")
    if code == "TORealName":
        return AuthFailed(f"AutoDL accepts only verified accounts {detail}", "Verify the account in AutoDL's console.")
    if re.search(r"auth|token|login", code, re.IGNORECASE) or "登录" in text:
        return AuthFailed(f"AutoDL refused the token {detail}", "Check AUTODL_TOKEN.")
    if "频繁" in text or reply.status == 429:
        return RateLimited(f"AutoDL received too many requests {detail}", "Wait, then retry.", reply.after_s)
    if "库存" in text:
        return NoCapacity(f"AutoDL currently has no free capacity {detail}", "Try another GPU, or try again later.")
    if "余额" in text:
        return BadRequest(f"AutoDL refused: the account has no credit {detail}", "Add credit to the account.")
    if "关机" in text:
        return Conflict(f"AutoDL requires the instance to be stopped first {detail}", "Stop it.")
    if code == "RequestParameterIsWrong" or "规格不存在" in text:
        return BadRequest(f"AutoDL refused the request {detail}")
    return None


class AutoDL(HttpProvider):
    """A `Provider` for one AutoDL account."""

    name = "autodl"
    machine_options = frozenset({"image"})
    api = Api(
        platform="AutoDL",
        url="https://api.autodl.com",
        url_variable="GPUWARDEN_AUTODL_URL",
        key_variable="AUTODL_TOKEN",
        scheme="",
        refusal=_refusal,
        message_fields=("msg",),
    )
    max_name = 64

    def __init__(self, profile: Profile, clock: Clock, env: dict[str, str] | None = None) -> None:
        super().__init__(profile, clock, env)
        self._tokens: dict[str, str] = {}
        """Tokens by instance id, because only the list reports names."""

    async def check_account(self) -> Findings:
        """Return findings about the credit and the SSH key."""
        findings: Findings = []
        answer = await self._wallet()
        if isinstance(answer, Known) and answer.value.data.assets <= 0:
            findings.append(self.finding(Severity.ERROR, "the AutoDL account has no credit", "Add credit."))
        if self.ssh_key() is None:
            message = "this machine has no public SSH key; an AutoDL instance accepts only keys added in its console"
            findings.append(self.finding(Severity.WARNING, message, "Create one with `ssh-keygen -t ed25519`."))
        return findings

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return a quote without a price, because AutoDL reports prices only for rented instances."""
        spec = self._spec(resources)
        note = f"{resources.gpu_count} x {spec}; AutoDL reports a price only for a rented instance"
        source = "AutoDL (its API has no price list)"
        return Known(
            Quote(platform=self.profile.id, price_usd_per_hour=None, source=source, at=self.clock.now(), note=note)
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent one instance. It starts automatically."""
        with nothing_sent():
            label, spec = self.label(token), self._spec(resources)
            if resources.max_price_usd_per_hour is not None:
                raise NotSupported(
                    "AutoDL does not report prices before renting, so a price cap can't be enforced",
                    "Omit the price cap; the job's own cost cap still applies.",
                )
            expand = max(0, (resources.disk_gb or 0) - SYSTEM_DISK_GB)
            if expand > MOST_DISK_GB:
                raise BadRequest(f"AutoDL's system disk can have at most {SYSTEM_DISK_GB + MOST_DISK_GB} GB")
        order: dict[str, object] = {
            "req_gpu_amount": resources.gpu_count,
            "expand_system_disk_by_gb": expand,
            "gpu_spec_uuid": spec,
            "image_uuid": self.option(resources, "image", "AUTODL_IMAGE") or DEFAULT_IMAGE,
            "cuda_v_from": CUDA_FROM,
            "instance_name": label,
        }
        if key := self.ssh_key():
            order["start_command"] = authorize_key(key)
        answer = await self.client.ask("POST", f"{_PRO}/create", _Envelope[Ident], body=order, creates=True)
        if isinstance(answer, Unknown):
            return answer
        self._tokens[answer.value.data] = token
        return Known(
            Instance(id=answer.value.data, token=token, state=_S.BOOTING, created_at=self.clock.now(), why="rented")
        )

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance with its status, and with its address and price while it is running."""
        answer = await self._ask_about(id, "status", _Envelope[str])
        if isinstance(answer, Unknown):
            return answer
        if answer.value.data not in STATES:
            return Unknown(f"AutoDL reports an unknown status for {id}")
        state, meter = STATES[answer.value.data]
        why = f"status {answer.value.data}"
        seen = Instance(id=id, token=self._tokens.get(id, ""), state=state, meter=meter, why=why)
        if state is not _S.RUNNING:
            return Known(seen)
        shot = await self._ask_about(id, "snapshot", _Envelope[_Snapshot])
        if isinstance(shot, Unknown):
            return Known(seen.model_copy(update={"why": f"{why}; no address yet: {shot.why}"}))
        snapshot, rate = shot.value.data, self._yuan_per_dollar()
        known = bool(snapshot.proxy_host) and 0 < snapshot.ssh_port < 65536
        place = self.place(id, snapshot.proxy_host, snapshot.ssh_port) if known else None
        usd = None
        if snapshot.payg_price is not None and rate is not None:
            usd = positive_price(snapshot.payg_price / 1000 / rate)  # the API counts in thousandths of a yuan
        return Known(seen.model_copy(update={"place": place, "price_usd_per_hour": usd}))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every Pro instance from all pages; Unknown if the pages contain fewer than the reported total."""
        found: dict[str, _Row | _RowId] = {}
        for page in range(1, MAX_PAGES + 1):
            body = {"page_index": page, "page_size": PAGE}
            answer = await self.client.ask("POST", f"{_PRO}/list", _Envelope[_Page], body=body, safe=True)
            if isinstance(answer, Unknown):
                return answer
            listing, before = answer.value.data, len(found)
            found |= {row.uuid: row for row in listing.list}
            if page >= listing.max_page or len(found) == before:
                break
        if len(found) < listing.result_total or page < listing.max_page:
            return Unknown(f"AutoDL listed {len(found)} of {listing.result_total} instances")
        if found and not readable(found.values(), _Row):
            return Unknown(f"none of the {len(found)} instances that AutoDL listed could be read")
        return Known(tuple(self._view(row) for row in found.values()))

    async def balance(self) -> Answer[Balance]:
        """Return the cash balance in dollars, or in yuan if no rate is set. Vouchers are excluded, because some may not
        apply.
        """
        answer = await self._wallet()
        if isinstance(answer, Unknown):
            return answer
        yuan, rate = answer.value.data.assets / 1000, self._yuan_per_dollar()
        if rate is None:
            return Known(Balance(amount=yuan, currency="CNY"))
        return Known(Balance(amount=yuan / rate))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Power on an instance, with a GPU if one is free."""
        return await self._act(id, "power_on", payload="gpu")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Power off an instance. AutoDL releases instances that stay off for fifteen days."""
        return await self._act(id, "power_off")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Release an instance. Raises Conflict unless it is off, because AutoDL might release even a running one."""
        if not is_safe_id(id):
            return Known(None)
        try:
            answer = await self._ask_about(id, "status", _Envelope[str])
            if isinstance(answer, Unknown):
                return answer
            state, _ = STATES.get(answer.value.data, (None, None))
            if state is _S.TERMINATING:
                return Known(None)
            if state is not _S.STOPPED:
                raise Conflict(
                    f"instance {id} is {answer.value.data!r}; AutoDL releases only stopped instances", "Stop it."
                )
            return await self._act(id, "release")
        except NotFound:
            return Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _wallet(self) -> Answer[_Envelope[_Wallet]]:
        return await self.client.ask("POST", "/api/v1/dev/wallet/balance", _Envelope[_Wallet], body={}, safe=True)

    async def _ask_about(self, id: str, what: str, shape: type[D]) -> Answer[D]:  # noqa: A002
        """Send a GET request about one instance. The id is sent in the query, because AutoDL ignores the documented
        JSON body.
        """
        return await self.client.ask("GET", f"{_PRO}/{what}", shape, params={"instance_uuid": id})

    async def _act(self, id: str, verb: str, **more: str) -> Answer[None]:  # noqa: A002
        if not is_safe_id(id):
            raise no_such("AutoDL", id)
        answer = await self.client.ask("POST", f"{_PRO}/{verb}", _Envelope[object], body={"instance_uuid": id, **more})
        return answer if isinstance(answer, Unknown) else Known(None)

    def _view(self, row: _Row | _RowId) -> Instance:
        token = self._tokens[row.uuid] = self.token_in(row.name)
        if not isinstance(row, _Row) or row.status not in STATES:
            return unclear_instance(row.uuid, token, self.api.platform)
        state, meter = STATES[row.status]
        return Instance(
            id=row.uuid,
            token=token,
            state=state,
            meter=meter,
            created_at=epoch(row.created_at),
            why=f"status {row.status}",
        )

    def _yuan_per_dollar(self) -> float | None:
        try:
            rate = float(self.env.get("AUTODL_CNY_PER_USD", ""))
        except ValueError:
            return None
        return rate if 1 < rate < 100 else None

    def _spec(self, resources: Resources) -> str:
        asked = self.refuse_unsold(resources)
        if not 1 <= resources.gpu_count <= MOST_GPUS:
            raise BadRequest(f"AutoDL rents 1 to {MOST_GPUS} GPUs in one instance", "Request fewer GPUs.")
        known = [spec for name, spec in SPECS.items() if asked == spec or gpu_matches(asked, (name,))]
        if len(known) > 1:
            raise BadRequest(
                f"{asked!r} matches more than one AutoDL GPU type: {', '.join(known)}", "Name one of them."
            )
        if not known and not is_safe_id(asked):
            raise BadRequest(f"AutoDL has no GPU called {asked!r}", f"Known GPUs: {', '.join(SPECS)}.")
        return known[0] if known else asked


ACCOUNT_KEYS: Final = (AutoDL.api.key_variable, "AUTODL_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={"autodl": ("release|stop|poweroff|power-off|power_off", "instance|instances release|stop|power_off")},
    hosts=("autodl.com", "autodl.art"),
    requests=(r"power_?off", r"/release\b"),
    servers=("autodl",),
)


def create(profile: Profile, state: Path, clock: Clock) -> AutoDL:
    """Return the provider for one profile. The provider stores no files."""
    return AutoDL(profile, clock)
