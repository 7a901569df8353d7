"""RunPod's older GraphQL API over an emulated account: the user, Pods and prices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clouds.base import Emulator, Reply, Request, alive, route
from clouds.runpod_schema import DATA_CENTER, execute, gpu_type, moment, order_of, pod, refuse
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Instance, InstanceState

_S = InstanceState
STATUS = {
    _S.BOOTING: "STARTING",
    _S.RUNNING: "RUNNING",
    _S.STOPPING: "RUNNING",
    _S.STOPPED: "EXITED",
    _S.INTERRUPTED: "EXITED",
    _S.TERMINATING: "RUNNING",
    _S.GONE: "TERMINATED",
    _S.FAILED: "ERROR",
}


class OlderInterface(Emulator):
    """The part of an account that GraphQL shows. Rentals and actions go through REST v2."""

    ssh_keys: list[str]
    volumes: list[dict[str, Any]]
    spends: float | None

    def deploy(self, order: dict[str, Any], **own: Any) -> Instance:
        """Rent a Pod. Raises NoCapacity."""
        raise NotImplementedError

    def act(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Carry out an action of REST v2."""
        raise NotImplementedError

    @route("POST", "/graphql")
    def graphql(self, request: Request, at: Mapping[str, str]) -> Reply:
        """Serve GraphQL, which answers refused requests with status 200 and `errors`."""
        kinds = [gpu_type(n, displayed(n), usd, stock=not self.full()) for n, usd in self.prices.items()]
        places = [
            {
                "id": DATA_CENTER,
                "name": DATA_CENTER,
                "location": "Romania",
                "listed": True,
                "gpuAvailability": [{"gpuTypeId": k["id"], "displayName": k["displayName"], "stockStatus": "High"}
                                    for k in kinds],
            }
        ]  # fmt: skip
        public = {
            "gpuTypes": lambda wanted: [k for k in kinds if wanted.get("id") in {None, k["id"]}],
            "dataCenters": places,
            "countryCodes": ["RO"],
        }
        if "authorization" not in request.headers:
            return execute(request, public)
        return execute(
            request,
            {
                **public,
                "myself": self.myself,
                "pod": lambda wanted: self.old_pod(wanted["podId"], missing=None),
                "podFindAndDeployOnDemand": self.old_deploy,
                "podRentInterruptable": lambda given: self.removed("podRentInterruptable"),
                "podBidResume": lambda given: self.removed("podBidResume"),
                "podResume": lambda given: self.old_act("start", given["podId"]),
                "podStop": lambda given: self.old_act("stop", given["podId"]),
                "podTerminate": lambda given: self.old_act("terminate", given["podId"]) and None,
                "updateUserSettings": self.old_settings,
            },
        )

    def myself(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"user_{self.user}",
            "pubKey": "\n\n".join(self.ssh_keys),
            "email": "me@example.com",
            "clientBalance": self.money,
            "currentSpendPerHr": self.spends,
            "spendLimit": 80,
            "notifyPodsStale": True,
            "notifyPodsGeneral": True,
            "notifyLowBalance": True,
            "pods": [self.old_pod(i.id) for i in self.listed()],
            "networkVolumes": [{**v, "dataCenterId": v["dataCenter"]} for v in self.volumes],
            "podTemplates": [],
        }

    def old_pod(self, ident: str, **instead: Any) -> Any:
        seen = self.see(ident) if ident in self.own else None
        if not alive(seen):
            return instead["missing"]
        assert seen is not None
        own = self.own[ident]
        return pod(seen, own, STATUS[seen.state], self.address(ident), int(self.clock.now() - own["started"]))

    def old_deploy(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Rent a Pod, with dates for stopping and terminating it if given."""
        dates = {"stop_after": moment(given.get("stopAfter")), "terminate_after": moment(given.get("terminateAfter"))}
        if any(date is not None and date <= self.clock.now() for date in dates.values()):
            raise refuse("stopAfter and terminateAfter must be in the future")
        if not (given.get("imageName") or given.get("templateId")):
            raise refuse("imageName is required")
        order = order_of(given)
        if not order["gpu"]["id"]:
            raise refuse("gpuTypeId is required")
        try:
            made = self.deploy(order, **dates)
        except NoCapacity:
            message = "There are no longer any instances available with the requested specifications. Please refresh"
            raise refuse(message) from None
        return self.old_pod(made.id)

    def old_act(self, verb: str, ident: str) -> Any:
        seen = self.see(ident) if ident in self.own else None
        if not alive(seen):
            raise refuse("pod not found")
        done = self.act(Request("POST", f"/pods/{ident}/action", {}, {}, {"action": verb}), {"id": ident})
        if done.status >= 400:
            raise refuse(done.body["detail"])
        return self.old_pod(ident, missing=None)

    def old_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.ssh_keys[:] = [key for key in (given.get("pubKey") or "").splitlines() if key]
        return self.myself({})

    @staticmethod
    def removed(name: str) -> None:
        raise refuse(f"{name} is no longer supported")


def displayed(name: str) -> str:
    """Return a GPU's short name."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(" HBM3")
