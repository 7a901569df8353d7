"""Instances of an emulated Vast.ai account: list, get, verbs, bids, logs and keys, as published."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from clouds.base import Emulator, Refuse, Reply, Request, alive, route
from clouds.vastai_market import HARDWARE, STORAGE_USD, columns, error, listed
from gpuwarden.core.errors import Conflict, NotFound
from gpuwarden.core.models import Instance, InstanceState

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


class Text(Reply):
    """A reply that is not JSON."""

    def raw(self) -> bytes:
        return str(self.body).encode()


class VastInstances(Emulator):
    """An account's operations on its instances."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deaf_ends = 0
        """The number of destroy requests that are answered with success but not carried out."""
        self.end_date: float | None = None
        """When the contracts end, in seconds since the epoch. None means thirty days after each began."""
        self.least: dict[str, float] = {}
        """The minimum bid per GPU by its name, if it differs from half the price."""
        self.odd: dict[str, dict[str, Any]] = {}
        """Fields that override those in an instance's row, by the instance's number."""
        self.home = ""
        """The emulator's address, for links to logs."""
        self.logs: dict[str, list[str]] = {}
        self.unfinished_logs: set[str] = set()

    @route("GET", "/api/v0/instances")
    def old_list(self, request: Request, at: Mapping[str, str]) -> Reply:
        return error(410, "deprecated_endpoint", "use /api/v1/instances/")

    @route("GET", "/api/v1/instances")
    def list_instances(self, request: Request, at: Mapping[str, str]) -> Reply:
        limit = int(request.query.get("limit", PAGE))
        limit = min(limit, PAGE) if limit > 0 else 5
        rows = listed([self.instance(i) for i in self.listed()], request.query)
        after = request.query.get("after_token")
        begin = 0
        if after:
            try:
                begin = [row["id"] for row in rows].index(json.loads(base64.b64decode(after, validate=True))["id"]) + 1
            except (ValueError, KeyError):
                return Reply(400, {"error": "invalid_token", "msg": "Invalid pagination token"})
        page = rows[begin : begin + limit]
        more = len(rows) > begin + limit
        labels = [row["label"] or "" for row in rows]
        return Reply(
            200,
            {
                "success": True,
                "instances_found": len(page),
                "total_instances": len(rows),
                "label_counts": {label: labels.count(label) for label in labels},
                "next_token": base64.b64encode(json.dumps({"id": page[-1]["id"]}).encode()).decode() if more else None,
                "instances": [columns(row, request.query) for row in page],
            },
        )

    @route("GET", "/api/v0/instances/{id}")
    def get_instance(self, request: Request, at: Mapping[str, str]) -> Reply:
        found = self.see(self.numbered(at["id"]))
        return Reply(200, {"instances": self.instance(found, single=True) if found and alive(found) else None})

    @route("PUT", "/api/v0/instances/{id}")
    def manage(self, request: Request, at: Mapping[str, str]) -> Reply:
        i, body = self.need(at["id"]), self.body(request, {"state", "label"})
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
        return Reply(200, {"success": True})

    @route("PUT", "/api/v0/instances/bid_price/{id}")
    def change_bid(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Set a bid. If the vendor's client omits the price, set the lowest winning bid."""
        i, body = self.need(at["id"], "no_such_instance"), self.body(request, {"client_id", "price"})
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
        return Reply(200, {"success": True})

    @route("DELETE", "/api/v0/instances/{id}")
    def destroy(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        if self.deaf_ends:
            self.deaf_ends -= 1
        else:
            self.cloud.terminate(i.id)
        return Reply(200, {"success": True, "msg": "Instance destroyed successfully"})

    @route("PUT", "/api/v0/instances/request_logs/{id}")
    def request_logs(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Return a link to the logs, which become available a moment later."""
        i, body = self.need(at["id"], "invalid_id"), self.body(request, {"tail", "filter", "daemon_logs"})
        lines = [line for line in self.logs.get(at["id"], []) if body.get("filter", "") in line]
        name = f"{self.number(i.id)}-{len(self.requests)}"
        self.logs[name] = lines[-int(body.get("tail", 1000)) :]
        self.unfinished_logs.add(name)
        return Reply(200, {"success": True, "result_url": f"{self.home}/logs/{name}", "msg": "Logs requested"})

    @route("GET", "/logs/{name}")
    def read_logs(self, request: Request, at: Mapping[str, str]) -> Reply:
        if at["name"] in self.unfinished_logs:
            self.unfinished_logs.remove(at["name"])
            return Text(404, "<Error><Code>NoSuchKey</Code></Error>", type="application/xml")
        return Text(200, "\n".join(self.logs[at["name"]]), type="text/plain")

    @route("POST", "/api/v0/instances/{id}/ssh")
    def attach_key(self, request: Request, at: Mapping[str, str]) -> Reply:
        i, key = self.need(at["id"]), self.body(request, {"ssh_key"}).get("ssh_key")
        if not key:
            return error(400, "invalid_args", "ssh_key is required")
        keys = self.own[i.id].setdefault("keys", [])
        keys.append({"id": 70 + len(keys), "public_key": key})
        return Reply(200, {"success": True, "msg": "SSH key attached successfully"})

    @route("GET", "/api/v0/instances/{id}/ssh")
    def instance_keys(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"success": True, "ssh_keys": json.dumps(self.own[self.need(at["id"]).id].get("keys", []))})

    @route("DELETE", "/api/v0/instances/{id}/ssh/{key}")
    def detach_key(self, request: Request, at: Mapping[str, str]) -> Reply:
        keys = self.own[self.need(at["id"], "no_such_instance").id].get("keys", [])
        left = [key for key in keys if str(key["id"]) != at["key"]]
        if len(left) == len(keys):
            return error(404, "no_such_ssh_key", "SSH key not found.")
        keys[:] = left
        return Reply(200, {"success": True, "msg": "SSH key removed from instance."})

    def need(self, number: str, code: str = "not_found") -> Instance:
        found = self.see(self.numbered(number))
        if not alive(found):
            raise Refuse(error(404, code, "Instance not found"))
        assert found is not None
        return found

    @staticmethod
    def body(request: Request, fields: set[str]) -> dict[str, Any]:
        """Return a request's body. Raises Refuse if it is not an object or has an unknown field."""
        body = request.body or {}
        if not isinstance(body, dict) or set(body) - fields:
            raise Refuse(error(400, "invalid_args", f"invalid request: {request.body}"))
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
        """Return the mapped ports: the SSH port, if the instance has an SSH server, and those of `-p` flags."""
        flags = [name.split()[1] for name in environment(order) if name.startswith("-p ")]
        inside = [flag.split(":")[-1] for flag in flags]
        if order.get("runtype") != "args":
            inside.insert(0, "22")
        names = [name if "/" in name else f"{name}/tcp" for name in inside]
        return {name: [{"HostIp": "0.0.0.0", "HostPort": str(port + n)}] for n, name in enumerate(names)}

    def least_bid(self, gpu: str, count: int) -> float:
        """Return the lowest winning bid for a machine, in dollars per hour."""
        return self.least.get(gpu, self.prices[gpu] / 2 + 0.0001 / count) * count


def environment(order: dict[str, Any]) -> dict[str, str]:
    """Return an order's environment. The description has a string of Docker flags; the clients send an object."""
    given = order.get("env") or {}
    if isinstance(given, dict):
        return given
    flags = re.findall(r"-(e|p) (\S+)", given)
    return {
        (f"-p {word}" if flag == "p" else word.partition("=")[0]): word.partition("=")[2] or "1" for flag, word in flags
    }
