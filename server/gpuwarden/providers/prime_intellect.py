"""Provider `prime_intellect`: Pods that Prime Intellect rents from many providers.

| variable | meaning |
|---|---|
| `PRIME_API_KEY`, `PRIME_API_KEY_FILE` | a user's key; scope: read and write for Instances, read for the rest |
| `PRIME_TEAM_ID` | the team that owns new Pods and pays for them; default: the user's own account |
| `PRIME_IMAGE` | the image of new Pods, if the provider has it |

The price cap is sent with the order; a quote includes the surcharges for additional disk, vCPUs and memory.
Prepaid offers are skipped, because gpuwarden can't track payments made in advance. gpuwarden can't stop Pods; a stopped
Pod counts as billed at its full price unless its record has a price for the stopped state.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, NoCapacity, NotFound, NotSupported, WardenError, nothing_sent
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import SSH_KEY_VARIABLE, same_key
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
from gpuwarden.providers._prime_offers import ChosenOffer, Offer, Offers, choose
from gpuwarden.providers._rented import (
    MAX_PAGES,
    Findings,
    HttpProvider,
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


class _PodId(ResponseModel):
    id: Ident
    name: str | None


class _Pod(_PodId):
    status: Literal["PROVISIONING", "PENDING", "ACTIVE", "STOPPED", "ERROR", "DELETING", "TERMINATED", "UNKNOWN"]
    createdAt: datetime | None = None  # noqa: N815
    installationStatus: str | None = None  # noqa: N815
    installationFailure: str | None = None  # noqa: N815
    sshConnection: str | tuple[str | None, ...] | None = None  # noqa: N815
    priceHr: float | None = None  # noqa: N815
    stoppedPriceHr: float | None = None  # noqa: N815


class _Pods(ResponseModel):
    data: tuple[_Pod | _PodId, ...]
    total_count: int


class _Past(ResponseModel):
    id: str
    totalBilledPrice: float  # noqa: N815


class _History(ResponseModel):
    data: tuple[Readable[_Past], ...]
    total_count: int


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
    data: tuple[Readable[_Key], ...]


class _Team(ResponseModel):
    teamId: str  # noqa: N815


class _Teams(ResponseModel):
    data: tuple[Readable[_Team], ...]


class _Deleted(ResponseModel):
    """The reply to a deletion: any object that is not an error."""

    error: None = None
    detail: None = None


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Map refusals to errors. For an unknown path, the message is "Not Found"; for a missing Pod, it is longer."""
    if reply.status == 404 and (text := reply.text("detail", "error.message")) and text.casefold() != "not found":
        return NotFound(f"Prime Intellect did not find the requested object: {message}")
    if reply.status in {400, 409, 422} and re.search(
        r"capacity|out of stock|unavailable|no longer available", message, re.IGNORECASE
    ):
        return NoCapacity(
            f"Prime Intellect currently has no free capacity ({message})", "Try another GPU, or try again later."
        )
    return None


class PrimeIntellect(HttpProvider):
    """A `Provider` for one user's Prime Intellect account."""

    name = "prime_intellect"
    machine_options = frozenset({"image", "region"})
    api = Api(
        platform="Prime Intellect",
        url="https://api.primeintellect.ai/api/v1",
        url_variable="GPUWARDEN_PRIME_INTELLECT_URL",
        key_variable="PRIME_API_KEY",
        refusal=_refusal,
        message_fields=("detail", "errors.0.details", "error.message", "message"),
    )
    max_name = 64

    async def check_account(self) -> Findings:
        """Return findings about the team and the account's SSH keys, because a Pod accepts no other keys."""
        try:
            await self._key_id()
        except BadRequest as refusal:
            return [self.finding(Severity.ERROR, refusal.message, refusal.next_steps)]
        if not (team := self.env.get("PRIME_TEAM_ID")):
            return []
        teams = await self.client.ask("GET", "/user/teams", _Teams, params={"limit": PAGE})
        if isinstance(teams, Unknown) or team in {t.teamId for t in readable(teams.value.data, _Team)}:
            return []
        message = "the key's user is not in the Prime Intellect team with the id in PRIME_TEAM_ID"
        return [self.finding(Severity.ERROR, message, "Set PRIME_TEAM_ID to the id of one of your teams, or unset it.")]

    async def ask_account(self) -> Answer[str]:
        """Return the id of the key's user."""
        answer = await self.client.ask("GET", "/user/whoami", _Whose)
        return answer if isinstance(answer, Unknown) else Known(answer.value.data.id)

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the cheapest matching offer."""
        answer = await self._offer(resources)
        if isinstance(answer, Unknown):
            return answer
        chosen = answer.value
        offer = chosen.offer
        amounts = ((chosen.vcpus, "vCPUs"), (chosen.memory_gb, "GB memory"), (chosen.disk_gb, "GB disk"))
        what = "".join(f", {amount} {unit}" for amount, unit in amounts if amount)
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=chosen.usd_per_hour,
                source="Prime Intellect availability",
                at=self.clock.now(),
                note=f"{offer.gpuCount} x {offer.gpuType} from {offer.provider or 'unknown'}{what}",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent the cheapest matching offer."""
        with nothing_sent():
            label = self.label(token)
            chosen = await self._offer(resources)
            if isinstance(chosen, Unknown):
                return chosen
            key = await self._key_id()
        if isinstance(key, Unknown):
            return key
        offer, team = chosen.value.offer, self.env.get("PRIME_TEAM_ID")
        image = self.option(resources, "image", "PRIME_IMAGE") or DEFAULT_IMAGE
        if offer.images and image not in offer.images:
            image = offer.images[0]
        pod: dict[str, object] = {
            "name": label,
            "cloudId": offer.cloudId,
            "gpuType": offer.gpuType,
            "socket": offer.socket,
            "gpuCount": offer.gpuCount,
            "image": image,
            "dataCenterId": offer.dataCenter,
            "country": offer.country,
            "security": offer.security,
            "sshKeyId": key.value,
            "autoRestart": False,
            "diskSize": chosen.value.disk_gb,
            "vcpus": chosen.value.vcpus,
            "memory": chosen.value.memory_gb,
            "maxPrice": resources.max_price_usd_per_hour,
        }
        plain = {name: value for name, value in pod.items() if value is not None}
        whose: dict[str, object] = {"team": {"teamId": team}} if team else {}
        order = {"pod": plain, "provider": {"type": offer.provider}, **whose}
        answer = await self.client.ask("POST", "/pods/", _Pod, body=order, creates=True)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value))

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one Pod. If its status is UNKNOWN, the answer is Unknown."""
        answer = await self.client.ask("GET", f"/pods/{id}", _Pod)
        if isinstance(answer, Unknown):
            return answer
        if answer.value.status == "UNKNOWN" and answer.value.id == id:
            return Unknown(f"Prime Intellect reports an unknown status for Pod {id}")
        return Known(self._view(answer.value))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every Pod that is not gone, from all pages; Unknown if the pages contain fewer than the total."""
        found: dict[str, _Pod | _PodId] = {}
        read = 0
        for _ in range(MAX_PAGES):
            answer = await self.client.ask("GET", "/pods/", _Pods, params={"offset": read, "limit": PAGE})
            if isinstance(answer, Unknown):
                return answer
            page, before = answer.value, len(found)
            found |= {p.id: p for p in page.data}
            read += len(page.data)
            if read >= page.total_count and len(found) >= page.total_count:
                pods = readable(found.values(), _Pod)
                if found and not pods:
                    return Unknown(f"none of the {len(found)} Pods that Prime Intellect listed could be read")
                gone = {p.id for p in pods if p.status == "TERMINATED"}
                return Known(tuple(self._view(p) for p in found.values() if p.id not in gone))
            if len(found) == before:
                return Unknown(f"Prime Intellect listed {len(found)} of {page.total_count} Pods")
        return Unknown("Prime Intellect's list of Pods does not end")

    async def balance(self) -> Answer[Balance]:
        """Return the balance of the paying wallet: the team's wallet if a team is set, otherwise the user's."""
        team = self.env.get("PRIME_TEAM_ID")
        params: dict[str, str | int] = {"limit": 1, **({"teamId": team} if team else {})}
        answer = await self.client.ask("GET", "/billing/wallet", _Wallet, params=params)
        return answer if isinstance(answer, Unknown) else Known(Balance(amount=answer.value.balance_usd))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because Prime Intellect can't start a Pod again."""
        raise NotSupported("Prime Intellect can't start a Pod again", "Rent another Pod.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because Prime Intellect can't stop a Pod."""
        raise NotSupported("Prime Intellect can't stop a Pod", "Use terminate, which also deletes the Pod's disk.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination."""
        if not is_safe_id(id):
            return Known(None)
        try:
            answer = await self.client.ask("DELETE", f"/pods/{id}", _Deleted, empty=True)
        except NotFound:
            return Known(None)
        return answer if isinstance(answer, Unknown) else Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _offer(self, resources: Resources) -> Answer[ChosenOffer]:
        """Return the cheapest matching offer. Raises NoCapacity if none matches."""
        asked, cap = self.refuse_unsold(resources), resources.max_price_usd_per_hour
        answer = await self._offers(resources.gpu_count)
        if isinstance(answer, Unknown):
            return answer
        image, region = self.option(resources, "image"), self.option(resources, "region")
        fitting = [
            c
            for o in answer.value
            if gpu_matches(asked, (o.gpuType.replace("_", " "),))
            and o.gpuCount == resources.gpu_count
            and o.provider
            and (not image or not o.images or image in o.images)
            and region.casefold() in {"", (o.dataCenter or "").casefold(), (o.country or "").casefold()}
            and o.stockStatus.casefold() not in {"unavailable", "none", ""}
            and not o.prepaidTime
            and bool(o.isSpot) == resources.interruptible
            and (c := choose(o, resources.disk_gb)) is not None
            and (cap is None or (c.usd_per_hour or cap + 1) <= cap)
        ]
        if not fitting:
            limit = "" if cap is None else f" at {usd_per_hour(cap)} or less"
            size = f" with {resources.disk_gb} GB of disk" if resources.disk_gb else ""
            size += "".join(f", {name} {line(wish, 60)}" for name, wish in resources.options.items())
            raise NoCapacity(f"Prime Intellect has no {resources.gpu_count} x {asked}{size}{limit}", "Try again later.")

        def cost(chosen: ChosenOffer) -> tuple[bool, float, str, str]:
            usd = chosen.usd_per_hour
            return usd is None, usd or 0.0, chosen.offer.cloudId, chosen.offer.provider or ""

        return Known(min(fitting, key=cost))

    async def _offers(self, count: int) -> Answer[tuple[Offer, ...]]:
        """Return the available offers from all pages."""
        found: list[Offer] = []
        read = 0
        for page in range(1, MAX_PAGES + 1):
            params: dict[str, str | int] = {"gpu_count": count, "page": page, "page_size": PAGE}
            answer = await self.client.ask("GET", "/availability/gpus", Offers, params=params)
            if isinstance(answer, Unknown):
                return answer
            read += len(answer.value.items)
            found += readable(answer.value.items, Offer)
            if read >= answer.value.totalCount or not answer.value.items:
                break
        if read and not found:
            return Unknown(f"none of Prime Intellect's {read} offers could be read")
        return Known(tuple(found))

    async def _key_id(self) -> Answer[str | None]:
        """Return the id of the user's SSH key in the account, or else the id of the account's primary key.

        Raises BadRequest if the account has neither.
        """
        answer = await self.client.ask("GET", "/ssh_keys/", _Keys, params={"limit": PAGE})
        if isinstance(answer, Unknown):
            return answer
        keys, mine = readable(answer.value.data, _Key), self.ssh_key()
        found = [k.id for k in keys if mine is not None and same_key(k.publicKey or "") == mine]
        if not found and SSH_KEY_VARIABLE not in self.env:
            found = [k.id for k in keys if k.isPrimary]
        if not found:
            raise BadRequest(
                "none of the Prime Intellect account's SSH keys is known to be yours, so no Pod would be reachable",
                "Add your public key to the account.",
            )
        return Known(found[0])

    def _view(self, pod: _Pod | _PodId) -> Instance:
        if not isinstance(pod, _Pod):
            return unclear_instance(pod.id, self.token_in(pod.name), self.api.platform)
        state, meter = STATES[pod.status]
        why = f"status {pod.status}"
        if pod.installationStatus:
            why += f", installation {pod.installationStatus}"
        failed = state is _S.RUNNING and pod.installationFailure
        if state is _S.STOPPED and pod.stoppedPriceHr is None:
            meter, why = (
                True,
                f"{why}; the Pod has no price for the stopped state, so it counts as billed at the full price",
            )
        return Instance(
            id=pod.id,
            token=self.token_in(pod.name),
            state=_S.FAILED if failed else state,
            place=self._where(pod) if state is _S.RUNNING and not failed else None,
            meter=meter,
            price_usd_per_hour=positive_price(pod.priceHr) if state is not _S.STOPPED or meter else None,
            stopped_usd_per_hour=positive_price(pod.stoppedPriceHr),
            created_at=epoch(pod.createdAt),
            why=why,
        )

    def _where(self, pod: _Pod) -> Place | None:
        """Return the SSH address, or None while the image is being installed."""
        if pod.installationStatus not in {None, "FINISHED", "ACTIVE", "COMPLETED"}:
            return None
        address = (
            pod.sshConnection if isinstance(pod.sshConnection, str | None) else next(iter(pod.sshConnection), None)
        )
        match = _SSH.fullmatch(address or "")
        if match is None:
            return None
        return self.place(pod.id, match[2], int(match[3]) if match[3] else None, match[1])

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return a Pod that is gone, with its bill, or None if the history does not list the Pod yet."""
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
                for past in readable(answer.value.data, _Past):
                    if past.id == id:
                        return Instance(
                            id=id,
                            token=token,
                            state=_S.GONE,
                            meter=False,
                            cost_usd=past.totalBilledPrice,
                            why="Prime Intellect reports only the Pod's bill",
                        )
        except WardenError:
            return None
        return None


ACCOUNT_KEYS: Final = (PrimeIntellect.api.key_variable, "PRIME_INTELLECT_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={
        "prime": ("pods|pod terminate|delete|stop", "sandbox|sandboxes delete|terminate", "disks|disk terminate|delete")
    },
    hosts=("primeintellect.ai",),
    requests=(r"/terminate\b",),
    servers=("prime", "primeintellect"),
)


def create(profile: Profile, state: Path, clock: Clock) -> PrimeIntellect:
    """Return the provider for one profile. The provider stores no files."""
    return PrimeIntellect(profile, clock)
