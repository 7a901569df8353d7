"""Vast.ai's interface as far as the provider uses it, with its traps."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from clouds.base import Asked, Emulator, Refuse, Told, alive, route
from clouds.platform import Platform
from gpuwarden.core.errors import Conflict, NoCapacity, NotFound
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.vastai import Vast

_S = InstanceState
PAGE = 25
STATUS: dict[InstanceState, tuple[str | None, str, str]] = {  # actual_status, intended_status, cur_state
    _S.BOOTING: ("loading", "running", "running"),
    _S.RUNNING: ("running", "running", "running"),
    _S.STOPPING: ("running", "stopped", "running"),
    _S.STOPPED: ("exited", "stopped", "stopped"),
    _S.INTERRUPTED: ("stopped", "running", "stopped"),
    _S.TERMINATING: ("running", "stopped", "running"),
    _S.FAILED: ("exited", "running", "running"),
}


def error(status: int, code: str, msg: str) -> Told:
    return Told(status, {"success": False, "error": code, "msg": msg})


class VastCloud(Emulator):
    """An account whose offers are one machine for each GPU and number of GPUs."""

    profile_id = "vastai"
    gpus = {"H100 SXM": 2.20, "RTX 4090": 0.40, "L40S": 0.70}
    window = (5, 10.0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stale_offers: set[int] = set()
        self.deaf_ends = 0
        """So many destroy requests are answered with success and not carried out."""
        self.bad_key_is_404 = False
        self.tells_credit = True
        self.makes_underbid = False
        """A bid that is too low is refused, and its contract made: the instance is stopped and its disk bills."""
        self.end_date: float | None = None
        """When the contracts end, in seconds since the epoch; None: thirty days after each began."""
        self.account_keys = [{"id": 1, "user_id": 7, "key": "ssh-ed25519 AAAA someone"}]

    def inner(self, ident: str) -> str:
        return self.numbered(ident)

    def unauthorized(self) -> Told:
        return error(404 if self.bad_key_is_404 else 401, "auth_error", "Invalid user key")

    def unknown_route(self, asked: Asked) -> Told:
        return error(404, "not_found_route", "no such route")

    def limited(self) -> Told:
        return Told(429, {"detail": "API requests too frequent endpoint threshold=4.5"})

    # ----------------------------------------------------------------------------------------------------- instances

    @route("GET", "/api/v0/instances")
    def old_list(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return error(410, "deprecated_endpoint", "use /api/v1/instances/")

    @route("GET", "/api/v1/instances")
    def list_instances(self, asked: Asked, at: Mapping[str, str]) -> Told:
        limit = min(int(asked.query.get("limit", PAGE)), PAGE)
        all_of_them = sorted(self.listed(), key=lambda i: self.number(i.id))
        after = asked.query.get("after_token")
        if after:
            try:
                last = int(json.loads(base64.b64decode(after, validate=True))["id"])
            except (ValueError, KeyError):
                return Told(400, {"error": "invalid_token", "msg": "Invalid pagination token"})
            rest = [i for i in all_of_them if self.number(i.id) > last]
        else:
            rest = all_of_them
        page = rest[:limit]
        token = None
        if len(rest) > limit:
            token = base64.b64encode(json.dumps({"id": self.number(page[-1].id)}).encode()).decode()
        return Told(
            200,
            {
                "success": True,
                "instances_found": len(page),
                "total_instances": len(all_of_them),
                "next_token": token,
                "instances": [self.instance(i) for i in page],
            },
        )

    @route("GET", "/api/v0/instances/{id}")
    def get_instance(self, asked: Asked, at: Mapping[str, str]) -> Told:
        found = self.see(self.numbered(at["id"]))
        return Told(200, {"instances": self.instance(found, single=True) if found and alive(found) else None})

    @route("PUT", "/api/v0/instances/{id}")
    def manage(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        try:
            if asked.body.get("state") == "stopped":
                self.cloud.stop(i.id)
            elif asked.body.get("state") == "running":
                self.cloud.start(i.id)
                self.booted(i.id)
        except (Conflict, NotFound) as refusal:
            return error(400, "invalid_args", refusal.message)
        return Told(200, {"success": True})

    @route("DELETE", "/api/v0/instances/{id}")
    def destroy(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        if self.deaf_ends:
            self.deaf_ends -= 1
        else:
            self.cloud.terminate(i.id)
        return Told(200, {"success": True, "msg": "Instance destroyed successfully"})

    def need(self, number: str) -> Instance:
        found = self.see(self.numbered(number))
        if not alive(found):
            raise Refuse(error(404, "not_found", "Instance not found"))
        assert found is not None
        return found

    def instance(self, i: Instance, *, single: bool = False) -> dict[str, Any]:
        own = self.own[i.id]
        actual, intended, contract = STATUS[i.state]
        host, port = self.address(i.id)
        running = actual == "running"
        return {
            "id": self.number(i.id),
            "actual_status": actual,
            "intended_status": intended,
            "cur_state": contract,
            "next_state": contract,
            "label": own["label"],
            "gpu_name": own["gpu"],
            "num_gpus": own["count"],
            "is_bid": own["order"].get("price") is not None,
            "dph_total": i.price_usd_per_hour,
            "storage_total_cost": i.stopped_usd_per_hour or 0.02,
            "start_date": i.created_at,
            "end_date": self.end_date or (i.created_at or 0) + 30 * 86400,
            "public_ipaddr": f"{host}\n",
            "ssh_host": "ssh5.vast.ai",
            "ssh_port": 12345,
            "status_msg": None,
            **({} if single and not running else {"ports": self.ports(port) if running else None}),
        }

    @staticmethod
    def ports(port: int) -> dict[str, Any]:
        return {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(port)}]}

    # -------------------------------------------------------------------------------------------------------- offers

    def offer(self, gpu: str, count: int) -> dict[str, Any]:
        number = 100 * (1 + list(self.prices).index(gpu)) + count
        usd = self.prices[gpu] * count
        return {
            "id": number,
            "gpu_name": gpu,
            "num_gpus": count,
            "dph_total": usd,
            "min_bid": usd / 2 + 0.0001,
            "avail_vol_ask_id": 9000 + number,
            "avail_vol_size": 500.0,
            "machine_id": number,
        }

    @route("POST", "/api/v0/bundles")
    def search(self, asked: Asked, at: Mapping[str, str]) -> Told:
        count = asked.body["num_gpus"]["eq"]
        if self.full():
            return Told(200, {"offers": []})
        return Told(200, {"offers": [self.offer(gpu, count) for gpu in self.prices]})

    @route("PUT", "/api/v0/asks/{id}")
    def accept(self, asked: Asked, at: Mapping[str, str]) -> Told:
        number, body = int(at["id"]), asked.body
        gpu = list(self.prices)[number // 100 - 1]
        if number in self.stale_offers:
            msg = f"error 410/3907: no_such_ask Instance type {number} is no longer available."
            return Told(410, {"success": False, "error": "no_such_ask", "msg": msg, "ask_id": number})
        bid = body.get("price")
        if bid is not None and (self.makes_underbid or bid < self.offer(gpu, number % 100)["min_bid"]):
            return self.underbid(asked, number, gpu)
        resources = Resources(
            gpu=gpu, gpu_count=number % 100, interruptible=bid is not None, durable_storage="volume_info" in body
        )
        try:
            made = self.rent(body["label"], resources, order=body, gpu=gpu, count=number % 100)
        except NoCapacity:
            return Told(404, {"success": False, "error": "invalid_args", "msg": "error 404/3603: no_such_ask"})
        return Told(200, {"success": True, "new_contract": self.number(made.id)})

    def underbid(self, asked: Asked, number: int, gpu: str) -> Told:
        told = {"success": False, "error": "invalid_price", "msg": "bid too low", "ask_id": number}
        if not self.makes_underbid:
            return Told(400, told)
        wanted = Resources(gpu=gpu, interruptible=True)
        made = self.rent(asked.body["label"], wanted, order=asked.body, gpu=gpu, count=1)
        self.cloud.stop(made.id)
        return Told(400, {**told, "new_contract": self.number(made.id)})

    @route("GET", "/api/v0/users/current")
    def user(self, asked: Asked, at: Mapping[str, str]) -> Told:
        """The description knows only `balance`. The service tells `credit` too, and the key itself."""
        shown = {
            "id": self.user,
            "key_id": 3,
            "email": "me@example.com",
            "ssh_key": "",
            "sid": "s1",
            "api_key": self.key,
        }
        if self.tells_credit:
            return Told(200, {**shown, "balance": -3.5, "credit": self.money})
        return Told(200, {**shown, "balance": self.money})

    @route("GET", "/api/v0/ssh")
    def keys(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, self.account_keys)

    @route("GET", "/api/v0/charges")
    def charges(self, asked: Asked, at: Mapping[str, str]) -> Told:
        if "day" not in asked.query.get("select_filters", ""):
            return error(400, "invalid_args", "Must provide both 'day' gte and lte filters for instance charges")
        rows = [
            {"type": "instance", "source": f"instance-{self.number(i)}", "amount": round((seen.cost_usd or 0.0), 3)}
            for i in self.own
            if (seen := self.see(i)) is not None
        ]
        return Told(200, {"success": True, "count": len(rows), "total": len(rows), "next_token": None, "results": rows})


PLATFORM = Platform(
    "vastai", VastCloud, Vast.api, "H100", r"^PUT /api/v0/asks/", r"^DELETE /api/v0/instances/", "resumed",
    spot=True, durable="/data/out",
)  # fmt: skip
