"""Vast.ai's interface as the provider and the vendor's own client use it, with its traps.

Requests and replies follow the published description; a parameter that it lacks is refused. Where the vendor's client,
dstack or SkyPilot differs from it, both are served, and a comment says so.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from clouds.base import Asked, Emulator, Refuse, Told, alive, route
from clouds.platform import Platform
from clouds.vastai_market import COUNTS, HARDWARE, STORAGE_USD, columns, error, listed, offers
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
    _S.INTERRUPTED: ("exited", "stopped", "stopped"),  # outbid looks like a stop: dstack's client reads all three
    _S.TERMINATING: ("running", "stopped", "running"),
    _S.FAILED: ("exited", "running", "running"),
}
ORDER_FIELDS = {
    "image", "template_hash_id", "label", "disk", "runtype", "target_state", "price", "env", "cancel_unavail", "vm",
    "onstart", "args", "args_str", "use_jupyter_lab", "jupyter_dir", "python_utf8", "lang_utf8", "force", "user",
    "image_login", "volume_info",
    "client_id", "extra", "create_from",  # not in the description; sent by the vendor's client and by dstack
}  # fmt: skip
VOLUME_FIELDS = {"create_new", "volume_id", "size", "mount_path", "name"}
RUNTYPES = {"ssh", "jupyter", "args", "ssh_proxy", "ssh_direct", "jupyter_proxy", "jupyter_direct"}
"""The description's; the vendor's client sends several words at once, and cuts `direct` to `direc`."""


class Text(Told):
    """A reply that is not JSON."""

    def raw(self) -> bytes:
        return str(self.body).encode()


class VastCloud(Emulator):
    """An account whose offers are one machine for each GPU and number of GPUs."""

    profile_id = "vastai"
    gpus: ClassVar[dict[str, float]] = {"H100 SXM": 2.20, "RTX 4090": 0.40, "L40S": 0.70}
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
        self.least: dict[str, float] = {}
        """The least bid for one GPU by its name, where it is another one than half the price."""
        self.odd: dict[str, dict[str, Any]] = {}
        """What an instance's row says instead, by its number."""
        self.home = ""
        """The emulator's own address, for the links to logs."""
        self.logs: dict[str, list[str]] = {}
        self.unfinished_logs: set[str] = set()

    def inner(self, ident: str) -> str:
        return self.numbered(ident)

    def authorized(self, asked: Asked) -> bool:
        """Offers, GPU names and finished logs are public; a wrong key is refused everywhere."""
        public = re.match(r"(POST /api/v0/bundles|GET /api/v0/gpu_names/|GET /logs/)", asked.line)
        return super().authorized(asked) or (public is not None and "authorization" not in asked.headers)

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
        limit = int(asked.query.get("limit", PAGE))
        limit = min(limit, PAGE) if limit > 0 else 5
        rows = listed([self.instance(i) for i in self.listed()], asked.query)
        after = asked.query.get("after_token")
        begin = 0
        if after:
            try:
                begin = [row["id"] for row in rows].index(json.loads(base64.b64decode(after, validate=True))["id"]) + 1
            except (ValueError, KeyError):
                return Told(400, {"error": "invalid_token", "msg": "Invalid pagination token"})
        page = rows[begin : begin + limit]
        more = len(rows) > begin + limit
        labels = [row["label"] or "" for row in rows]
        return Told(
            200,
            {
                "success": True,
                "instances_found": len(page),
                "total_instances": len(rows),
                "label_counts": {label: labels.count(label) for label in labels},
                "next_token": base64.b64encode(json.dumps({"id": page[-1]["id"]}).encode()).decode() if more else None,
                "instances": [columns(row, asked.query) for row in page],
            },
        )

    @route("GET", "/api/v0/instances/{id}")
    def get_instance(self, asked: Asked, at: Mapping[str, str]) -> Told:
        found = self.see(self.numbered(at["id"]))
        return Told(200, {"instances": self.instance(found, single=True) if found and alive(found) else None})

    @route("PUT", "/api/v0/instances/{id}")
    def manage(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i, body = self.need(at["id"]), self.body(asked, {"state", "label"})
        if not body or body.get("state", "running") not in {"running", "stopped"}:
            return error(400, "invalid_args", "nothing to do")
        if "label" in body:
            self.own[i.id]["label"] = body["label"]
        try:
            if body.get("state") == "stopped":
                self.cloud.stop(i.id)
            elif body.get("state") == "running":
                self.cloud.start(i.id)
                self.booted(i.id)
        except (Conflict, NotFound) as refusal:
            return error(400, "invalid_args", refusal.message)
        return Told(200, {"success": True})

    @route("PUT", "/api/v0/instances/bid_price/{id}")
    def change_bid(self, asked: Asked, at: Mapping[str, str]) -> Told:
        """Set a bid. The vendor's client may leave the price out: then it is the least that wins."""
        i, body = self.need(at["id"], "no_such_instance"), self.body(asked, {"client_id", "price"})
        own = self.own[i.id]
        least = self.least_bid(own["gpu"], own["count"])
        price = body.get("price") if body.get("price") is not None else least
        if "bid" not in own:
            return error(400, "invalid_args", "the instance is not interruptible")
        if not 0.001 <= price <= 32:
            return error(400, "invalid_args", "Please set a bid price >= 0.001.")
        own["bid"] = price
        if i.state is _S.INTERRUPTED and price >= least:
            self.cloud.start(i.id)
            self.booted(i.id)
        return Told(200, {"success": True})

    @route("DELETE", "/api/v0/instances/{id}")
    def destroy(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        if self.deaf_ends:
            self.deaf_ends -= 1
        else:
            self.cloud.terminate(i.id)
        return Told(200, {"success": True, "msg": "Instance destroyed successfully"})

    @route("PUT", "/api/v0/instances/request_logs/{id}")
    def request_logs(self, asked: Asked, at: Mapping[str, str]) -> Told:
        """Return a link to the logs, which are there a moment later."""
        i, body = self.need(at["id"], "invalid_id"), self.body(asked, {"tail", "filter", "daemon_logs"})
        lines = [line for line in self.logs.get(at["id"], []) if body.get("filter", "") in line]
        name = f"{self.number(i.id)}-{len(self.asked)}"
        self.logs[name] = lines[-int(body.get("tail", 1000)) :]
        self.unfinished_logs.add(name)
        return Told(200, {"success": True, "result_url": f"{self.home}/logs/{name}", "msg": "Logs requested"})

    @route("GET", "/logs/{name}")
    def read_logs(self, asked: Asked, at: Mapping[str, str]) -> Told:
        if at["name"] in self.unfinished_logs:
            self.unfinished_logs.remove(at["name"])
            return Text(404, "<Error><Code>NoSuchKey</Code></Error>", type="application/xml")
        return Text(200, "\n".join(self.logs[at["name"]]), type="text/plain")

    @route("POST", "/api/v0/instances/{id}/ssh")
    def attach_key(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i, key = self.need(at["id"]), self.body(asked, {"ssh_key"}).get("ssh_key")
        if not key:
            return error(400, "invalid_args", "ssh_key is required")
        keys = self.own[i.id].setdefault("keys", [])
        keys.append({"id": 70 + len(keys), "public_key": key})
        return Told(200, {"success": True, "msg": "SSH key attached successfully"})

    @route("GET", "/api/v0/instances/{id}/ssh")
    def instance_keys(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, {"success": True, "ssh_keys": json.dumps(self.own[self.need(at["id"]).id].get("keys", []))})

    @route("DELETE", "/api/v0/instances/{id}/ssh/{key}")
    def detach_key(self, asked: Asked, at: Mapping[str, str]) -> Told:
        keys = self.own[self.need(at["id"], "no_such_instance").id].get("keys", [])
        left = [key for key in keys if str(key["id"]) != at["key"]]
        if len(left) == len(keys):
            return error(404, "no_such_ssh_key", "SSH key not found.")
        keys[:] = left
        return Told(200, {"success": True, "msg": "SSH key removed from instance."})

    def need(self, number: str, code: str = "not_found") -> Instance:
        found = self.see(self.numbered(number))
        if not alive(found):
            raise Refuse(error(404, code, "Instance not found"))
        assert found is not None
        return found

    @staticmethod
    def body(asked: Asked, fields: set[str]) -> dict[str, Any]:
        """Return a request's body. Raises Refuse for what is not an object, and for a field that is not known."""
        body = asked.body or {}
        if not isinstance(body, dict) or set(body) - fields:
            raise Refuse(error(400, "invalid_args", f"invalid request: {asked.body}"))
        return body

    def instance(self, i: Instance, *, single: bool = False) -> dict[str, Any]:
        own = self.own[i.id]
        actual, intended, contract = STATUS[i.state]
        host, port = self.address(i.id)
        running, order = actual == "running", own["order"]
        bid = own.get("bid")
        usd = i.price_usd_per_hour if bid is None else bid
        return {
            **HARDWARE,
            "id": self.number(i.id),
            "actual_status": actual,
            "intended_status": intended,
            "cur_state": contract,
            "next_state": contract,
            "label": own["label"],
            "template_id": None,
            "template_hash_id": None,
            "template_name": None,
            "image_uuid": order.get("image", ""),
            "image_args": order.get("args") or [],
            "image_runtype": order.get("runtype") or "ssh",
            "extra_env": [[name, value] for name, value in environment(order).items()],
            "onstart": order.get("onstart") or "",
            "jupyter_token": "",
            "local_ipaddrs": "10.0.0.5 172.17.0.2",
            "machine_id": 900 + self.number(i.id) % 100,
            "gpu_name": own["gpu"],
            "num_gpus": own["count"],
            "gpu_totalram": HARDWARE["gpu_ram"] * own["count"],
            "gpu_util": 0.0 if running else None,
            "cpu_util": 0.0,
            "disk_space": float(order.get("disk") or 10),
            "disk_util": 0.05,
            "disk_usage": 0.05,
            "is_bid": bid is not None,
            "min_bid": self.least_bid(own["gpu"], own["count"]),
            "dph_base": usd if usd is None or bid is not None else max(0.0, usd - STORAGE_USD),
            "dph_total": usd + STORAGE_USD if usd is not None and bid is not None else usd,
            "storage_total_cost": i.stopped_usd_per_hour or STORAGE_USD,
            "start_date": i.created_at,
            "end_date": self.end_date or (i.created_at or 0) + 30 * 86400,
            "uptime_mins": None,
            "public_ipaddr": f"{host}\n",
            "ssh_host": "ssh5.vast.ai",
            "ssh_idx": "5",
            "ssh_port": 12345,
            "status_msg": None,
            "volume_info": [],
            **({} if single and not running else {"ports": self.ports(order, port) if running else None}),
            **self.odd.get(str(self.number(i.id)), {}),
        }

    @staticmethod
    def ports(order: dict[str, Any], port: int) -> dict[str, Any]:
        """Return the mapped ports: that of SSH, where there is an SSH server, and those of `-p` flags."""
        flags = [name.split()[1] for name in environment(order) if name.startswith("-p ")]
        inside = [flag.split(":")[-1] for flag in flags]
        if order.get("runtype") != "args":
            inside.insert(0, "22")
        names = [name if "/" in name else f"{name}/tcp" for name in inside]
        return {name: [{"HostIp": "0.0.0.0", "HostPort": str(port + n)}] for n, name in enumerate(names)}

    # -------------------------------------------------------------------------------------------------------- offers

    def least_bid(self, gpu: str, count: int) -> float:
        """Return the least bid that wins a machine, in dollars an hour."""
        return self.least.get(gpu, self.prices[gpu] / 2 + 0.0001 / count) * count

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
        """Every offer there is."""
        if not self.full():
            yield from (self.offer(gpu, count, bid=bid) for gpu in self.prices for count in COUNTS)

    @route("POST", "/api/v0/bundles")
    def search(self, asked: Asked, at: Mapping[str, str]) -> Told:
        query = asked.body if asked.body is not None else {}
        bid = isinstance(query, dict) and query.get("type") == "bid"
        return Told(200, {"offers": offers(self.market(bid=bid), query)})

    @route("GET", "/api/v0/gpu_names/unique")
    def gpu_names(self, asked: Asked, at: Mapping[str, str]) -> Told:
        """The names of all GPUs. Not in the description; the vendor's client asks for them."""
        return Told(200, {"gpu_names": list(self.prices)})

    @route("PUT", "/api/v0/asks/{id}")
    def accept(self, asked: Asked, at: Mapping[str, str]) -> Told:
        number, body = int(at["id"]), self.body(asked, ORDER_FIELDS)
        self.check_order(body)
        gpu = next((gpu for n, gpu in enumerate(self.prices) if number // 100 == n + 1), None)
        if gpu is None:
            msg = f"error 404/3603: no_such_ask Instance type by id {number} is not available."
            return Told(404, {"success": False, "error": "invalid_args", "msg": msg, "ask_id": number})
        count = number % 100
        if number in self.stale_offers:
            msg = f"error 410/3907: no_such_ask Instance type {number} is no longer available."
            return Told(410, {"success": False, "error": "no_such_ask", "msg": msg, "ask_id": number})
        bid = body.get("price")
        if bid is not None and (self.makes_underbid or bid < self.least_bid(gpu, count)):
            return self.underbid(asked, number, gpu)
        resources = Resources(
            gpu=gpu, gpu_count=count, interruptible=bid is not None, durable_storage="volume_info" in body
        )
        own = {"order": body, "gpu": gpu, "count": count, **({} if bid is None else {"bid": bid})}
        try:
            made = self.rent(body.get("label") or "", resources, **own)
        except NoCapacity:
            return Told(404, {"success": False, "error": "invalid_args", "msg": "error 404/3603: no_such_ask"})
        return Told(200, {"success": True, "new_contract": self.number(made.id)})

    @staticmethod
    def check_order(body: dict[str, Any]) -> None:
        """Refuse an order with values that the description does not allow."""
        price, volume = body.get("price"), body.get("volume_info") or {}
        words = set((body.get("runtype") or "ssh").replace("direc ", "direct ").split())
        if not (body.get("image") or body.get("template_hash_id")):
            raise Refuse(error(400, "invalid_args", "'image' is required"))
        if not words <= RUNTYPES or set(volume) - VOLUME_FIELDS:
            raise Refuse(error(400, "invalid_args", f"invalid runtype or volume_info: {sorted(words)} {volume}"))
        if price is not None and not (isinstance(price, int | float) and 0.001 <= price <= 128):
            raise Refuse(error(400, "invalid_price", "Please set a bid price >= 0.001."))

    def underbid(self, asked: Asked, number: int, gpu: str) -> Told:
        told = {"success": False, "error": "invalid_price", "msg": "bid too low", "ask_id": number}
        if not self.makes_underbid:
            return Told(400, told)
        wanted = Resources(gpu=gpu, interruptible=True)
        bid = asked.body["price"]
        made = self.rent(asked.body["label"], wanted, order=asked.body, gpu=gpu, count=1, bid=bid)
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
            "host_agreement_accepted": False,
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


def environment(order: dict[str, Any]) -> dict[str, str]:
    """Return an order's environment. The description has Docker's flags as text; the clients send an object."""
    given = order.get("env") or {}
    if isinstance(given, dict):
        return given
    flags = re.findall(r"-(e|p) (\S+)", given)
    return {
        (f"-p {word}" if flag == "p" else word.partition("=")[0]): word.partition("=")[2] or "1" for flag, word in flags
    }


PLATFORM = Platform(
    "vastai", VastCloud, Vast.api, "H100", r"^PUT /api/v0/asks/", r"^DELETE /api/v0/instances/", "resumed",
    spot=True, durable="/data/out",
)  # fmt: skip
