"""Prime Intellect's interface as far as the provider uses it, with its traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clouds.base import PUBLIC_KEY, Asked, Emulator, Refuse, Told, alive, route
from clouds.boxes import Machines
from clouds.platform import Platform
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.prime_intellect import PrimeIntellect

_S = InstanceState
STATUS = {
    _S.BOOTING: "PROVISIONING",
    _S.RUNNING: "ACTIVE",
    _S.STOPPING: "PENDING",
    _S.INTERRUPTED: "STOPPED",
    _S.STOPPED: "STOPPED",
    _S.TERMINATING: "DELETING",
    _S.FAILED: "ERROR",
    _S.GONE: "TERMINATED",
}


def error(status: int, detail: str) -> Told:
    return Told(status, {"detail": detail})


class PrimeAccount(Emulator):
    """A user's account. Gone Pods are in the history only."""

    profile_id = "prime-intellect"
    gpus = {"H100_80GB": 2.10, "A100_80GB": 1.20, "L4_24GB": 0.30}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = [
            {"id": "key0", "name": "old", "publicKey": "ssh-ed25519 " + "B" * 60, "isPrimary": True},
            {"id": "key1", "name": "mine", "publicKey": f"{PUBLIC_KEY} me@laptop", "isPrimary": False},
        ]
        self.statuses: dict[str, str] = {}
        self.installing: set[str] = set()
        self.ssh: Any = None
        self.more: list[dict[str, Any]] = []
        """Offers besides the plain ones."""

    def unauthorized(self) -> Told:
        return error(401, "Invalid API key")

    def unknown_route(self, asked: Asked) -> Told:
        return error(404, "Not Found")

    def limited(self) -> Told:
        return error(429, "Rate limit exceeded")

    # ----------------------------------------------------------------------------------------------------------- pods

    @route("GET", "/pods")
    def list_pods(self, asked: Asked, at: Mapping[str, str]) -> Told:
        offset, limit = int(asked.query.get("offset", 0)), min(int(asked.query.get("limit", 100)), 100)
        shown = [self.pod(i) for i in self.listed()]
        page = shown[offset : offset + limit]
        return Told(200, {"data": page, "total_count": len(shown), "offset": offset, "limit": limit})

    @route("POST", "/pods")
    def create_pod(self, asked: Asked, at: Mapping[str, str]) -> Told:
        order, provider = asked.body["pod"], asked.body["provider"]["type"]
        match = [o for o in self.offers() if o["cloudId"] == order["cloudId"] and o["provider"] == provider]
        if not match or order.get("sshKeyId") not in {k["id"] for k in self.keys}:
            return error(422, "Invalid pod configuration")
        if order.get("maxPrice") is not None and match[0]["prices"]["onDemand"] > order["maxPrice"]:
            return error(400, "Price exceeds the maximum price")
        resources = Resources(gpu=order["gpuType"], gpu_count=order["gpuCount"], interruptible=match[0]["isSpot"])
        try:
            made = self.rent(order["name"], resources, order=order, provider=provider)
        except NoCapacity:
            return error(400, "The selected configuration is no longer available")
        return Told(200, self.pod(made))

    @route("GET", "/pods/history")
    def history(self, asked: Asked, at: Mapping[str, str]) -> Told:
        gone = [i for ident in self.own if (i := self.see(ident)) is not None and not alive(i)]
        rows = [
            {"id": i.id, "name": self.own[i.id]["label"], "totalBilledPrice": i.cost_usd, "priceHr": 2.1} for i in gone
        ]
        offset, limit = int(asked.query.get("offset", 0)), int(asked.query.get("limit", 100))
        page = rows[offset : offset + limit]
        return Told(200, {"data": page, "total_count": len(rows), "offset": offset, "limit": limit})

    @route("GET", "/pods/{id}")
    def get_pod(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, self.pod(self.need(at["id"])))

    @route("DELETE", "/pods/{id}")
    def delete_pod(self, asked: Asked, at: Mapping[str, str]) -> Told:
        i = self.need(at["id"])
        self.cloud.terminate(i.id)
        return Told(200, {"status": "DELETING"})

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error(404, f"Pod {ident} not found"))
        assert found is not None
        return found

    def pod(self, i: Instance) -> dict[str, Any]:
        own = self.own[i.id]
        host, port = self.address(i.id)
        running = i.state is _S.RUNNING
        address = f"root@{host} -p {port}" if self.ssh is None else self.ssh
        return {
            "id": i.id,
            "name": own["label"],
            "providerType": own["provider"],
            "gpuName": own["order"]["gpuType"],
            "gpuCount": own["order"]["gpuCount"],
            "priceHr": i.price_usd_per_hour,
            "stoppedPriceHr": 0.005,
            "status": self.statuses.get(i.id, STATUS[i.state]),
            "installationStatus": "PENDING" if i.id in self.installing or not running else "FINISHED",
            "installationFailure": None,
            "createdAt": self.iso(i.created_at),
            "sshConnection": address if running else [None],
            "ip": host if running else None,
        }

    # ------------------------------------------------------------------------------------------------------- the rest

    def offers(self) -> list[dict[str, Any]]:
        plain = [self.offer(gpu, n, spot=spot) for gpu in self.prices for n in (1, 2, 8) for spot in (False, True)]
        return [*self.more, *plain]

    def offer(self, gpu: str, count: int, *, spot: bool = False, **changes: Any) -> dict[str, Any]:
        usd = self.prices[gpu] * count * (0.5 if spot else 1)
        return {
            "cloudId": f"{gpu}-{count}{'-spot' if spot else ''}",
            "gpuType": gpu,
            "socket": "PCIe",
            "provider": "runpod",
            "dataCenter": "US-1",
            "country": "US",
            "gpuCount": count,
            "stockStatus": "Available",
            "security": "secure_cloud",
            "prices": {"onDemand": usd, "communityPrice": None, "isVariable": False, "currency": "USD"},
            "images": ["ubuntu_22_cuda_12", "cuda_12_4_pytorch_2_6"],
            "isSpot": spot,
            "prepaidTime": None,
            **changes,
        }

    @route("GET", "/availability/gpus")
    def availability(self, asked: Asked, at: Mapping[str, str]) -> Told:
        page, size = int(asked.query["page"]), min(int(asked.query["page_size"]), 2)
        offers = [] if self.full() else [o for o in self.offers() if o["gpuCount"] == int(asked.query["gpu_count"])]
        return Told(200, {"items": offers[(page - 1) * size : page * size], "totalCount": len(offers)})

    @route("GET", "/billing/wallet")
    def wallet(self, asked: Asked, at: Mapping[str, str]) -> Told:
        told = {"wallet_id": "w1", "balance_usd": self.money, "currency": "USD", "total_billings": 0}
        return Told(200, {**told, "recent_billings": [], "team_id": None})

    @route("GET", "/user/whoami")
    def whoami(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, {"data": {"id": f"user{self.user}", "email": "me@example.com", "name": "Me"}})

    @route("GET", "/ssh_keys")
    def ssh_keys(self, asked: Asked, at: Mapping[str, str]) -> Told:
        return Told(200, {"data": self.keys, "total_count": len(self.keys), "offset": 0, "limit": 100})


def _take_key(account: PrimeAccount, machines: Machines) -> None:
    account.keys[1]["publicKey"] = machines.key


PLATFORM = Platform(
    "prime-intellect", PrimeAccount, PrimeIntellect.api, "H100", r"^POST /pods/$", r"^DELETE /pods/", "gone",
    take_key=_take_key,
)  # fmt: skip
