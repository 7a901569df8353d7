"""Provider `hf_jobs`: Hugging Face Jobs. No machine is rented in advance: the job is the instance.

`create` makes a reservation, which costs nothing: it writes the token to a file and requests the price. After the
launch, the instance has the state of the job that has the token in a label; when the job ends, the instance is gone. A
reservation that was terminated without a launch is also gone.

The list includes the account's other jobs, and its scheduled jobs, which start billed jobs automatically.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, NotSupported, WardenError, nothing_sent
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Quote, Resources, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.hub import jobs
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.providers._account import salted
from gpuwarden.providers._reservations import ReservingProvider


def create(profile: Profile, state: Path, clock: Clock) -> HfJobsProvider:
    """Return the provider for one profile."""
    return HfJobsProvider(profile, state, clock)


ACCOUNT_KEYS: Final = ()  # the Hub token is not an account key, because jobs also need it to read and push
SHELL_GUARD: Final = ShellGuard(
    ends={
        "hf": (
            "jobs cancel",
            "jobs scheduled delete|suspend",
            "repo|repos delete|delete-files",
            "repo|repos branch delete",
            "repo-files delete",
            "repo-files * delete",
            "buckets|bucket delete|remove|rm",
            "buckets|bucket sync --delete",
            "sync --delete",
            "upload --delete",
            "endpoints delete|pause|scale-to-zero",
            "sandbox|sandboxes kill|delete|stop|terminate",
        )
    },
    aliases={"huggingface-cli": "hf"},
    remote={"hf": ("jobs ssh *",)},
    hosts=("huggingface.co", "hf.co"),
    requests=(r"/api/jobs/\S*/cancel", r"/api/repos/delete", r"delete(?:d?File|d?Folder|Entry)"),
    code=(
        r"\bdelete_(?:repo|folder|files?|branch|bucket|inference_endpoint|scheduled_job)\s*\(",
        r"\b(?:cancel_job|pause_inference_endpoint|super_squash_history|suspend_scheduled_job)\s*\(",
        r"\bdelete(?:Repo|Files?)\s*\(",
    ),
    servers=("hf", "huggingface", "hub"),
)


class HfJobsProvider(ReservingProvider):
    """The provider for reservations and the jobs that use them."""

    name = "hf_jobs"

    def __init__(self, profile: Profile, state: Path, clock: Clock, config: HubConfig | None = None) -> None:
        super().__init__(profile, state, clock)
        self._config = config

    def _hub(self) -> HubClient:
        return HubClient(self._config or HubConfig.from_env(), clock=self._clock)

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the Hub token and the Hub's address."""
        config = self._config or HubConfig.from_env()
        return salted(salt, self.name, config.endpoint, config.token or "")

    async def account_id(self) -> Answer[str]:
        """Return the name of the token's user."""
        async with self._hub() as hub:
            return Known(await jobs.namespace(hub))

    async def check(self) -> list[Finding]:
        """Return a finding if the Hub does not accept the token."""
        try:
            async with self._hub() as hub:
                await jobs.namespace(hub)
        except WardenError as error:
            return [Finding.of(error, rule="hf_jobs")]
        return []

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the requested flavor."""
        async with self._hub() as hub:
            known = await jobs.prices(hub)
        flavor = jobs.flavor_of(resources.gpu, resources.gpu_count, known)
        return Known(jobs.quote(self.profile.id, flavor, known, self._clock.now()))

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Make a reservation. No job runs yet, and nothing is billed."""
        with nothing_sent():
            if resources.durable_storage:
                raise NotSupported(
                    "durable storage can't be rented for a Hugging Face job",
                    "Declare an output in a bucket: /hub/buckets/OWNER/NAME/FOLDER.",
                )
            price = await self.quote(resources)
        usd = price.value.price_usd_per_hour if isinstance(price, Known) else None
        if not self._has(token):
            owner = resources.options.get("namespace")
            self._write(token, {"at": self._clock.now(), "usd": usd, "ended": False, "namespace": owner})
        return Known(self._reserved(token))

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return a reservation's job, or the reservation before the launch; None if the job or the reservation has
        ended.
        """
        try:
            async with self._hub() as hub:
                found = await jobs.listed(hub, await self._owner(hub, id), {jobs.LEASE: id})
        except WardenError as error:
            return Unknown(error.message)
        live = [j for j in found if jobs.stage_of(j) not in jobs.FINAL]
        if live:
            return Known(self._instance(id, live[0], self._read(id).get("usd"), token=id))
        if found or not self._has(id) or self._read(id).get("ended"):
            return Known(None)
        return Known(self._reserved(id))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every active reservation, every other running job, and every scheduled job.

        An organization that the account has left is skipped, unless it has an active reservation.
        """
        running, planned = [], []
        try:
            async with self._hub() as hub:
                owner = await jobs.namespace(hub)
                notes = [self._read(token) for token in self._tokens()]
                needed = {owner, *(note.get("namespace") or owner for note in notes if not note.get("ended"))}
                for name in sorted(needed | {note.get("namespace") or owner for note in notes}):
                    try:
                        here = await jobs.live(hub, name), await jobs.scheduled(hub, name)
                    except (AuthFailed, NotSupported):
                        if name in needed:
                            raise
                        continue
                    running += here[0]
                    planned += here[1]
                prices = await jobs.prices(hub) if running or planned else {}
        except WardenError as error:
            return Unknown(error.message)
        found: dict[str, Instance] = {}
        live = {jobs.labels_of(job).get(jobs.LEASE, ""): job for job in running}
        for token in self._tokens():
            if (job := live.get(token)) is not None:  # other tokens need a separate request
                found[token] = self._instance(token, job, self._read(token).get("usd"), token=token)
                continue
            if self._read(token).get("ended"):
                continue
            answer = await self.get(token)
            if isinstance(answer, Unknown):
                return answer
            if answer.value is not None:
                found[token] = answer.value
        for job in running:
            lease = jobs.labels_of(job).get(jobs.LEASE, "")
            name = lease if self._has(lease) else str(job["id"])
            usd = prices.get(str(job.get("flavor")))
            found.setdefault(name, self._instance(name, job, usd, token=lease))
        found |= {i.id: i for i in (_planned(one, prices) for one in planned)}
        return Known(tuple(found.values()))

    async def _owner(self, hub: HubClient, token: str) -> str:
        """Return the namespace of a reservation's job."""
        return str(self._read(token).get("namespace") or await jobs.namespace(hub))

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported, because the Hub's API does not report a balance."""
        raise NotSupported("the Hub's API does not report a balance", "See huggingface.co/settings/billing.")

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because an ended job can't be started again."""
        raise NotSupported("a job that ended can't be started again", "Submit it again.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because a job can't be stopped and resumed."""
        raise NotSupported("a Hugging Face job can't be stopped and resumed", "Use terminate, which cancels the job.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Cancel the job and end the reservation."""
        try:
            async with self._hub() as hub:
                owner = await self._owner(hub, id)
                for job in await jobs.listed(hub, owner, {jobs.LEASE: id}):
                    if jobs.stage_of(job) not in jobs.FINAL:
                        await jobs.cancel(hub, owner, str(job["id"]))
        except WardenError as error:
            if error.retry:
                return Unknown(error.message)
            raise
        self._write(id, self._read(id) | {"ended": True})
        return Known(None)

    # -------------------------------------------------------------------------------------------------- records

    def _place(self, token: str) -> Place:
        owner = self._read(token).get("namespace")
        return super()._place(token).model_copy(update={"user": owner})

    def _instance(self, name: str, job: Mapping[str, Any], usd: float | None, *, token: str) -> Instance:
        started = jobs.moment(job.get("startedAt"))
        seconds = self._clock.now() - started if started is not None else 0.0
        return Instance(
            id=name,
            token=token,
            state=InstanceState.RUNNING,
            place=self._place(name),
            meter=True if jobs.stage_of(job) == "RUNNING" else None,
            price_usd_per_hour=usd,
            cost_usd=None if usd is None else max(0.0, seconds) / 3600 * usd,
            created_at=self._read(name).get("at") or jobs.moment(job.get("createdAt")),
            why=f"job {job['id']}: {jobs.stage_of(job)}",
        )


def _planned(one: Mapping[str, Any], prices: Mapping[str, float]) -> Instance:
    """Return a scheduled job as an instance.

    Unless it is suspended, it counts as billed, because one of its jobs may be running.
    """
    paused = one.get("suspend") is True
    schedule, status = line(str(one.get("schedule")), 60), one.get("status")
    at = line(str(status.get("nextJobRunAt")), 40) if isinstance(status, dict) else "unknown"
    return Instance(
        id=f"scheduled-{one['id']}",
        state=InstanceState.STOPPED if paused else InstanceState.RUNNING,
        meter=False if paused else None,
        price_usd_per_hour=prices.get(str(one["jobSpec"].get("flavor"))),
        created_at=jobs.moment(one.get("createdAt")),
        why=f"scheduled job {schedule}: " + ("suspended" if paused else f"starts its next job at {at}"),
    )
