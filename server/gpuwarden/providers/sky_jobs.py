"""Provider `sky_jobs`: SkyPilot's managed jobs. No machine is rented before a job runs.

It uses the same environment variables as the provider `sky`. `create` makes a reservation, which costs nothing: it
dry-runs a launch and writes the token and the price to a file. After the launch, the instance's state is the state of
the managed job with the reservation's name.

The end of a job does not prove that its machine is gone, because the controller sets the state before it ends the
machine. The machine counts as gone only if the controller has finished with the job and SkyPilot's cost report, if it
lists the machine, agrees. If the controller failed, the machine's state is unknown, and the machine counts as billed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuwarden.backends._sky_jobs_task import named
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import NotSupported, WardenError, nothing_sent
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._reservations import ReservingProvider
from gpuwarden.providers.sky import ACCOUNT_KEYS as ACCOUNT_KEYS
from gpuwarden.providers.sky import MANAGED, SkyProvider
from gpuwarden.remote.launch import run_name
from gpuwarden.remote.sky.rows import Clusters, Cost, Done, ManagedJob, ManagedQueue, cluster_name, task

SHELL_GUARD: Final = ShellGuard(ends={"sky": ("jobs cancel",)}, servers=("skypilot", "sky"))
CONTROLLER: Final = (
    "the jobs controller is billed in addition: the first managed job starts its machine, which stays on after the "
    "last job, unless SkyPilot's API server is itself the controller (jobs.controller.consolidation_mode)"
)


def create(profile: Profile, state: Path, clock: Clock) -> SkyJobsProvider:
    """Return the provider for one profile."""
    return SkyJobsProvider(profile, state, clock)


class SkyJobsProvider(ReservingProvider, SkyProvider):
    """The provider for reservations and their managed jobs. Prices and checks are the same as for clusters."""

    name = "sky_jobs"

    def __init__(self, profile: Profile, state: Path, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        SkyProvider.__init__(self, profile, state, clock, env)

    async def check(self) -> list[Finding]:
        """Return findings about the API server, its access to this infrastructure, and billed controllers."""
        found = await super().check()
        return [*found, Finding(rule="sky", severity=Severity.INFO, message=CONTROLLER)]

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the cheapest offer in the catalog, from a dry run of a launch."""
        found = await super().quote(resources)
        if isinstance(found, Unknown):
            return found
        plan = found.value.note.partition(";")[0]
        return Known(
            found.value.model_copy(update={"note": f"{plan}; its machine is terminated with the job, and {CONTROLLER}"})
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Make a reservation. No job runs yet, and nothing is billed."""
        with nothing_sent():
            task(self.infra, resources)
            cluster_name(token)
            if resources.durable_storage:
                raise NotSupported("gpuwarden does not rent SkyPilot volumes", "Specify an artifact store.")
            price = await self.quote(resources)
            usd = price.value.price_usd_per_hour if isinstance(price, Known) else None
            most = resources.max_price_usd_per_hour
            if most is not None and usd is not None and usd > most:
                raise NotSupported(
                    f"SkyPilot's price {usd_per_hour(usd)} exceeds the cap {usd_per_hour(most)}", "Request a new quote."
                )
        if not self._has(token):
            self._write(token, {"at": self._clock.now(), "usd": usd, "platform": self.profile.id, "ended": False})
        return Known(self._reserved(token))

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return the machine for a reservation's job, with its cost if it is gone; None if neither a job nor an active
        reservation exists.
        """
        try:
            queue = await self._queue(run_name(id))
            ours = [job for job in queue.rows if named(job.name)[0] == run_name(id)]
            for job in ours:
                self._note(id, job=job.id)
            left = [job for job in ours if not (job.over and job.schedule == "DONE")]
            if left:
                return Known(self._view(id, left[0]))
            if any(named(name)[0] == run_name(id) for name in queue.sent):
                why = "SkyPilot is submitting its managed job"
                return Known(self._reserved(id).model_copy(update={"meter": None, "why": why}))
            if not ours and (number := self._read(id).get("job")):
                return Unknown(f"SkyPilot no longer lists its managed job {number}")
            return await self._ended(id, ours)
        except WardenError as error:
            return Unknown(error.message)

    async def _ended(self, id: str, ours: list[ManagedJob]) -> Answer[Instance | None]:  # noqa: A002
        """Return the final state of finished jobs. If there are no jobs, return the reservation, or None if it is not
        active.
        """
        if not ours:
            waits = self._has(id) and not self._read(id).get("ended")
            return Known(self._reserved(id) if waits else None)
        names = [job.cluster for job in ours if job.cluster]
        costs = await self._sky.ask(list[Cost], "cost", names=names) if names else []
        if live := next((cost.name for cost in costs if cost.live), ""):
            return Unknown(f"SkyPilot has finished with the managed job, but its cost report lists {live} as running")
        failed = next((job for job in ours if job.status == "FAILED_CONTROLLER" and not costs), None)
        if failed is not None:
            why = "SkyPilot's controller failed, and its machine may still be running: check the cloud's console"
            return Known(self._view(id, failed).model_copy(update={"meter": None, "why": why}))
        paid = sum(cost.usd for cost in costs if cost.usd is not None) or None
        self._note(id, gone=True)
        gone = self._view(id, ours[-1]).model_copy(update={"state": InstanceState.GONE, "meter": False})
        return Known(gone.model_copy(update={"cost_usd": paid}))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every active reservation, every other managed job, and SkyPilot's controllers."""
        found: dict[str, Instance] = {}
        for token in self._tokens():
            if self._read(token).get("platform") != self.profile.id or self._read(token).get("gone"):
                continue
            answer = await self.get(token)
            if isinstance(answer, Unknown):
                return answer
            if answer.value is not None and answer.value.state is not InstanceState.GONE:
                found[token] = answer.value
        try:
            listed = await self._sky.ask(Clusters, "clusters", names=None, fresh=False)
        except WardenError as error:
            return Unknown(error.message)
        mine = {f"jobs/{self._read(token).get('job')}" for token in found}
        others = (job for job in await self._managed() if job.id not in mine)
        return Known((*found.values(), *others, *(self._instance(c) for c in listed.clusters if c.controller)))

    # --------------------------------------------------------------------------------------------------------- verbs

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because an ended job can't be started again."""
        raise NotSupported("a managed job that ended can't be started again", "Submit it again.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because a managed job can't be stopped and resumed."""
        raise NotSupported("a managed job can't be stopped and resumed", "Use terminate, which cancels it.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Cancel the job and end the reservation. Returns Unknown if the job has not yet been submitted to the
        controller.
        """
        try:
            queue = await self._queue(run_name(id))
            ours = [job for job in queue.rows if named(job.name)[0] == run_name(id)]
            for job in ours:
                if not job.over:
                    await self._sky.ask(Done, "cancel_managed", job_id=job.id, graceful=job.status != "CANCELLING")
        except WardenError as error:
            if error.retry:
                return Unknown(error.message)
            raise
        if any(named(name)[0] == run_name(id) for name in queue.sent):
            return Unknown("SkyPilot is submitting the managed job, which can't be canceled before it has an id")
        noted = self._read(id)
        if not ours and noted.get("job") and not noted.get("gone"):
            return Unknown(f"SkyPilot no longer lists its managed job {noted['job']}, so no job was canceled")
        self._write(id, noted | {"ended": True})
        return Known(None)

    # ------------------------------------------------------------------------------------------------------- records

    async def _queue(self, stem: str) -> ManagedQueue:
        return await self._sky.ask(ManagedQueue, "managed", match=stem, finished=True)

    def _note(self, id: str, **seen: int | bool) -> None:  # noqa: A002
        """Record facts about a reservation's job, to distinguish a job that disappeared from one that never existed."""
        noted = self._read(id)
        if noted and noted | seen != noted:
            self._write(id, noted | seen)

    def _view(self, id: str, job: ManagedJob) -> Instance:  # noqa: A002
        state, meter = MANAGED.get(job.status, (InstanceState.TERMINATING, None))
        again = f", recovered {job.recoveries} times" if job.recoveries else ""
        return Instance(
            id=id,
            token=id,
            state=InstanceState.RUNNING if state is InstanceState.BOOTING else state,
            place=self._place(id),
            meter=meter,
            price_usd_per_hour=self._read(id).get("usd"),
            created_at=self._read(id).get("at") or job.submitted_at,
            why=line(f"managed job {job.id}: {job.status}{again}. {job.why}", 300),
        )
