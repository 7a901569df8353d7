"""Provider `sky`: clusters that SkyPilot launches on any of its clouds, on Kubernetes or on Slurm.

| variable | meaning |
|---|---|
| `GPUWARDEN_SKY_PYTHON` | the Python with SkyPilot installed; default: the one used by the `sky` command on the PATH |
| `SKYPILOT_API_SERVER_ENDPOINT` | SkyPilot's variable: the address of its API server, if `sky api login` stored none |
| `SKYPILOT_SERVICE_ACCOUNT_TOKEN` | SkyPilot's variable: the account's token for a shared API server |

A cluster's name contains gpuwarden's token, and the cluster's hash must match the recorded hash. A cluster counts as
gone only if SkyPilot's list, refreshed from the cloud, and its cost report agree. If gpuwarden supports the cloud and
has a key for it, the cloud's own list must also agree. Autostop is set for every cluster that supports it; autodown is
never set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Conflict, NotFound, NotSupported, WardenError, nothing_sent
from gpuwarden.core.guidance import steps
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.private import private_folder, write_private
from gpuwarden.profiles import load_profile
from gpuwarden.providers._account import salted
from gpuwarden.providers._rented import positive_price
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import (
    PREFIX,
    Cluster,
    Clusters,
    Cost,
    Done,
    Info,
    Launched,
    ManagedJob,
    ManagedQueue,
    Plan,
    cluster_name,
    minutes,
    task,
    token_of,
)

_S = InstanceState
STATES: Final[dict[str, tuple[InstanceState, bool | None]]] = {
    "INIT": (_S.BOOTING, None),
    "PENDING": (_S.BOOTING, None),
    "UP": (_S.RUNNING, True),
    "AUTOSTOPPING": (_S.STOPPING, None),
    "STOPPED": (_S.STOPPED, False),
}
MANAGED: Final[dict[str, tuple[InstanceState, bool | None]]] = {
    "PENDING": (_S.BOOTING, None),
    "STARTING": (_S.BOOTING, None),
    "RECOVERING": (_S.BOOTING, None),
    "RUNNING": (_S.RUNNING, True),
    "WINDING_DOWN": (_S.RUNNING, True),
    "CANCELLING": (_S.STOPPING, None),
}
"""Maps a managed job's state to its machine's state and to whether the machine is billed."""
WITNESSES: Final = {
    "lambda": "lambda",
    "paperspace": "paperspace",
    "primeintellect": "prime-intellect",
    "runpod": "runpod",
    "vast": "vastai",
}
"""Maps SkyPilot's name for a cloud to the platform that gpuwarden can query directly."""
CONTROLLER: Final = "SkyPilot's own controller machine: it is billed until you end it with `sky down`"

ACCOUNT_KEYS: Final = ("SKYPILOT_SERVICE_ACCOUNT_TOKEN",)
SHELL_GUARD: Final = ShellGuard(
    ends={
        "sky": (
            "down|stop|cancel",
            "autostop !--cancel",
            "jobs cancel",
            "jobs pool down",
            "serve down",
            "volumes delete",
            "storage delete",
            "api cancel",
        )
    },
    aliases={"skypilot": "sky", "sky.cli": "sky"},
    remote={"sky": ("exec *",)},
    requests=(r"/(?:down|stop|autostop|cancel|jobs/cancel|serve/down|volumes/delete|storage/delete)\b",),
    code=(
        r"\b(?:sky|sdk)\.(?:down|stop|cancel|autostop(?![^)\n]{0,200},\s*-1\b))\s*\(",
        r"\b(?:managed_)?jobs\.cancel\s*\(",
    ),
    servers=("skypilot", "sky"),
)


def create(profile: Profile, state: Path, clock: Clock) -> SkyProvider:
    """Return the provider for one profile."""
    return SkyProvider(profile, state, clock)


class SkyProvider:
    """The provider for clusters on one infrastructure. The profile's id names the infrastructure, such as `sky/aws`."""

    name = "sky"

    def __init__(self, profile: Profile, state: Path, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        self.profile = profile
        self.settle_s = profile.limits.settle_s
        self.infra = profile.id.partition("/")[2].lower()
        self._clock, self._state = clock, state
        self._env = os.environ if env is None else env
        self._sky = SkyClient(self._env)

    # ------------------------------------------------------------------------------------------------- the account

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the server and the account in use, as configured on this machine."""
        words = (self._env.get(name, "") for name in ("SKYPILOT_API_SERVER_ENDPOINT", *ACCOUNT_KEYS, "HOME"))
        return salted(salt, self.name, *words)

    async def account_id(self) -> Answer[str]:
        """Return the name of the user on the API server, and the server's address."""
        info = await self._sky.ask(Info, "info")
        return Known(f"{info.user} at {info.url}")

    async def check(self) -> list[Finding]:
        """Return findings about the API server, its access to this infrastructure, and controllers that are billed."""
        try:
            info = await self._sky.ask(Info, "info")
            listed = await self._sky.ask(Clusters, "clusters", names=None, fresh=False)
        except WardenError as error:
            return [Finding.of(error, rule="sky")]
        found = [
            Finding(rule="sky", severity=Severity.WARNING, message=f"{line(c.name, 80)} on {c.cloud}: {CONTROLLER}")
            for c in listed.clusters
            if c.controller and c.status != "STOPPED"
        ]
        if self.infra not in info.infra:
            may = ", ".join(info.infra) or "none"
            message = f"SkyPilot's API server at {info.url} has no access to {self.infra}; it has access to: {may}"
            found.append(
                Finding(
                    rule="sky",
                    severity=Severity.ERROR,
                    message=message,
                    fix=steps("Run `sky check` on the API server's machine."),
                )
            )
        return found

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported, because SkyPilot has no account balance."""
        raise NotSupported("SkyPilot does not report an account balance", "See the console of the underlying cloud.")

    # ------------------------------------------------------------------------------------------------------- renting

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the cheapest offer in the catalog, from a dry run of the launch."""
        plan = await self._sky.ask(Plan, "quote", task=task(self.infra, resources), name=f"{PREFIX}quote")
        switch = "stops itself by autostop" if plan.stops else "can't be stopped and does not end by itself"
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=positive_price(plan.usd),
                source="SkyPilot's catalog",
                at=self._clock.now(),
                note=f"{line(plan.plan, 200)}; it {switch}",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Launch a cluster named after the token, or adopt it if it exists. The cluster stops itself if its cloud
        supports that.
        """
        with nothing_sent():
            name, wanted = cluster_name(token), task(self.infra, resources)
            if resources.durable_storage:
                raise NotSupported("gpuwarden does not rent SkyPilot volumes", "Specify an artifact store.")
            most = resources.max_price_usd_per_hour
            price = await self.quote(resources) if most is not None else None
            asked = price.value.price_usd_per_hour if isinstance(price, Known) else None
            if most is not None and asked is not None and asked > most:
                raise NotSupported(
                    f"SkyPilot's price {usd_per_hour(asked)} exceeds the cap {usd_per_hour(most)}",
                    "Request a new quote.",
                )
        launched = await self._sky.ask(
            Launched,
            "launch",
            task=wanted,
            name=name,
            idle_minutes=minutes(resources.deadline_s),
            at_once=resources.deadline_s is not None,
        )
        found = await self._of(token)
        if found is not None:
            return Known(found)
        switch = "stops itself" if launched.idle_minutes else "does not stop itself; its cloud does not support it"
        return Known(self._booting(token, f"launch requested from SkyPilot; the cluster {switch}"))

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return the cluster named after the token, or its pending launch."""
        found = await self._of(token)
        return Known((found,) if found else ())

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one cluster. It counts as gone only if SkyPilot's list, its cost report and the cloud's provider
        agree.
        """
        token = id.removeprefix(PREFIX)
        seen = await self._ask(id)
        if seen.clusters:
            (cluster,) = seen.clusters
            first = self._read(id).get("hash")
            if first not in (None, cluster.hash):
                return Unknown(f"the name {id} now belongs to another cluster")
            return Known(self._instance(cluster))
        if any(request.live for request in seen.requests):
            return Known(self._booting(token, "SkyPilot is launching the cluster"))
        return await self._gone(id, token, seen.why)

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every cluster on this infrastructure, and SkyPilot's controllers and managed jobs.

        The provider for each infrastructure returns all controllers, and all managed jobs that have no machine.
        """
        listed = await self._sky.ask(Clusters, "clusters", names=None, fresh=False)
        mine = (c for c in listed.clusters if c.controller or c.cloud == self.infra)
        return Known((*map(self._instance, mine), *await self._managed()))

    # --------------------------------------------------------------------------------------------------------- verbs

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped cluster again, and set its autostop."""
        await self._same(id)
        await self._sky.ask(Done, "act", verb="start", cluster=id, idle_minutes=minutes(None))
        return Known(None)

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a stop. Raises NotSupported if the cloud can't stop machines."""
        await self._same(id)
        await self._sky.ask(Done, "act", verb="stop", cluster=id)
        return Known(None)

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination."""
        await self._same(id)
        try:
            await self._sky.ask(Done, "act", verb="down", cluster=id)
        except NotFound:
            return Known(None)
        return Known(None)

    # ------------------------------------------------------------------------------------------------------- answers

    async def _ask(self, name: str, *, reach: bool = True) -> Clusters:
        return await self._sky.ask(Clusters, "clusters", names=[name], fresh=True, reach=reach)

    async def _same(self, name: str) -> None:
        """Raise Conflict if the name now belongs to a cluster other than the recorded one."""
        first = self._read(name).get("hash")
        seen = await self._sky.ask(Clusters, "clusters", names=[name], fresh=False)
        if first is not None and any(cluster.hash != first for cluster in seen.clusters):
            raise Conflict(
                f"the name {name} now belongs to another cluster; nothing was changed",
                "Check in SkyPilot who launched it.",
            )

    async def _managed(self) -> tuple[Instance, ...]:
        """Return the managed jobs, or one UNCLEAR instance if SkyPilot can't list them, because they may be billed."""
        try:
            jobs = (await self._sky.ask(ManagedQueue, "managed")).rows
        except WardenError as error:
            why = line(f"SkyPilot can't list its managed jobs, which may be running and billed: {error.message}", 300)
            return (Instance(id="jobs", state=_S.UNCLEAR, why=why),)
        return tuple(_managed_machine(job) for job in jobs if job.cloud in ("", self.infra))

    async def _of(self, token: str) -> Instance | None:
        seen = await self._ask(cluster_name(token), reach=False)
        if seen.clusters:
            return self._instance(seen.clusters[0])
        return self._booting(token, "SkyPilot is launching the cluster") if any(r.live for r in seen.requests) else None

    async def _gone(self, ident: str, token: str, why: str) -> Answer[Instance | None]:
        """Return the final state and the cost of an unlisted cluster; Unknown if another source contradicts this."""
        kept = self._read(ident)
        costs = await self._sky.ask(list[Cost], "cost", names=[ident])
        ours = [c for c in costs if kept.get("hash") in (None, c.hash)]
        if any(c.live for c in ours):
            return Unknown(f"SkyPilot does not list {ident}, but SkyPilot's cost report lists it as running")
        if kept.get("hash") and not ours:
            return Unknown(f"SkyPilot no longer lists {ident}, and the cluster is not in its cost report")
        if doubt := await self._witness(kept):
            return Unknown(doubt)
        if not ours and not why:
            return Known(None)
        paid = sum(c.usd for c in ours if c.usd is not None) or None
        return Known(Instance(id=ident, token=token, state=_S.GONE, meter=False, cost_usd=paid, why=line(why, 300)))

    async def _witness(self, kept: Mapping[str, Any]) -> str:
        """Return why the cloud's own provider does not confirm the end; "" if it confirms it or is unavailable."""
        from gpuwarden.providers.base import keyed, load_provider

        platform = WITNESSES.get(self.infra)
        profile = load_profile(platform) if platform and kept.get("ids") else None
        if profile is None or profile.provider is None or not keyed(profile.provider, self._env):
            return ""
        direct = load_provider(profile.provider, profile, self._state.parent / profile.provider, self._clock)
        for ident in kept["ids"]:
            try:
                seen = await direct.get(ident)
            except WardenError as error:
                seen = Unknown(error.message)
            if isinstance(seen, Unknown):
                return f"{profile.title} can't confirm that {ident} is gone: {seen.why}"
            if seen.value is not None and seen.value.state is not _S.GONE:
                return f"SkyPilot reports the cluster as gone, but {profile.title} lists {ident} as {seen.value.state}"
        return ""

    def _instance(self, cluster: Cluster) -> Instance:
        state, meter = STATES.get(cluster.status, (_S.UNCLEAR, None))
        if cluster.status == "INIT" and cluster.kind == "unhealthy":
            state = _S.UNCLEAR
        token = token_of(cluster.name)
        if token and not self._read(cluster.name).get("ids"):
            # The hash and the machine ids distinguish the cluster from another cluster with the same name.
            private_folder(self._state)
            kept = {"hash": cluster.hash, **self._read(cluster.name), "ids": cluster.ids}
            write_private(self._state / f"{cluster.name}.json", json.dumps(kept))
        # SkyPilot adds the cluster's name as an alias to the user's SSH configuration.
        place = Place(
            platform=self.profile.id, instance_id=cluster.name, host=cluster.name, run_root=self.profile.run_root
        )
        ends = cluster.autostop >= 0 and cluster.to_down
        why = CONTROLLER if cluster.controller else cluster.why
        return Instance(
            id=cluster.name,
            token=token,
            state=state,
            place=place if cluster.status == "UP" else None,
            meter=meter,
            price_usd_per_hour=positive_price(cluster.usd),
            created_at=cluster.launched_at,
            why=line("it will end itself and delete its disk; " * ends + why, 300),
        )

    def _booting(self, token: str, why: str) -> Instance:
        return Instance(id=cluster_name(token), token=token, state=_S.BOOTING, why=why)

    # ------------------------------------------------------------------------------------------------------- records

    def _read(self, ident: str) -> dict[str, Any]:
        file = self._state / f"{ident}.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}


def _managed_machine(job: ManagedJob) -> Instance:
    """Return the machine of a managed job. gpuwarden did not rent it and never ends it."""
    state, meter = MANAGED.get(job.status, (_S.UNCLEAR, None))
    why = (
        f"SkyPilot's managed job {line(job.name, 80)}, {line(job.status, 20)}, recovered {job.recoveries} times: "
        f"it is billed until it ends, and SkyPilot replaces a lost machine; to end it, run `sky jobs cancel {job.id}`"
    )
    return Instance(id=f"jobs/{job.id}", state=state, meter=meter, created_at=job.submitted_at, why=why)
