"""Emulator of Vast.ai's API, as used by the provider and the vendor's client, with its traps.

Requests and replies follow the published description; parameters that it lacks are refused. If the vendor's client,
dstack, or SkyPilot differs from it, both are served, and a comment marks the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from clouds.base import Refuse, Reply, Request, route
from clouds.platform import Platform
from clouds.vastai_instances import VastInstances
from clouds.vastai_market import COUNTS, HARDWARE, STORAGE_USD, conditions, error, not_a_key, offers
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Resources
from gpuwarden.providers.vastai import Vast

ORDER_FIELDS = {
    "image", "template_hash_id", "label", "disk", "runtype", "target_state", "price", "env", "cancel_unavail", "vm",
    "onstart", "args", "args_str", "use_jupyter_lab", "jupyter_dir", "python_utf8", "lang_utf8", "force", "user",
    "image_login", "volume_info",
    "client_id", "extra", "create_from",  # not in the description; sent by the vendor's client and by dstack
}  # fmt: skip
VOLUME_FIELDS = {"create_new", "volume_id", "size", "mount_path", "name"}
RUNTYPES = {"ssh", "jupyter", "args", "ssh_proxy", "ssh_direct", "jupyter_proxy", "jupyter_direct"}
"""From the description. The vendor's client sends several words at once, and truncates `direct` to `direc`."""


class VastCloud(VastInstances):
    """An account that is offered one machine for each GPU model and number of GPUs."""

    profile_id = "vastai"
    gpus: ClassVar[dict[str, float]] = {"H100 SXM": 2.20, "RTX 4090": 0.40, "L40S": 0.70}
    window = (5, 10.0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stale_offers: set[int] = set()
        self.bad_key_is_404 = False
        self.tells_credit = True
        self.makes_underbid = False
        """Whether refusing a bid that is too low still creates a contract: a stopped instance whose disk bills."""
        self.account_keys = [{"id": 1, "user_id": 7, "key": "ssh-ed25519 AAAA someone"}]

    def inner(self, ident: str) -> str:
        return self.numbered(ident)

    def authorized(self, request: Request) -> bool:
        """Return whether a key is accepted. Offers, GPU names and logs are public; a wrong key is always refused."""
        public = re.match(r"(POST /api/v0/bundles|GET /api/v0/gpu_names/|GET /logs/)", request.line)
        return super().authorized(request) or (public is not None and "authorization" not in request.headers)

    def unauthorized(self) -> Reply:
        return error(404 if self.bad_key_is_404 else 401, "auth_error", "Invalid user key")

    def unknown_route(self, request: Request) -> Reply:
        return error(404, "not_found_route", "no such route")

    def undescribed(self, names: str) -> Reply:
        return error(400, "invalid_args", f"unknown {names}")

    def limited(self) -> Reply:
        return Reply(429, {"detail": "API requests too frequent endpoint threshold=4.5"})

    # -------------------------------------------------------------------------------------------------------- offers

    def offer(self, gpu: str, count: int, *, bid: bool = False) -> dict[str, Any]:
        number = 100 * (1 + list(self.prices).index(gpu)) + count
        usd, least = self.prices[gpu] * count, self.least_bid(gpu, count)
        return {
            **HARDWARE,
            "id": number,
            "ask_contract_id": number,
            "machine_id": number,
            "gpu_name": gpu,
            "num_gpus": count,
            "gpu_total_ram": HARDWARE["gpu_ram"] * count,
            "dph_base": least if bid else usd - STORAGE_USD,
            "dph_total": least + STORAGE_USD if bid else usd,
            "storage_total_cost": STORAGE_USD,
            "disk_space": 2000.0,
            "is_bid": bid,
            "min_bid": least,
            "rented": False,
            "avail_vol_ask_id": 9000 + number,
            "avail_vol_size": 500.0,
        }

    def market(self, *, bid: bool) -> Iterator[dict[str, Any]]:
        """Yield every offer."""
        if not self.full():
            yield from (self.offer(gpu, count, bid=bid) for gpu in self.prices for count in COUNTS)

    @route("POST", "/api/v0/bundles")
    def search(self, request: Request, at: Mapping[str, str]) -> Reply:
        query = request.body if request.body is not None else {}
        bid = isinstance(query, dict) and query.get("type") == "bid"
        return Reply(200, {"offers": offers(self.market(bid=bid), query)})

    @route("GET", "/api/v0/gpu_names/unique")
    def gpu_names(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Return the names of all GPUs. Not in the description, but the vendor's client requests them."""
        return Reply(200, {"gpu_names": list(self.prices)})

    @route("PUT", "/api/v0/asks/{id}")
    def accept(self, request: Request, at: Mapping[str, str]) -> Reply:
        number, body = int(at["id"]), self.body(request, ORDER_FIELDS)
        self.check_order(body)
        gpu = next((gpu for n, gpu in enumerate(self.prices) if number // 100 == n + 1), None)
        if gpu is None:
            msg = f"error 404/3603: no_such_ask Instance type by id {number} is not available."
            return Reply(404, {"success": False, "error": "invalid_args", "msg": msg, "ask_id": number})
        count = number % 100
        if number in self.stale_offers:
            msg = f"error 410/3907: no_such_ask Instance type {number} is no longer available."
            return Reply(410, {"success": False, "error": "no_such_ask", "msg": msg, "ask_id": number})
        bid = body.get("price")
        if bid is not None and (self.makes_underbid or bid < self.least_bid(gpu, count)):
            return self.underbid(request, number, gpu)
        resources = Resources(
            gpu=gpu, gpu_count=count, interruptible=bid is not None, durable_storage="volume_info" in body
        )
        own = {"order": body, "gpu": gpu, "count": count, **({} if bid is None else {"bid": bid})}
        try:
            made = self.rent(body.get("label") or "", resources, **own)
        except NoCapacity:
            return Reply(404, {"success": False, "error": "invalid_args", "msg": "error 404/3603: no_such_ask"})
        return Reply(200, {"success": True, "new_contract": self.number(made.id)})

    @staticmethod
    def check_order(body: dict[str, Any]) -> None:
        """Raise Refuse for an order with values that the description does not allow."""
        price, volume = body.get("price"), body.get("volume_info") or {}
        words = set((body.get("runtype") or "ssh").replace("direc ", "direct ").split())
        if not (body.get("image") or body.get("template_hash_id")):
            raise Refuse(error(400, "invalid_args", "'image' is required"))
        if not words <= RUNTYPES or set(volume) - VOLUME_FIELDS:
            raise Refuse(error(400, "invalid_args", f"invalid runtype or volume_info: {sorted(words)} {volume}"))
        if price is not None and not (isinstance(price, int | float) and 0.001 <= price <= 128):
            raise Refuse(error(400, "invalid_price", "Please set a bid price >= 0.001."))

    def underbid(self, request: Request, number: int, gpu: str) -> Reply:
        reply = {"success": False, "error": "invalid_price", "msg": "bid too low", "ask_id": number}
        if not self.makes_underbid:
            return Reply(400, reply)
        wanted = Resources(gpu=gpu, interruptible=True)
        bid = request.body["price"]
        made = self.rent(request.body["label"], wanted, order=request.body, gpu=gpu, count=1, bid=bid)
        self.cloud.stop(made.id)
        return Reply(400, {**reply, "new_contract": self.number(made.id)})

    @route("GET", "/api/v0/users/current")
    def user(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Return the user. The description has only `balance`; the service also returns `credit` and the key itself."""
        shown = {
            "id": self.user,
            "key_id": 3,
            "email": "me@example.com",
            "ssh_key": "",
            "sid": "s1",
            "host_agreement_accepted": False,
            "api_key": self.key,
        }
        if self.tells_credit:
            return Reply(200, {**shown, "balance": -3.5, "credit": self.money})
        return Reply(200, {**shown, "balance": self.money})

    @route("GET", "/api/v0/ssh")
    def keys(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, self.account_keys)

    @route("GET", "/api/v0/charges")
    def charges(self, request: Request, at: Mapping[str, str]) -> Reply:
        if unknown := set(request.query) - {"select_filters", "format", "latest_first", "limit", "after_token"}:
            raise not_a_key(min(unknown))
        wanted = conditions(request.query.get("select_filters", "{}"))
        if unknown := set(wanted) - {"day", "type"}:
            raise not_a_key(min(unknown))
        if not {"gte", "lte"} <= set(wanted.get("day", {})):
            return error(400, "invalid_args", "Must provide both 'day' gte and lte filters for instance charges")
        rows = [
            {"type": "instance", "source": f"instance-{self.number(i)}", "amount": round((seen.cost_usd or 0.0), 3)}
            for i in self.own
            if (seen := self.see(i)) is not None
        ]
        return Reply(
            200, {"success": True, "count": len(rows), "total": len(rows), "next_token": None, "results": rows}
        )


def _reports_no_instances(status: int, body: dict[str, Any]) -> bool:
    if status == 404:
        return body.get("error") in {"not_found", "no_such_instance"}
    return body.get("instances", 0) is None or (body.get("instances") == [] and body.get("total_instances", 1) <= 0)


PLATFORM = Platform(
    name="vastai", account=VastCloud, provider=Vast, taken="resumed", spot=True,
    creates=r"^PUT /api/v0/asks/",
    lists=r"^GET /api/v1/instances/$",
    gets=r"^GET /api/v0/instances/",
    ends=r"^DELETE /api/v0/instances/",
    gets_balance=r"^GET /api/v0/users/current",
    reports_no_instances=_reports_no_instances,
    ident="4200001",
    spec=("vastai.openapi.yaml", ""),
    gaps=(
        "instances.ports: {",  # ports in the same form as in the list, which the clients expect
        "instances.extra_env",  # pairs, as the vendor's client expects
        "instances: None is not",  # null for an instance that is gone
        "/api/v0/gpu_names/unique/: no such route",  # the vendor's client calls it
    ),
    durable="/data/out",
    facts={
        "rests": ["stop", "terminate"], "bills": ["stop"], "bills_with_durable_storage": ["stop", "terminate"],
        "reversible": ["stop"], "by_hand": False, "spot": True,
        "survives": [
            {"path": "/workspace/x", "lives": "ynyy"},
            {"path": "/workspace/x", "durable": True, "lives": "ynyy"},
            {"path": "/data/x", "lives": "nnnn"},
            {"path": "/data/x", "durable": True, "lives": "yyyy"},
        ],
    },
)  # fmt: skip
