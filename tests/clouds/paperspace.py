"""Paperspace's machines interface as far as the provider uses it, with its traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clouds.base import Asked, Emulator, Refuse, Told, alive, route
from clouds.boxes import Machines
from clouds.platform import Platform
from gpuwarden.core.errors import Conflict, NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.paperspace import Paperspace

_S = InstanceState
STATE = {
    _S.BOOTING: "provisioning",
    _S.RUNNING: "ready",
    _S.STOPPING: "stopping",
    _S.STOPPED: "off",
    _S.TERMINATING: "stopping",
    _S.FAILED: "failed",
}


def error(status: int, code: str, message: str) -> Told:
    return Told(status, {"code": code, "message": message})


class PaperspaceTeam(Emulator):
    """A team. With `retired` every address answers 404, as the older interface's do now."""

    tells_port = False
    profile_id = "paperspace"
    gpus = {"H100": 5.95, "A4000": 0.76, "A6000": 1.89}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wraps = False
        self.retired = False
        self.deaf_to_shutdown = False
        self.states: dict[str, str] = {}

    def unauthorized(self) -> Told:
        return error(401, "UNAUTHORIZED", "Invalid API key")

    def unknown_route(self, asked: Asked) -> Told:
        return error(404, "NOT_FOUND", "Not found")

    def limited(self) -> Told:
        return error(429, "TOO_MANY_REQUESTS", "Too many requests")

    def _route(self, asked: Asked) -> Told:
        return self.unknown_route(asked) if self.retired else super()._route(asked)

    @route("GET", "/machines")
    def list_machines(self, asked: Asked, at: Mapping[str, str]) -> Told:
        limit, after = min(int(asked.query.get("limit", 15)), 120), asked.query.get("after")
        shown = [self.machine(i) for i in self.listed()]
        start = next((n + 1 for n, m in enumerate(shown) if m["id"] == after), 0) if after else 0
        page = shown[start : start + limit]
        more = start + limit < len(shown)
        body = {"items": page, "hasMore": more}
        return Told(200, {**body, "nextPage": page[-1]["id"]} if more else body)

    @route("POST", "/machines")
    def create_machine(self, asked: Asked, at: Mapping[str, str]) -> Told:
        body = asked.body
        if not {"name", "machineType", "templateId", "region"} <= set(body):
            return error(400, "BAD_REQUEST", "missing fields")
        gpu, _, count = body["machineType"].partition("x")
        if gpu not in self.prices:
            return error(400, "BAD_REQUEST", "unknown machine type")
        try:
            made = self.rent(body["name"], Resources(gpu=gpu, gpu_count=int(count or 1)), order=body)
        except NoCapacity:
            return error(400, "OUT_OF_CAPACITY", "We are currently out of capacity for this machine type")
        return self.changed(made, 200 if self.wraps else 201)

    @route("GET", "/machines/{id}")
    def get_machine(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, self.machine(self.need(at["id"])))

    @route("GET", "/auth/session")
    def session(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, {"user": {"id": "u1"}, "team": {"id": f"team{self.user}", "isPrivate": True}})

    @route("DELETE", "/machines/{id}")
    def delete_machine(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        try:
            self.cloud.terminate(i.id)
        except Conflict:
            return error(400, "BAD_REQUEST", "Machine must be off")
        return Told(200, {"event": {"name": "machineDelete"}, "data": {"id": i.id}}) if self.wraps else Told(204)

    @route("PATCH", "/machines/{id}/start")
    def start(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        try:
            self.cloud.start(i.id)
        except Conflict as refusal:
            return error(409, "CONFLICT", refusal.message)
        self.booted(i.id)
        return self.changed(self.need(i.id), 200)

    @route("PATCH", "/machines/{id}/stop")
    def stop(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        self.cloud.stop(i.id)
        return self.changed(self.need(i.id), 200)

    def changed(self, i: Instance, status: int) -> Told:
        shown = self.machine(i)
        return Told(status, {"event": {"name": "machineChange"}, "data": shown} if self.wraps else shown)

    def shutdown(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What became of the order's shutdown. Fields of another name are passed over without a word."""
        hours = order.get("autoShutdownTimeout") if order.get("autoShutdownEnabled") else None
        taken = hours is not None and not self.deaf_to_shutdown
        return {"autoShutdownEnabled": taken, "autoShutdownTimeout": hours if taken else None}

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error(404, "NOT_FOUND", "Machine not found"))
        assert found is not None
        return found

    def machine(self, i: Instance) -> dict[str, Any]:
        order = self.own[i.id]["order"]
        return {
            "id": i.id,
            "name": order["name"],
            "state": self.states.get(i.id, STATE[i.state]),
            "machineType": order["machineType"],
            "region": order["region"],
            "publicIp": self.address(i.id)[0] if i.state is _S.RUNNING else None,
            "privateIp": None,
            **self.shutdown(order),
            "dtCreated": self.iso(i.created_at),
        }


def _take_key(account: PaperspaceTeam, machines: Machines) -> None:
    machines.image_keys = [machines.key]


PLATFORM = Platform(
    "paperspace", PaperspaceTeam, Paperspace.api, "H100", r"^POST /machines$", r"^DELETE /machines/", "stopped",
    env=(("PAPERSPACE_TEMPLATE", "tpl1"), ("PAPERSPACE_REGION", "ny2")), take_key=_take_key,
)  # fmt: skip
