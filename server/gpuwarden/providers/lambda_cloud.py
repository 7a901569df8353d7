"""Provider `lambda_cloud`: Lambda's on-demand instances.

| variable | meaning |
|---|---|
| `LAMBDA_API_KEY`, `LAMBDA_API_KEY_FILE` | the account's key; all Lambda keys have full access |
| `LAMBDA_SSH_KEY_NAME` | the account's SSH key for new instances; default: the key that matches yours |
| `LAMBDA_FILESYSTEM` | the name of the filesystem for durable storage; default: `gpuwarden` |

The API does not support stopping or price caps, and does not report bills or the balance. A cap is compared with the
price of the instance type before the launch. The account is identified by the owner in the audit log.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, NoCapacity, NotFound, NotSupported, WardenError, nothing_sent
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import SSH_KEY_VARIABLE, same_key
from gpuwarden.providers._http import (
    Api,
    ApiResponse,
    Ident,
    Readable,
    ResponseModel,
    is_safe_id,
    readable,
    unclear_instance,
)
from gpuwarden.providers._rented import (
    DURABLE_NAME,
    Findings,
    HttpProvider,
    gpu_matches,
    positive_price,
)

_S = InstanceState
_V1 = "/api/v1"
STATES: dict[str, tuple[InstanceState, bool | None]] = {
    "booting": (_S.BOOTING, None),
    "active": (_S.RUNNING, True),
    "unhealthy": (_S.FAILED, True),
    "terminating": (_S.TERMINATING, None),
    "terminated": (_S.GONE, False),
    "preempted": (_S.INTERRUPTED, None),
}


class _Specs(ResponseModel):
    gpus: int


class _Type(ResponseModel):
    name: str
    description: str
    gpu_description: str
    price_cents_per_hour: int
    specs: _Specs


class _Region(ResponseModel):
    name: str


class _Kind(ResponseModel):
    instance_type: _Type
    regions_with_capacity_available: tuple[_Region, ...]


class _Kinds(ResponseModel):
    data: dict[str, Readable[_Kind]]


class _InstanceId(ResponseModel):
    """The fields that even an invalid row must have, because an instance without a name could have any token."""

    id: Ident
    name: str


class _Instance(ResponseModel):
    id: Ident
    name: str | None = None
    ip: str | None = None
    status: Literal["booting", "active", "unhealthy", "terminating", "terminated", "preempted"]
    instance_type: _Type


class _One(ResponseModel):
    data: _Instance


class _Many(ResponseModel):
    data: tuple[_Instance | _InstanceId, ...]


class _Launched(ResponseModel):
    instance_ids: tuple[Ident, ...]


class _Launch(ResponseModel):
    data: _Launched


class _Ended(ResponseModel):
    id: Ident


class _Terminated(ResponseModel):
    terminated_instances: tuple[_Ended, ...]


class _Termination(ResponseModel):
    data: _Terminated


class _Key(ResponseModel):
    name: str
    public_key: str


class _Keys(ResponseModel):
    data: tuple[Readable[_Key], ...]


class _Audited(ResponseModel):
    resource_owner_lrn: str | None


class _Audit(ResponseModel):
    data: tuple[Readable[_Audited], ...]


class _Filesystem(ResponseModel):
    name: str
    mount_point: str
    region: _Region


class _Filesystems(ResponseModel):
    data: tuple[Readable[_Filesystem], ...]


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Map Lambda's error codes. Its messages are not used, because they may change at any time."""
    code = reply.text("error.code")
    if 400 <= reply.status < 500:
        if code == "instance-operations/launch/insufficient-capacity":
            return NoCapacity(
                f"Lambda currently has no free capacity ({message})", "Try another region or type, or try again later."
            )
        if code == "global/object-does-not-exist":
            return NotFound(f"Lambda did not find the requested object: {message}")
    return None


class LambdaCloud(HttpProvider):
    """A `Provider` for one Lambda account."""

    name = "lambda_cloud"
    machine_options = frozenset({"region"})
    api = Api(
        platform="Lambda",
        url="https://cloud.lambda.ai",
        url_variable="GPUWARDEN_LAMBDA_CLOUD_URL",
        key_variable="LAMBDA_API_KEY",
        refusal=_refusal,
        message_fields=("error.message", "error.code"),
        pace_s=1.0,
    )
    max_name = 64

    async def check_account(self) -> Findings:
        """Return a finding if the account has no usable SSH key, because a launch requires one."""
        try:
            await self._key_name()
        except BadRequest as refusal:
            return [self.finding(Severity.ERROR, refusal.message, refusal.next_steps)]
        return []

    async def ask_account(self) -> Answer[str]:
        """Return the owner named on the first page of the audit log; Unknown unless there is exactly one."""
        answer = await self.client.ask("GET", f"{_V1}/audit-events", _Audit)
        if isinstance(answer, Unknown):
            return answer
        owners = {e.resource_owner_lrn or "" for e in readable(answer.value.data, _Audited)}
        accounts = [lrn for lrn in owners if re.fullmatch(r"lrn:cloud:account:\w+", lrn)]
        if len(accounts) != 1:
            return Unknown(f"Lambda's audit log names {len(accounts)} accounts")
        return Known(accounts[0])

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price of the cheapest type that can be launched now."""
        answer = await self._offer(resources)
        if isinstance(answer, Unknown):
            return answer
        kind, region = answer.value
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=_price(kind),
                source="Lambda instance types",
                at=self.clock.now(),
                note=f"{kind.description} in {region}",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Launch the cheapest type that is in stock."""
        with nothing_sent():
            label = self.label(token)
            offer = await self._offer(resources)
            if isinstance(offer, Unknown):
                return offer
            key = await self._key_name()
        if isinstance(key, Unknown):
            return key
        kind, region = offer.value
        order: dict[str, object] = {
            "region_name": region,
            "instance_type_name": kind.name,
            "ssh_key_names": [key.value],
            "name": label,
        }
        if resources.durable_storage:
            order["file_system_names"] = [self._filesystem_name()]
        answer = await self.client.ask("POST", f"{_V1}/instance-operations/launch", _Launch, body=order, creates=True)
        if isinstance(answer, Unknown):
            return answer
        ids = answer.value.data.instance_ids
        if len(ids) != 1:
            return Unknown(f"Lambda was asked for one instance but reported {len(ids)}")
        return Known(
            Instance(
                id=ids[0],
                token=token,
                state=_S.BOOTING,
                price_usd_per_hour=_price(kind),
                created_at=self.clock.now(),
                why=f"launched in {region}",
            )
        )

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance."""
        answer = await self.client.ask("GET", f"{_V1}/instances/{id}", _One)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value.data))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance that is not gone. Lambda's list always has a single page."""
        answer = await self.client.ask("GET", f"{_V1}/instances", _Many)
        if isinstance(answer, Unknown):
            return answer
        rows, read = answer.value.data, readable(answer.value.data, _Instance)
        if rows and not read:
            return Unknown(f"none of the {len(rows)} instances that Lambda listed could be read")
        gone = {i.id for i in read if i.status == "terminated"}
        return Known(tuple(self._view(i) for i in rows if i.id not in gone))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because Lambda can't start an instance again."""
        raise NotSupported("Lambda can't start an instance again", "Launch another instance.")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Raise NotSupported, because Lambda has no stop operation."""
        raise NotSupported("Lambda can't stop an instance", "Use terminate, which also deletes the instance's disk.")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination. The result is `Known` only if the reply names the instance."""
        if not is_safe_id(id):
            return Known(None)
        body = {"instance_ids": [id]}
        try:
            answer = await self.client.ask("POST", f"{_V1}/instance-operations/terminate", _Termination, body=body)
        except NotFound:
            return Known(None)
        if isinstance(answer, Unknown):
            return answer
        if id not in {i.id for i in answer.value.data.terminated_instances}:
            return Unknown(f"Lambda accepted the request but did not name {id} among the terminated instances")
        return Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _offer(self, resources: Resources) -> Answer[tuple[_Type, str]]:
        """Return the cheapest type in stock, and a region that has it.

        Raises BadRequest if the GPU is unknown, NoCapacity if no type is available.
        """
        asked, cap = self.refuse_unsold(resources), resources.max_price_usd_per_hour
        home = await self._filesystem_region() if resources.durable_storage else Known(None)
        if isinstance(home, Unknown):
            return home
        answer = await self.client.ask("GET", f"{_V1}/instance-types", _Kinds)
        if isinstance(answer, Unknown):
            return answer
        sold = readable(answer.value.data.values(), _Kind)
        if answer.value.data and not sold:
            return Unknown(f"none of Lambda's {len(answer.value.data)} instance types could be read")
        kinds = [
            k
            for k in sold
            if gpu_matches(asked, (k.instance_type.name, k.instance_type.gpu_description, k.instance_type.description))
        ]
        if not kinds:
            names = ", ".join(sorted({k.instance_type.gpu_description for k in sold})[:30])
            raise BadRequest(f"Lambda has no GPU called {asked!r}", f"Known GPUs: {names}.")
        fitting = [
            (k.instance_type, region.name)
            for k in kinds
            for region in k.regions_with_capacity_available
            if k.instance_type.specs.gpus == resources.gpu_count
            and home.value in {None, region.name}
            and self.option(resources, "region") in {"", region.name}
            and (cap is None or (_price(k.instance_type) or cap + 1) <= cap)
        ]
        if not fitting:
            limit = "" if cap is None else f" at {usd_per_hour(cap)} or less"
            where = f" in {home.value}, the filesystem's region" if home.value else ""
            where += f" in {line(wish, 40)}" if (wish := self.option(resources, "region")) else ""
            raise NoCapacity(
                f"Lambda has no {resources.gpu_count} x {asked}{limit} available{where}", "Try again later."
            )
        return Known(min(fitting, key=lambda f: (_price(f[0]) is None, _price(f[0]) or 0.0, f[0].name, f[1])))

    async def _key_name(self) -> Answer[str]:
        """Return the name of the SSH key for a launch. Raises BadRequest if no key is known to be the user's."""
        answer = await self.client.ask("GET", f"{_V1}/ssh-keys", _Keys)
        if isinstance(answer, Unknown):
            return answer
        named, mine, keys = self.env.get("LAMBDA_SSH_KEY_NAME"), self.ssh_key(), readable(answer.value.data, _Key)
        if named:
            fitting = [k.name for k in keys if k.name == named]
        else:
            fitting = [k.name for k in keys if mine is not None and same_key(k.public_key) == mine]
            if not fitting and len(keys) == 1 and SSH_KEY_VARIABLE not in self.env:
                fitting = [keys[0].name]
        if not fitting:
            raise BadRequest(
                "none of the Lambda account's SSH keys is known to be yours, so no instance would be reachable",
                "Add your public key to the account, or set LAMBDA_SSH_KEY_NAME to the name of one of its keys.",
            )
        return Known(fitting[0])

    def _filesystem_name(self) -> str:
        return self.env.get("LAMBDA_FILESYSTEM") or DURABLE_NAME

    async def _filesystem_region(self) -> Answer[str | None]:
        """Return the region of the durable filesystem. Raises BadRequest unless it is mounted at the profile's path."""
        wanted, tier = self._filesystem_name(), self.durable_tier()
        assert tier is not None  # checked by refuse_unsold
        answer = await self.client.ask("GET", f"{_V1}/file-systems", _Filesystems)
        if isinstance(answer, Unknown):
            return answer
        found = [f for f in readable(answer.value.data, _Filesystem) if f.name == wanted]
        if len(found) != 1 or found[0].mount_point != tier.path:
            at = f", mounted at {found[0].mount_point}" if len(found) == 1 else ""
            raise BadRequest(
                f"Lambda has {len(found)} filesystems called {wanted!r}{at}; durable storage needs one at {tier.path}",
                f"Create a filesystem called {DURABLE_NAME}; it is billed until it is deleted.",
            )
        return Known(found[0].region.name)

    def _view(self, i: _Instance | _InstanceId) -> Instance:
        if not isinstance(i, _Instance):
            return unclear_instance(i.id, self.token_in(i.name), self.api.platform)
        state, meter = STATES[i.status]
        why = f"status {i.status}"
        if i.status == "unhealthy":
            why += "; it is still billed"
        return Instance(
            id=i.id,
            token=self.token_in(i.name),
            state=state,
            place=self.place(i.id, i.ip, None) if state is _S.RUNNING and i.ip else None,
            meter=meter,
            price_usd_per_hour=_price(i.instance_type),
            why=why,
        )


def _price(kind: _Type) -> float | None:
    return positive_price(kind.price_cents_per_hour / 100)


ACCOUNT_KEYS: Final = (LambdaCloud.api.key_variable, "LAMBDA_CLOUD_API_KEY", "LAMBDALABS_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={"lambda": ("terminate|stop", "instances|instance terminate|stop|delete", "filesystems|filesystem delete")},
    aliases={"lambda-cli": "lambda", "lambda-cloud": "lambda", "lambdacloud": "lambda"},
    hosts=("lambda.ai", "lambdalabs.com", "lambda.com"),
    requests=(r"instance-operations/terminate",),
    code=(r"\bterminate_instances?\s*\(",),
    servers=("lambda", "lambdalabs"),
)


def create(profile: Profile, state: Path, clock: Clock) -> LambdaCloud:
    """Return the provider for one profile. The provider stores no files."""
    return LambdaCloud(profile, clock)
