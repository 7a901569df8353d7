"""Provider `prime_intellect`: Pods that Prime Intellect rents from many providers.

| variable | meaning |
|---|---|
| `PRIME_API_KEY`, `PRIME_API_KEY_FILE` | a user's key, not a team's; scope: Instances read and write, the rest read |
| `PRIME_IMAGE` | the image of new Pods, where the provider has it |

A price cap is part of the order itself. Prepaid offers are skipped: money paid ahead is not a meter. Pods can't be
stopped.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, NoCapacity, NotFound, NotSupported, WardenError
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import SSH_KEY_VARIABLE, same_key
from gpuwarden.providers._http import Api, ApiResponse, Ident, ResponseModel, is_safe_id
from gpuwarden.providers._rented import (
    MAX_PAGES,
    Findings,
    Rented,
    epoch,
    gpu_matches,
    positive_price,
)

_S = InstanceState
PAGE: Final = 100
HISTORY_PAGES: Final = 5
DEFAULT_IMAGE: Final = "cuda_12_4_pytorch_2_6"
STATES: Final[dict[str, tuple[InstanceState, bool | None]]] = {
    "PROVISIONING": (_S.BOOTING, None),
    "PENDING": (_S.BOOTING, None),
    "ACTIVE": (_S.RUNNING, True),
    "STOPPED": (_S.STOPPED, False),
    "ERROR": (_S.FAILED, None),
    "DELETING": (_S.TERMINATING, None),
    "TERMINATED": (_S.GONE, False),
    "UNKNOWN": (_S.INTERRUPTED, None),
}
_SSH = re.compile(r"(?:ssh )?([A-Za-z0-9._-]+)@([A-Za-z0-9.:-]+)(?: -p (\d{1,5}))?")


class _Pod(ResponseModel):
    id: Ident
    name: str | None
    status: Literal["PROVISIONING", "PENDING", "ACTIVE", "STOPPED", "ERROR", "DELETING", "TERMINATED", "UNKNOWN"]
    createdAt: datetime | None = None  # noqa: N815
    installationStatus: str | None = None  # noqa: N815
    installationFailure: str | None = None  # noqa: N815
    sshConnection: str | tuple[str | None, ...] | None = None  # noqa: N815
    priceHr: float | None = None  # noqa: N815
    stoppedPriceHr: float | None = None  # noqa: N815


class _Pods(ResponseModel):
    data: tuple[_Pod, ...]
    total_count: int


class _Past(ResponseModel):
    id: str
    totalBilledPrice: float  # noqa: N815


class _History(ResponseModel):
    data: tuple[_Past, ...]
    total_count: int


class _Prices(ResponseModel):
    onDemand: float | None = None  # noqa: N815
    communityPrice: float | None = None  # noqa: N815
    currency: str | None = None


class _Offer(ResponseModel):
    cloudId: str  # noqa: N815
    gpuType: str  # noqa: N815
    gpuCount: int  # noqa: N815
    socket: str | None = None
    provider: str | None = None
    dataCenter: str | None = None  # noqa: N815
    country: str | None = None
    security: str | None = None
    stockStatus: str  # noqa: N815
    images: tuple[str, ...] | None = None
    isSpot: bool | None = None  # noqa: N815
    prepaidTime: int | None = None  # noqa: N815
    prices: _Prices


class _Offers(ResponseModel):
    items: tuple[_Offer, ...]
    totalCount: int  # noqa: N815


class _Wallet(ResponseModel):
    balance_usd: float


class _Owner(ResponseModel):
    id: Ident


class _Whose(ResponseModel):
    data: _Owner


class _Key(ResponseModel):
    id: str
    publicKey: str | None = None  # noqa: N815
    isPrimary: bool = False  # noqa: N815


class _Keys(ResponseModel):
    data: tuple[_Key, ...]


class _Deleted(ResponseModel):
    """Whatever object comes with a deletion, unless it is an error."""

    error: None = None
    detail: None = None


def _refusal(reply: ApiResponse, said: str) -> WardenError | None:
    """Map refusals. A path that does not exist answers "Not Found" and no more; an absent Pod, a longer sentence."""
    if reply.status == 404 and (text := reply.text("detail", "error.message")) and text.casefold() != "not found":
        return NotFound(f"Prime Intellect does not have it: {said}")
    if reply.status in {400, 409, 422} and re.search(
        r"capacity|out of stock|unavailable|no longer available", said, re.IGNORECASE
    ):
        return NoCapacity(f"Prime Intellect has no capacity for it now ({said})", "Try another GPU, or later.")
    return None


class PrimeIntellect(Rented):
    """A `Provider` over one user's account at Prime Intellect."""

    name = "prime_intellect"
    api = Api(
        platform="Prime Intellect",
        url="https://api.primeintellect.ai/api/v1",
        url_variable="GPUWARDEN_PRIME_INTELLECT_URL",
        key_variable="PRIME_API_KEY",
        refusal=_refusal,
        says=("detail", "error.message", "message"),
    )
    max_name = 64

    async def check_account(self) -> Findings:
        """Return True: a Pod accepts only a key of the account."""
        try:
            await self._key_id()
        except BadRequest as refusal:
            return [self.finding(Severity.ERROR, refusal.message, refusal.next_steps)]
        return []

    async def ask_account(self) -> Answer[str]:
        """Return the id of the key's user."""
        answer = await self.client.ask("GET", "/user/whoami", _Whose)
        return answer if isinstance(answer, Unknown) else Known(answer.value.data.id)

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the cheapest offer that fits."""
        answer = await self._offer(resources)
        if isinstance(answer, Unknown):
            return answer
        offer = answer.value
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=_price(offer),
                source="Prime Intellect availability",
                at=self.clock.now(),
                note=f"{offer.gpuCount} x {offer.gpuType} of {offer.provider or 'unknown'}",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent the offer that `quote` names."""
        label = self.label(token)
        offer = await self._offer(resources)
        if isinstance(offer, Unknown):
            return offer
        key = await self._key_id()
        if isinstance(key, Unknown):
            return key
        image = self.env.get("PRIME_IMAGE") or DEFAULT_IMAGE
        if offer.value.images and image not in offer.value.images:
            image = offer.value.images[0]
        pod: dict[str, object] = {
            "name": label,
            "cloudId": offer.value.cloudId,
            "gpuType": offer.value.gpuType,
            "socket": offer.value.socket,
            "gpuCount": offer.value.gpuCount,
            "image": image,
            "dataCenterId": offer.value.dataCenter,
            "country": offer.value.country,
            "security": offer.value.security,
            "sshKeyId": key.value,
            "autoRestart": False,
            "diskSize": resources.disk_gb,
            "maxPrice": resources.max_price_usd_per_hour,
        }
        plain = {name: value for name, value in pod.items() if value is not None}
        order = {"pod": plain, "provider": {"type": offer.value.provider}}
        answer = await self.client.ask("POST", "/pods/", _Pod, body=order, creates=True)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value))

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one Pod."""
        answer = await self.client.ask("GET", f"/pods/{id}", _Pod)
        if isinstance(answer, Unknown):
            return answer
        if answer.value.status == "UNKNOWN" and answer.value.id == id:
            return Unknown(f"Prime Intellect itself does not know the status of Pod {id}")
        return Known(self._view(answer.value))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every Pod that is not gone, page by page; fewer than the total that comes with them is Unknown."""
        found: dict[str, _Pod] = {}
        read = 0
        for _ in range(MAX_PAGES):
            answer = await self.client.ask("GET", "/pods/", _Pods, params={"offset": read, "limit": PAGE})
            if isinstance(answer, Unknown):
                return answer
            page, before = answer.value, len(found)
            found |= {p.id: p for p in page.data}
            read += len(page.data)
            if read >= page.total_count and len(found) >= page.total_count:
                return Known(tuple(self._view(p) for p in found.values() if p.status != "TERMINATED"))
            if len(found) == before:
                return Unknown(f"Prime Intellect listed {len(found)} of {page.total_count} Pods")
        return Unknown("Prime Intellect's list of Pods does not end")

    async def balance(self) -> Answer[Balance]:
        """Return the balance of the user's wallet."""
        answer = await self.client.ask("GET", "/billing/wallet", _Wallet, params={"limit": 1})
        return answer if isinstance(answer, Unknown) else Known(Balance(amount=answer.value.balance_usd))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported: Prime Intellect can't do that."""
        raise NotSupported("Prime Intellect can't start a Pod again", "Rent another one.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported: Prime Intellect can't do that."""
        raise NotSupported("Prime Intellect has no stop", "terminate is what ends a Pod there; its disk goes with it.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Ask for the end."""
        if not is_safe_id(id):
            return Known(None)
        try:
            answer = await self.client.ask("DELETE", f"/pods/{id}", _Deleted, empty=True)
        except NotFound:
            return Known(None)
        return answer if isinstance(answer, Unknown) else Known(None)

    # ------------------------------------------------------------------------------------------------------ inside

    async def _offer(self, resources: Resources) -> Answer[_Offer]:
        """Return the cheapest offer that fits. Raises NoCapacity."""
        asked, cap = self.refuse_unsold(resources), resources.max_price_usd_per_hour
        answer = await self._offers(resources.gpu_count)
        if isinstance(answer, Unknown):
            return answer
        fitting = [
            o
            for o in answer.value
            if gpu_matches(asked, (o.gpuType.replace("_", " "),))
            and o.gpuCount == resources.gpu_count
            and o.provider
            and o.stockStatus.casefold() not in {"unavailable", "none", ""}
            and not o.prepaidTime
            and bool(o.isSpot) == resources.interruptible
            and (cap is None or (_price(o) or cap + 1) <= cap)
        ]
        if not fitting:
            limit = "" if cap is None else f" at {usd_per_hour(cap)} or less"
            raise NoCapacity(f"Prime Intellect has no {resources.gpu_count} x {asked}{limit}", "Try later.")
        return Known(min(fitting, key=lambda o: (_price(o) is None, _price(o) or 0.0, o.cloudId, o.provider or "")))

    async def _offers(self, count: int) -> Answer[tuple[_Offer, ...]]:
        """Return all pages of the available offers."""
        found: tuple[_Offer, ...] = ()
        for page in range(1, MAX_PAGES + 1):
            params: dict[str, str | int] = {"gpu_count": count, "page": page, "page_size": PAGE}
            answer = await self.client.ask("GET", "/availability/gpus", _Offers, params=params)
            if isinstance(answer, Unknown):
                return answer
            found += answer.value.items
            if len(found) >= answer.value.totalCount or not answer.value.items:
                break
        return Known(found)

    async def _key_id(self) -> Answer[str | None]:
        """Return the account's SSH key that is ours, or its primary one. Raises BadRequest where there is none."""
        answer = await self.client.ask("GET", "/ssh_keys/", _Keys, params={"limit": PAGE})
        if isinstance(answer, Unknown):
            return answer
        keys, mine = answer.value.data, self.ssh_key()
        found = [k.id for k in keys if mine is not None and same_key(k.publicKey or "") == mine]
        if not found and SSH_KEY_VARIABLE not in self.env:
            found = [k.id for k in keys if k.isPrimary]
        if not found:
            raise BadRequest(
                "none of the SSH keys of the Prime Intellect account is known to be yours, so no Pod could be reached",
                "Add your public key to the account.",
            )
        return Known(found[0])

    def _view(self, pod: _Pod) -> Instance:
        state, meter = STATES[pod.status]
        why = f"status {pod.status}"
        if pod.installationStatus:
            why += f", installation {pod.installationStatus}"
        failed = state is _S.RUNNING and pod.installationFailure
        return Instance(
            id=pod.id,
            token=self.token_in(pod.name),
            state=_S.FAILED if failed else state,
            place=self._where(pod) if state is _S.RUNNING and not failed else None,
            meter=meter,
            price_usd_per_hour=positive_price(pod.priceHr) if state is not _S.STOPPED else None,
            stopped_usd_per_hour=positive_price(pod.stoppedPriceHr),
            created_at=epoch(pod.createdAt),
            why=why,
        )

    def _where(self, pod: _Pod) -> Place | None:
        """Return the address, once the image is installed."""
        if pod.installationStatus not in {None, "FINISHED", "ACTIVE", "COMPLETED"}:
            return None
        told = pod.sshConnection if isinstance(pod.sshConnection, str | None) else next(iter(pod.sshConnection), None)
        match = _SSH.fullmatch(told or "")
        if match is None:
            return None
        return self.place(pod.id, match[2], int(match[3]) if match[3] else None, match[1])

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return a gone Pod with its bill, or None where the history does not have it yet."""
        try:
            for page in range(HISTORY_PAGES):
                params: dict[str, str | int] = {
                    "offset": page * PAGE,
                    "limit": PAGE,
                    "sort_by": "terminatedAt",
                    "sort_order": "desc",
                }
                answer = await self.client.ask("GET", "/pods/history", _History, params=params)
                if isinstance(answer, Unknown) or not answer.value.data:
                    return None
                for past in answer.value.data:
                    if past.id == id:
                        return Instance(
                            id=id,
                            token=token,
                            state=_S.GONE,
                            meter=False,
                            cost_usd=past.totalBilledPrice,
                            why="Prime Intellect has only its bill",
                        )
        except WardenError:
            return None
        return None


def _price(offer: _Offer) -> float | None:
    """Return the whole offer's price per hour; a currency other than dollars is unknown."""
    if offer.prices.currency not in {None, "USD", "usd"}:
        return None
    price = offer.prices.communityPrice if offer.prices.communityPrice is not None else offer.prices.onDemand
    return positive_price(price)


ACCOUNT_KEYS: Final = (PrimeIntellect.api.key_variable, "PRIME_INTELLECT_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={
        "prime": ("pods|pod terminate|delete|stop", "sandbox|sandboxes delete|terminate", "disks|disk terminate|delete")
    },
    hosts=("primeintellect.ai",),
    requests=(r"/terminate\b",),
    servers=("prime", "primeintellect"),
    key_variables=ACCOUNT_KEYS,
)


def create(profile: Profile, state: Path, clock: Clock) -> PrimeIntellect:
    """Return the provider for one profile. It keeps no files."""
    return PrimeIntellect(profile, clock)
