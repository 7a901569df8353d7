"""Provider `vastai`: containers on machines that Vast.ai's hosts rent out.

| variable | meaning |
|---|---|
| `VAST_API_KEY`, `VAST_API_KEY_FILE` | the account's key; it needs instance_write, which covers create and destroy |
| `VAST_IMAGE` | the container image for new instances |

The price cap limits the search for offers. A bid is within the cap and above the offer's minimum, so that the next
bidder does not immediately win the machine. A durable volume is created together with the instance, on the same
machine, and exists as long as the machine does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadRequest, NoCapacity, NotFound, RateLimited, WardenError, nothing_sent
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import authorize_key
from gpuwarden.providers._http import Api, ApiResponse, ResponseModel
from gpuwarden.providers._rented import (
    MAX_PAGES,
    Findings,
    HttpProvider,
    gpu_matches,
    no_such,
    positive_price,
)

_S = InstanceState
DEFAULT_IMAGE: Final = "vastai/pytorch:@vastai-automatic-tag"
DISK_GB: Final = 50
OFFERS: Final = 3000
TRIES: Final = 3
"""Number of offers to try, cheapest first, because other customers take offers quickly."""
BILL_DAYS: Final = 60
HEADROOM: Final = 1.2
"""Ratio of a bid to the minimum winning bid. The bid is the hourly price."""
MOST_BID: Final = 1.5
"""Ratio of a quote to the minimum bid. The bid of an outbid instance is raised only up to the quoted price."""
ON_START: Final = "touch ~/.no_auto_tmux"
"""Prevents tmux from starting at every login and every command."""


Contract = Annotated[int, Field(ge=0)]
"""An instance's id. `_is_id` accepts every such id, because an instance that can't be looked up must not count as
gone."""


class _Instance(ResponseModel):
    id: Contract
    actual_status: str | None
    intended_status: str
    cur_state: str
    next_state: str | None = None
    label: str | None
    dph_total: float | None = None
    storage_total_cost: float | None = None
    start_date: float | None = None
    end_date: float | None = None
    is_bid: bool = False
    min_bid: float | None = None
    dph_base: float | None = None
    public_ipaddr: str | None = None
    ports: Any = None
    ssh_host: str | None = None
    ssh_port: Any = None


class _Label(ResponseModel):
    """The fields that even an invalid row must have, so that no instance is overlooked."""

    id: Contract
    label: str | None


class _One(ResponseModel):
    instances: _Instance | None


class _Page(ResponseModel):
    instances: tuple[dict[str, Any], ...]
    next_token: str | None
    total_instances: int
    success: Literal[True] = True


class _Offer(ResponseModel):
    id: int
    gpu_name: str
    num_gpus: int
    dph_total: float
    min_bid: float | None = None
    storage_total_cost: float | None = None
    avail_vol_ask_id: int | None = None
    avail_vol_size: float | None = None


class _Offers(ResponseModel):
    offers: tuple[_Offer, ...]


class _GpuNames(ResponseModel):
    gpu_names: tuple[str, ...]


class _Made(ResponseModel):
    """The reply to an order. The contract that it names exists even if the order was refused."""

    success: bool
    new_contract: Contract


class _Done(ResponseModel):
    success: Literal[True]


class _Key(ResponseModel):
    id: int


class _User(ResponseModel):
    """The account. The prepaid balance is `credit`, which the API description omits; `balance` may differ."""

    balance: float
    credit: float | None = None


class _Owner(ResponseModel):
    id: int


class _Charge(ResponseModel):
    source: str
    amount: float


class _Charges(ResponseModel):
    results: tuple[_Charge, ...]
    next_token: str | None


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Map Vast.ai's errors: an invalid key may be reported as 404, and an offer that is gone as 400, 404 or 410."""
    code, text = reply.text("error"), reply.text("msg", "detail")
    if reply.status in {401, 403, 404} and (code == "auth_error" or "invalid user key" in text.casefold()):
        return AuthFailed(
            f"Vast.ai refused the key ({reply.status}: {message})", "Check VAST_API_KEY and its permissions."
        )
    if reply.status == 429 and reply.after_s is None:
        threshold = re.search(r"threshold=(\d+(?:\.\d+)?)", text)
        after = float(threshold[1]) if threshold else None
        return RateLimited(f"Vast.ai received too many requests ({message})", "Wait, then retry.", after)
    if reply.status in {200, 400, 404, 410} and "no_such_ask" in {code, *re.findall(r"no_such_ask", text)}:
        hint = "Submit the job again to get the current offers, or choose another GPU or platform."
        return NoCapacity(f"the Vast.ai offer is no longer available ({message})", hint)
    if reply.status == 404 and code in {"not_found", "no_such_instance"}:
        return NotFound(f"Vast.ai did not find the requested object: {message}")
    return None


class Vast(HttpProvider):
    """A `Provider` for one Vast.ai account."""

    name = "vastai"
    machine_options = frozenset({"image", "region"})
    api = Api(
        platform="Vast.ai",
        url="https://console.vast.ai",
        url_variable="GPUWARDEN_VASTAI_URL",
        key_variable="VAST_API_KEY",
        refusal=_refusal,
        message_fields=("msg", "detail", "error"),
        pace_s=2.0,
    )
    max_name = 1024

    def __init__(self, profile: Profile, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        super().__init__(profile, clock, env)
        self._gpu_names: tuple[str, ...] = ()
        self._stopped: set[str] = set()
        """Instances that this process stopped. The API reports the same state for outbid instances."""

    async def check_account(self) -> Findings:
        """Return an error finding if neither this machine nor the account has a public SSH key.

        A new instance accepts the key that `create` passes, and the account's keys.
        """
        if self.ssh_key() is not None:
            return []
        answer = await self.client.ask("GET", "/api/v0/ssh/", tuple[_Key, ...])
        if isinstance(answer, Known) and not answer.value:
            message = (
                "neither this machine nor the Vast.ai account has a public SSH key, so no instance would be reachable"
            )
            return [self.finding(Severity.ERROR, message, "Create one with `ssh-keygen -t ed25519`.")]
        return []

    async def ask_account(self) -> Answer[str]:
        """Return the id of the key's user."""
        answer = await self.client.ask("GET", "/api/v0/users/current/", _Owner)
        return answer if isinstance(answer, Unknown) else Known(str(answer.value.id))

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the cheapest matching offer, including the disk."""
        answer = await self._offers(resources)
        if isinstance(answer, Unknown):
            return answer
        best, price = answer.value[0], _price(answer.value[0], resources)
        note = f"{best.num_gpus} x {best.gpu_name}; bandwidth is billed in addition"
        if resources.interruptible and price is not None:
            note += f"; the first bid is {usd_per_hour(price)}, raised up to the quoted price if outbid"
            price += (best.min_bid or 0.0) * (MOST_BID - HEADROOM)
            cap = resources.max_price_usd_per_hour
            price = price if cap is None else min(price, cap)
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=price,
                source="Vast.ai bid" if resources.interruptible else "Vast.ai offer",
                at=self.clock.now(),
                note=note,
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent the cheapest of the first `TRIES` offers that is still available; each is ordered at most once."""
        with nothing_sent():
            label = self.label(token)
            offers = await self._offers(resources)
        if isinstance(offers, Unknown):
            return offers
        *others, last = offers.value[:TRIES]
        for offer in others:
            try:
                return await self._rent(offer, resources, label, token)
            except NoCapacity:
                there = await self.find(token)  # a refused request may still have taken effect
            if isinstance(there, Unknown):
                return there
            if there.value:
                return Known(there.value[0])
        return await self._rent(last, resources, label, token)

    def is_id(self, ident: str) -> bool:
        """Return whether an id is a number, as Vast.ai's instance ids are."""
        return _is_id(ident)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance. `{"instances": null}` means that it is gone."""
        answer = await self.client.ask("GET", f"/api/v0/instances/{id}/", _One, params={"owner": "me"})
        if isinstance(answer, Unknown):
            return answer
        found = answer.value.instances
        return Known(None if found is None else self._view(found))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance from all pages; Unknown if the pages contain fewer than the reported total."""
        found: dict[str, Instance] = {}
        params: dict[str, str | int] = {"limit": 25, "order_by": '[{"col":"id","dir":"asc"}]'}
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            answer = await self.client.ask("GET", "/api/v1/instances/", _Page, params=params)
            if isinstance(answer, Unknown):
                return answer
            page, before = answer.value, len(found)
            rows = self.read_rows(page.instances, _Instance, self._view, _Label, lambda row: (str(row.id), row.label))
            if isinstance(rows, Unknown):
                return rows
            found |= {i.id: i for i in rows.value}
            if page.next_token is None:
                if len(found) < page.total_instances:
                    return Unknown(f"Vast.ai listed {len(found)} of {page.total_instances} instances")
                return Known(tuple(found.values()))
            if page.next_token in seen or len(found) == before:
                break
            seen.add(page.next_token)
            params["after_token"] = page.next_token
        return Unknown("Vast.ai's list of instances does not end")

    async def balance(self) -> Answer[Balance]:
        """Return the account's credit. The reply may contain the key, which is not parsed."""
        answer = await self.client.ask("GET", "/api/v0/users/current/", _User)
        if isinstance(answer, Unknown):
            return answer
        user = answer.value
        return Known(Balance(amount=user.balance if user.credit is None else user.credit))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped instance. It waits while another customer rents its GPU."""
        self._stopped.discard(id)
        return await self._put(id, "running")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a stop; the disk is still billed."""
        answer = await self._put(id, "stopped")
        self._stopped.add(id)
        return answer

    async def raise_bid(self, id: str, most: float) -> Answer[None]:  # noqa: A002
        """Raise the bid of an outbid instance, if a winning bid costs at most `most` dollars per hour."""
        if not _is_id(id):
            raise no_such("Vast.ai", id)
        answer = await self.client.ask("GET", f"/api/v0/instances/{id}/", _One, params={"owner": "me"})
        if isinstance(answer, Unknown):
            return answer
        seen = answer.value.instances
        if seen is None or not seen.is_bid:
            return Known(None)
        bid = _bid(seen, most)
        if bid is None or bid <= (seen.dph_base or 0.0):
            return Known(None)
        order = {"client_id": "me", "price": bid}
        done = await self.client.ask("PUT", f"/api/v0/instances/bid_price/{id}/", _Done, body=order)
        return done if isinstance(done, Unknown) else Known(None)

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination. Only the next poll shows whether the request worked, so it may have to be repeated."""
        if not _is_id(id):
            return Known(None)
        try:
            answer = await self.client.ask("DELETE", f"/api/v0/instances/{id}/", _Done)
        except NotFound:
            return Known(None)
        return answer if isinstance(answer, Unknown) else Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _put(self, id: str, state: str) -> Answer[None]:  # noqa: A002
        if not _is_id(id):
            raise no_such("Vast.ai", id)
        answer = await self.client.ask("PUT", f"/api/v0/instances/{id}/", _Done, body={"state": state})
        return answer if isinstance(answer, Unknown) else Known(None)

    async def _offers(self, resources: Resources) -> Answer[tuple[_Offer, ...]]:
        """Return the matching offers (at least one), cheapest first. Raises NoCapacity if no offer matches."""
        asked, cap = self.refuse_unsold(resources), resources.max_price_usd_per_hour
        disk, names = resources.disk_gb or DISK_GB, await self._named(asked)
        query: dict[str, object] = {
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "num_gpus": {"eq": resources.gpu_count},
            "reliability": {"gte": 0.98},
            "direct_port_count": {"gte": 1},
            "disk_space": {"gte": disk},
            "allocated_storage": disk,
            "type": "bid" if resources.interruptible else "ondemand",
            "order": [["dph_total", "asc"]],
            "limit": OFFERS,
        }
        if region := self.option(resources, "region"):
            query["geolocation"] = {"in": [region.upper()]}
        if names:
            query["gpu_name"] = {"in": list(names)}
        answer = await self.client.ask("POST", "/api/v0/bundles/", _Offers, body=query, safe=True)
        if isinstance(answer, Unknown):
            return answer
        fitting = [
            o
            for o in answer.value.offers
            if gpu_matches(asked, (o.gpu_name,))
            and o.num_gpus == resources.gpu_count
            and (cap is None or (_price(o, resources) or cap + 1) <= cap)
            and (not resources.durable_storage or (o.avail_vol_ask_id is not None and (o.avail_vol_size or 0) >= disk))
        ]
        if not fitting and len(answer.value.offers) >= OFFERS:
            return Unknown(f"Vast.ai listed only the first {OFFERS} offers, and none of them matches")
        if not fitting:
            limit = "" if cap is None else f" at {usd_per_hour(cap)} or less"
            raise NoCapacity(f"Vast.ai has no offer for {resources.gpu_count} x {asked}{limit}", "Try again later.")
        fitting.sort(key=lambda o: (_price(o, resources) is None, _price(o, resources) or 0.0, o.id))
        return Known(tuple(fitting))

    async def _named(self, asked: str) -> tuple[str, ...]:
        """Return the platform's names for a GPU; empty if the platform's list is empty or unavailable. Raises
        BadRequest if the list does not contain this GPU.
        """
        if not self._gpu_names:
            answer = await self.client.ask("GET", "/api/v0/gpu_names/unique/", _GpuNames)
            if isinstance(answer, Unknown):
                return ()
            self._gpu_names = answer.value.gpu_names
        names = tuple(name for name in self._gpu_names if gpu_matches(asked, (name,)))
        if self._gpu_names and not names:
            raise BadRequest(
                f"Vast.ai has no GPU called {asked!r}", f"Known GPUs: {', '.join(sorted(self._gpu_names))}."
            )
        return names

    async def _rent(self, offer: _Offer, resources: Resources, label: str, token: str) -> Answer[Instance]:
        disk, tier = resources.disk_gb or DISK_GB, self.durable_tier()
        order: dict[str, object] = {
            "client_id": "me",
            "image": self.option(resources, "image", "VAST_IMAGE") or DEFAULT_IMAGE,
            "label": label,
            "disk": disk,
            "runtype": "ssh_direct",
            "target_state": "running",
            "cancel_unavail": True,
            "onstart": ON_START,
        }
        if key := self.ssh_key():
            order["onstart"] = f"{ON_START}; {authorize_key(key)}"
        price = _price(offer, resources)
        if resources.interruptible:
            order["price"] = _bid(offer, resources.max_price_usd_per_hour)
        if resources.durable_storage and tier is not None:
            volume = {"create_new": True, "volume_id": offer.avail_vol_ask_id, "size": disk, "mount_path": tier.path}
            order["volume_info"] = volume
        answer = await self.client.ask("PUT", f"/api/v0/asks/{offer.id}/", _Made, body=order, creates=True)
        if isinstance(answer, Unknown):
            return answer
        taken = answer.value.success
        return Known(
            Instance(
                id=str(answer.value.new_contract),
                token=token,
                state=_S.BOOTING if taken else _S.FAILED,
                price_usd_per_hour=price,
                created_at=self.clock.now(),
                why="rented" if taken else "Vast.ai refused the order but created the contract, whose disk is billed",
            )
        )

    def _view(self, i: _Instance) -> Instance:
        state, meter = _state(i)
        if state is _S.INTERRUPTED and str(i.id) in self._stopped:
            state = _S.STOPPED
        running = state is _S.RUNNING
        why = f"actual_status {i.actual_status}, intended {i.intended_status}, contract {i.cur_state}"
        return Instance(
            id=str(i.id),
            token=self.token_in(i.label),
            state=state,
            place=self._where(i) if running else None,
            meter=meter,
            price_usd_per_hour=positive_price(i.dph_total) if state in {_S.RUNNING, _S.BOOTING, _S.STOPPING} else None,
            stopped_usd_per_hour=positive_price(i.storage_total_cost),
            created_at=i.start_date,
            ends_at=i.end_date if i.end_date and i.end_date > 0 else None,
            why=why,
        )

    def _where(self, i: _Instance) -> Place | None:
        """Return the direct address if available, otherwise the slower proxy's address."""
        try:
            port = int(i.ports["22/tcp"][0]["HostPort"])  # the public port of the container's port 22
        except (KeyError, IndexError, TypeError, ValueError):
            port = 0
        address = (i.public_ipaddr or "").strip()
        if 0 < port < 65536 and address:
            return self.place(str(i.id), address, port)
        proxy = str(i.ssh_port)
        return self.place(str(i.id), i.ssh_host, int(proxy)) if i.ssh_host and re.fullmatch(r"\d{1,5}", proxy) else None

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return an instance that is gone, with its charges, or None if they are not available."""
        now = int(self.clock.now())
        days = {"day": {"gte": now - BILL_DAYS * 86400, "lte": now + 86400}, "type": {"in": ["instance"]}}
        params: dict[str, str | int] = {"select_filters": json.dumps(days), "limit": 500}
        total, found = 0.0, False
        try:
            for _ in range(10):
                answer = await self.client.ask("GET", "/api/v0/charges/", _Charges, params=params)
                if isinstance(answer, Unknown):
                    return None
                mine = [c.amount for c in answer.value.results if c.source == f"instance-{id}"]
                total, found = total + sum(mine), found or bool(mine)
                if answer.value.next_token is None:
                    break
                params["after_token"] = answer.value.next_token
            else:
                return None  # an incomplete list of charges is not a bill
        except WardenError:
            return None
        if not found:
            return None
        why = "Vast.ai reports only the charges for the instance"
        return Instance(id=id, token=token, state=_S.GONE, meter=False, cost_usd=total, why=why)


def _is_id(ident: str) -> bool:
    """Return whether an id is a number, as Vast.ai's instance ids are."""
    return re.fullmatch(r"[0-9]{1,18}", ident) is not None


def _price(offer: _Offer, resources: Resources) -> float | None:
    """Return the hourly price, including the disk."""
    if not resources.interruptible:
        return positive_price(offer.dph_total)
    bid = _bid(offer, resources.max_price_usd_per_hour)
    return None if bid is None else bid + (offer.storage_total_cost or 0.0)


def _bid(row: _Offer | _Instance, most: float | None) -> float | None:
    """Return a winning bid with headroom, at most `most` dollars per hour including the disk; None if no such bid
    exists.
    """
    least = positive_price(row.min_bid)
    if least is None:
        return None
    bid = math.ceil(least * HEADROOM * 1000) / 1000
    if most is not None:
        bid = min(bid, math.floor((most - (row.storage_total_cost or 0.0)) * 1000 + 1e-6) / 1000)
    return bid if bid >= least else None


def _state(i: _Instance) -> tuple[InstanceState, bool | None]:
    """Return the normalized state for Vast.ai's four status fields, and whether compute is billed.

    `actual_status` may have undocumented values. An outbid instance has `stopped` in the other three fields, as does an
    instance that its user stopped. Only an instance with a bid can be outbid.
    """
    wanted = i.intended_status == "running"
    match i.actual_status:
        case "running":
            return (_S.RUNNING, True) if wanted else (_S.STOPPING, True)
        case _ if i.is_bid and {i.intended_status, i.cur_state, i.next_state or "stopped"} == {"stopped"}:
            return _S.INTERRUPTED, False
        case "stopped" | "exited" if not wanted:
            return _S.STOPPED, None if i.cur_state == "running" else False
        case "stopped" | "exited" if i.cur_state == "running":
            return _S.FAILED, True  # the container exited by itself; the contract continues
        case "stopped" | "exited":
            return (_S.INTERRUPTED if i.is_bid else _S.BOOTING), None  # outbid, or waiting for its GPU
        case "offline" | "unknown" | "frozen":
            return _S.INTERRUPTED, None
        case _ if not wanted and i.cur_state == "stopped":
            return _S.STOPPED, False
        case _:
            return _S.BOOTING, None


ACCOUNT_KEYS: Final = (Vast.api.key_variable, "VASTAI_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={"vastai": ("destroy", "stop", "delete instance|volume|endpoint|autogroup|workergroup", "recycle")},
    aliases={"vast": "vastai", "vast.py": "vastai"},
    remote={"vastai": ("execute *",)},
    hosts=("vast.ai",),
    requests=(r"\"?state\"?\s*[:=]+\s*\"?stopped", r"/recycle\b"),
    code=(r"\b(?:destroy|stop|recycle)_instances?\s*\(", r"\bdelete_volume\s*\("),
    servers=("vast", "vastai"),
)


def create(profile: Profile, state: Path, clock: Clock) -> Vast:
    """Return the provider for one profile. The provider stores no files."""
    return Vast(profile, clock)
