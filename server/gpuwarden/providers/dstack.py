"""Provider `dstack`: runs in a dstack project.

No machine is rented before a job runs; dstack then rents one for the run.

| variable | meaning |
|---|---|
| `DSTACK_SERVER_URL` | the address of the dstack server, https or loopback; default http://127.0.0.1:3000 |
| `DSTACK_TOKEN`, `DSTACK_TOKEN_FILE` | the token of a project member |

`create` makes a reservation, which costs nothing: it requests a plan and writes the token and the checked price to a
file. After the launch, the instance has the state of the run whose tags contain the token. A run that has ended may
leave an idle machine that is still billed, so the instance counts as gone only when the fleet has no machine from that
run. If gpuwarden has a provider and a key for the cloud that dstack used, that cloud must also confirm that the machine
is gone.

The list includes the project's other runs, the machines in its fleets, and its gateways, because all of them are
billed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuwarden.backends._dstack_api import LEASE, DstackServer, Run, epoch
from gpuwarden.backends._dstack_options import MOST_PRICE, machine_of, project_of
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import NoCapacity, NotSupported, WardenError, nothing_sent
from gpuwarden.core.guidance import steps
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.profiles import load_profile
from gpuwarden.providers._reservations import ReservingProvider
from gpuwarden.providers.base import keyed, load_provider

ACCOUNT_KEYS: Final = ("DSTACK_TOKEN",)
SHELL_GUARD: Final = ShellGuard(
    ends={
        "dstack": (
            "stop|delete|destroy|rm",
            "run|runs stop|delete",
            "fleet|fleets delete",
            "volume|volumes delete",
            "gateway|gateways delete",
            "secret|secrets delete",
            "project|projects delete",
        )
    },
    hosts=("sky.dstack.ai",),
    requests=(
        r"/api/project/[^/\s]+/(?:runs/(?:stop|delete)|fleets/delete|gateways/delete|volumes/delete)",
        r"/api/projects/delete",
    ),
    code=(r"\b(?:api|client|dstack)\.(?:runs|fleets|gateways|volumes)\.(?:stop|delete|delete_instances)\s*\(",),
    servers=("dstack",),
)
DIRECT: Final = {"runpod": ("runpod", "runpod"), "vastai": ("vastai", "vastai"), "lambda": ("lambda", "lambda_cloud")}
"""Maps dstack's name for a cloud to the profile and the provider that can query the cloud's machines directly."""
SKEW_S: Final = 86_400.0
"""Maximum lag of the server's clock in seconds. The search for a reservation's run excludes runs that are older than
the reservation by more than this value.
"""
_AVAILABLE: Final = frozenset({"available", "idle", "unknown"})
_OVER: Final = "terminated"
"""The only state that proves that a fleet's machine has ended; other dstack versions may have additional states."""


def create(profile: Profile, state: Path, clock: Clock) -> DstackProvider:
    """Return the provider for one profile."""
    return DstackProvider(profile, state, clock)


class DstackProvider(ReservingProvider):
    """The provider for reservations and the runs that use them."""

    name = "dstack"

    def __init__(self, profile: Profile, state: Path, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        super().__init__(profile, state, clock)
        self._env = os.environ if env is None else env
        self._server = DstackServer(clock, self._env)

    @property
    def _project(self) -> str:
        return project_of(self.profile.id)

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the token in use and the server's address."""
        return self._server.digest(salt)

    async def account_id(self) -> Answer[str]:
        """Return the token's user and the server's address."""
        try:
            return Known(f"{await self._server.user()} at {self._server.url}")
        except WardenError as error:
            if not error.retry:
                raise
            return Unknown(error.message)

    async def check(self) -> list[Finding]:
        """Return a finding if the token has no access to the project or the project can't start runs."""
        try:
            fleets = await self._server.fleets(self._project)
        except WardenError as error:
            return [Finding.of(error, rule="dstack")]
        if fleets:
            return []
        message = f"the project {self._project} has no fleet, but dstack starts runs only in fleets"
        fix = "Create one: `dstack apply -f fleet.dstack.yml`, with `nodes: 0..N` so that an idle fleet costs nothing."
        return [Finding(rule="dstack", severity=Severity.ERROR, message=message, fix=steps(fix))]

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the first offer that dstack would try. Raises NoCapacity if there is none."""
        try:
            plan = await self._server.plan(self._project, machine_of(resources, "gw-quote"))
        except WardenError as error:
            if not error.retry:
                raise
            return Unknown(error.message)
        offers = [o for job in plan.job_plans[:1] for o in job.offers if o.availability in _AVAILABLE]
        if not offers:
            raise NoCapacity(
                f"the project {self._project} has no offer for this request",
                "Check `dstack offer` and the project's backends.",
            )
        first = offers[0]
        where = line(f"{first.backend} {first.region} {first.instance.name}", 120)
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=first.price if first.price > 0 else None,
                source=f"dstack's plan: {where}",
                at=self._clock.now(),
                note="" if first.price > 0 else "dstack does not report a price for machines in an SSH fleet",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Make a reservation. No run exists yet, and nothing is billed."""
        with nothing_sent():
            if resources.durable_storage:
                raise NotSupported(
                    "durable storage can't be rented for a dstack run",
                    "Declare an output in a bucket: /hub/buckets/OWNER/NAME/FOLDER.",
                )
            price = await self.quote(resources)
        if isinstance(price, Unknown):
            return price
        if not self._has(token):
            most = resources.max_price_usd_per_hour
            body = {"at": self._clock.now(), "usd": price.value.price_usd_per_hour, "most": most, "ended": False}
            self._write(token, body | {"platform": self.profile.id})
        return Known(self._reserved(token))

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return the machine for a reservation's run, with its cost if it is gone; None if neither a run nor an active
        reservation exists.
        """
        try:
            at = self._read(id).get("at")  # None for a reservation from another machine; then all pages are read
            since = at - SKEW_S if at else None
            runs = [r for r in await self._server.runs(self._project, active=False, since=since) if _lease(r) == id]
            live = next((run for run in runs if not run.ended), None)
            if live is not None:
                return Known(self._running(id, live))
            for run in runs:
                left = await self._left(id, run)
                if isinstance(left, Unknown) or left.value is not None:
                    return left
        except WardenError as error:
            return Unknown(error.message)
        if not runs:
            waits = self._has(id) and not self._read(id).get("ended")
            return Known(self._reserved(id) if waits else None)
        over = f"run {line(runs[0].run_spec.run_name, 60)}: {runs[0].status}"
        cost = sum(max(0.0, run.cost) for run in runs)
        gone = self._view(id, runs[0], InstanceState.GONE, over)
        return Known(gone.model_copy(update={"meter": False, "cost_usd": cost}))

    async def _left(self, id: str, run: Run) -> Answer[Instance | None]:  # noqa: A002
        """Return the machine of an ended run if it still exists in the fleet or at the cloud, otherwise None."""
        machine = run.machine
        if machine is None:
            return Known(None)
        began = epoch(run.submitted_at) or 0.0  # an older machine belongs to the fleet, not to the run
        for fleet in await self._server.fleets(self._project):
            for one in fleet.instances:
                made = (epoch(one.created) or began) >= began
                # some of these values are unknown until the machine is provisioned
                pairs = (one.hostname, machine.hostname), (one.backend, machine.backend), (one.region, machine.region)
                same = all(first is None or second is None or first == second for first, second in pairs)
                if one.status != _OVER and same and made:
                    why = f"the run has ended, but its machine {one.name} is {one.status} in the fleet {fleet.name}"
                    return Known(self._view(id, run, InstanceState.TERMINATING, line(why, 200)))
        if machine.backend not in DIRECT or not keyed(DIRECT[machine.backend][1], self._env):
            return Known(None)
        profile, name = DIRECT[machine.backend]
        cloud = load_provider(name, load_profile(profile), self._state / name, self._clock)
        answer = await cloud.get(machine.instance_id)
        if isinstance(answer, Unknown):
            return Unknown(f"dstack reports that the run has ended, but {profile} does not confirm this: {answer.why}")
        if answer.value is None or answer.value.state is InstanceState.GONE:
            return Known(None)
        why = f"dstack reports that the run has ended, but {profile} still has the machine {machine.instance_id}"
        return Known(self._view(id, run, InstanceState.TERMINATING, line(why, 200)))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every active reservation, every other active run, idle machines in fleets, and gateways."""
        try:
            active = await self._server.runs(self._project, active=True)
            fleets = await self._server.fleets(self._project)
            gateways = await self._server.gateways(self._project)
        except WardenError as error:
            return Unknown(error.message)
        found: dict[str, Instance] = {}
        for token in self._tokens():
            if self._read(token).get("platform") != self.profile.id or self._read(token).get("ended"):
                continue
            answer = await self.get(token)
            if isinstance(answer, Unknown):
                return answer
            if answer.value is not None and answer.value.state is not InstanceState.GONE:
                found[token] = answer.value
        for run in active:
            lease = _lease(run)
            name = lease if self._has(lease) else run.id
            found.setdefault(name, self._running(name, run, token=lease))
        for one in (one for fleet in fleets for one in fleet.instances if one.status not in {_OVER, "busy"}):
            where = line(f"{one.name} in the fleet {one.fleet_name} ({one.backend} {one.region})", 160)
            found[one.id] = Instance(
                id=one.id,
                state=InstanceState.TERMINATING if one.status == "terminating" else InstanceState.RUNNING,
                meter=None if one.price is None else one.price > 0,
                price_usd_per_hour=one.price,
                created_at=epoch(one.created),
                why=f"machine {where}: {one.status}",
            )
        for gateway in gateways:
            why = f"the dstack gateway {line(gateway.name, 60)} is {line(gateway.status, 20)}; billed even when idle"
            found[gateway.id] = Instance(id=gateway.id, state=InstanceState.RUNNING, why=why)
        return Known(tuple(found.values()))

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported, because dstack is billed through its backends' accounts."""
        raise NotSupported("dstack has no balance", "See the consoles of the clouds that its backends use.")

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because an ended run can't be started again."""
        raise NotSupported("a run that ended can't be started again", "Submit the job again.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because a run can't be stopped and resumed."""
        raise NotSupported("a dstack run can't be stopped and resumed", "Use terminate, which ends the run.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Stop the run and end the reservation. Only runs with the reservation's tag are stopped."""
        try:
            for run in await self._server.runs(self._project, active=True):
                if _lease(run) == id:
                    await self._server.stop(self._project, run.run_spec.run_name, abort=run.status == "terminating")
        except WardenError as error:
            if error.retry:
                return Unknown(error.message)
            raise
        self._write(id, self._read(id) | {"ended": True})
        return Known(None)

    # --------------------------------------------------------------------------------------------------- records

    def _place(self, token: str) -> Place:
        most = self._read(token).get("most")
        env = {MOST_PRICE: repr(float(most))} if most else {}
        return super()._place(token).model_copy(update={"env": env})

    def _running(self, name: str, run: Run, token: str | None = None) -> Instance:
        return self._view(
            name, run, InstanceState.RUNNING, f"run {line(run.run_spec.run_name, 60)}: {run.status}", token
        )

    def _view(self, name: str, run: Run, state: InstanceState, why: str, token: str | None = None) -> Instance:
        return Instance(
            id=name,
            token=name if token is None else token,
            state=state,
            place=self._place(name),
            meter=True if run.machine else None,
            price_usd_per_hour=run.machine.price
            if run.machine and run.machine.price > 0
            else self._read(name).get("usd"),
            cost_usd=max(0.0, run.cost),
            created_at=self._read(name).get("at") or epoch(run.submitted_at),
            why=why,
        )


def _lease(run: Run) -> str:
    """Return the token of a run's reservation, or "" if gpuwarden did not start the run."""
    return run.tags.get(LEASE, "") if run.ours else ""
