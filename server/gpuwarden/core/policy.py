"""The user's policy: one TOML file, read into this model. With the default values, all spending requires approval.

An environment variable can make a value stricter but never looser, because an agent may be able to set the variable. A
field's marker defines which of two values is stricter. A field without a marker is read only from the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, field_validator

from gpuwarden.core.models import Frozen
from gpuwarden.core.store_address import StoreAddress, StorePattern

Channel = Literal["elicitation", "terminal", "page", "rehearsal"]
"""The approval channel. `elicitation` is weak: a script can answer the client's form. `rehearsal` is a flag that
requires no user and is accepted only for simulated machines.
"""
WEAK: Final = frozenset({"elicitation"})


@dataclass(frozen=True)
class ByVariable:
    """The marker for a field that a variable may set: `fits(filed, asked)` is true if the variable's value, `asked`, is
    not looser than the file's value, `filed`.
    """

    fits: Callable[[Any, Any], bool]
    may: str
    """The only change that a variable may make, as a verb for messages, such as `lower`."""


def covered(asked: Iterable[str], filed: Iterable[str]) -> bool:
    """Return whether every name that a pattern of `asked` matches is also matched by a pattern of `filed`.

    Return False if that can't be determined: only prefixes are compared, so `a*b` is recognized as part of `a*`, but
    not as part of `*b`.
    """
    return all(any(_inside(pattern, wider) for wider in filed) for pattern in asked)


def _inside(pattern: str, wider: str) -> bool:
    if pattern == wider:
        return True
    head = _WILD.split(pattern, maxsplit=1)[0]
    if head == pattern:
        return fnmatchcase(pattern, wider)
    return wider.endswith("*") and head.startswith(wider[:-1])


_WILD = re.compile(r"[*?\[]")
LOWER = ByVariable(lambda filed, asked: asked <= filed, "lower")
HIGHER = ByVariable(lambda filed, asked: asked >= filed, "raise")
FEWER = ByVariable(lambda filed, asked: set(asked) <= set(filed), "remove entries from")
NARROWER = ByVariable(lambda filed, asked: covered(asked, filed), "remove entries from")
FILE_ONLY = "file only"
"""Marks a table that environment variables can't override."""

Usd = Annotated[float, Field(ge=0, le=1_000_000), LOWER]


class Caps(Frozen):
    """Spending that needs no approval, in US dollars. Above a cap, the user must approve; 0 requires approval every
    time.
    """

    per_job_usd: Usd = 0.0
    per_day_usd: Usd = 0.0
    per_instance_usd: Usd = 0.0


class Approval(Frozen):
    """How the user approves. `gpuwarden approve --set-pin` writes `pin_hash`; the PIN itself is not stored."""

    channels: Annotated[tuple[Channel, ...], FEWER] = ("terminal", "page")
    pin_hash: str | None = None
    ttl_s: Annotated[int, LOWER] = Field(default=900, ge=30, le=86_400)

    @field_validator("pin_hash")
    @classmethod
    def _shape(cls, text: str | None) -> str | None:
        if text is not None and _parse_pin(text) is None:
            raise ValueError("pin_hash has an invalid form; set the PIN again")
        return text


def guarded(url: str | None) -> str | None:
    """Return a URL to which this machine may send data; None if it is empty. Raises ValueError for any other URL."""
    if not url:
        return None
    parts = urlsplit(url)
    local = parts.hostname in {"localhost", "127.0.0.1", "::1"}
    if not parts.hostname or parts.username or parts.scheme not in ({"http", "https"} if local else {"https"}):
        raise ValueError("the address must be https and have no user name; http is allowed for this machine only")
    return url


Address = Annotated[str | None, AfterValidator(guarded)]
Minutes = Annotated[int, Field(ge=1, le=10_080), LOWER]


class Watch(Frozen):
    """When alerts are raised, and which channels receive them in addition to the ledger and the terminal. An
    environment variable can only cause earlier alerts.

    `desktop` is a command as a list of arguments; the arguments `{title}` and `{text}` are replaced. `webhook_url`
    receives JSON that is signed with the secret in the variable GPUWARDEN_WEBHOOK_SECRET. `slack_url` is the address of
    a Slack incoming webhook.
    """

    idle_minutes: Minutes = 30
    stall_minutes: Minutes = 30
    finished_minutes: Minutes = 10
    unknown_minutes: Minutes = 15
    disk_free_percent: Annotated[int, HIGHER] = Field(default=10, ge=1, le=90)
    danger_hours: Annotated[int, HIGHER] = Field(default=48, ge=1, le=720)
    desktop: tuple[str, ...] = Field(default=(), max_length=32)
    webhook_url: Address = None
    slack_url: Address = None


class TeardownPolicy(Frozen):
    """Settings for teardown while the user is away. Only the policy file sets them, never a variable.

    `automatic` turns on automatic teardown for every job that is accepted while it is set. After a job has succeeded,
    if all its outputs are proven and its machine has no other content, the watch stops or terminates the machine
    without further confirmation, `grace_minutes` after an alert. `background_gb` limits the total that the watch may
    copy to this disk automatically, for all jobs together; with 0, nothing is copied. If a job's outputs have not been
    pulled, its rented machine stops itself `self_stop_minutes` after the job ends; 0 turns self-stop off. Self-stop
    requires a platform that keeps the outputs when a machine is stopped, and that gives the machine a key to stop
    itself.
    """

    automatic: Literal["off", "stop", "terminate"] = "off"
    grace_minutes: int = Field(default=10, ge=1, le=1440)
    background_gb: float = Field(default=50.0, ge=0, le=1_000_000)
    self_stop_minutes: float = Field(default=0.0, ge=0, le=10_080)


class Secrets(Frozen):
    """The user's variables that a job may receive as secrets: names, or patterns such as `WANDB_*`.

    A job never receives the key of an account that rents machines, even if it is listed here.
    """

    allowed: Annotated[tuple[str, ...], NARROWER] = (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "COMET_API_KEY",
        "SWANLAB_API_KEY",
        "NEPTUNE_API_TOKEN",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "CLEARML_API_ACCESS_KEY",
        "CLEARML_API_SECRET_KEY",
        "KAGGLE_USERNAME",
        "KAGGLE_KEY",
    )

    def allows(self, name: str) -> bool:
        """Return whether a job may receive the variable with this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.allowed)


def _fewer_places(filed: tuple[str, ...], asked: tuple[str, ...]) -> bool:
    """Return whether `filed` allows every store that `asked` allows. An empty list allows all stores."""
    wider = [StorePattern.parse(text) for text in filed]
    return not wider or (
        bool(asked) and all(any(own.covers(StorePattern.parse(text)) for own in wider) for text in asked)
    )


class ArtifactStores(Frozen):
    """The artifact stores that a job may name: `s3://bucket/prefix`, `hf://owner/*`. An entry covers all
    addresses under it, and `*` matches exactly one name. If the list is empty, a job may name any store.
    """

    allowed: Annotated[
        tuple[Annotated[str, Field(max_length=1_000)], ...],
        ByVariable(_fewer_places, "remove entries from"),
        Field(max_length=64),
    ] = ()

    @field_validator("allowed")
    @classmethod
    def _places(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            StorePattern.parse(text)
        return texts

    def allows(self, address: str) -> bool:
        """Return whether a job may name the store at an address."""
        stored = StoreAddress.parse(address)
        return not self.allowed or any(StorePattern.parse(text).covers(stored) for text in self.allowed)


class Local(Frozen):
    """Permissions for jobs on this machine, including rehearsals. Only the policy file sets them, never a variable.

    The jobs run in a sandbox. `unsandboxed` lets them run without a sandbox if no sandbox works (set by `gpuwarden
    policy allow local`). `network` gives them access to this machine's network and the services on it. `caches` gives
    them read access to the Hub's cache. `paths` lists more folders that they may read and write. With `rehearse =
    "allow"`, a script's first step is rehearsed without asking; otherwise the user is asked once for each script with
    its arguments.
    """

    unsandboxed: bool = False
    network: bool = False
    caches: bool = True
    paths: Annotated[tuple[Annotated[str, Field(pattern=r"^[/~]", max_length=4096)], ...], Field(max_length=64)] = ()
    rehearse: Literal["ask", "allow"] = "ask"


class Hosts(Frozen):
    """Programs that gpuwarden may copy to machines over SSH. Only the policy file sets them, never a variable.

    `bring_uv` copies uv into the run root of a Linux machine that lacks it, if a script's header requires packages that
    are not installed. uv comes from a pinned PyPI wheel, which pip downloads to this machine.
    """

    bring_uv: bool = False


class Http(Frozen):
    """Settings of `gpuwarden serve`. Only the policy file sets them, never a variable.

    `oauth_issuer` is the address of an OAuth authorization server. Clients may present its access tokens for this
    server, with the scopes `read` and `submit`, instead of tokens from `gpuwarden token create`.
    """

    oauth_issuer: Address = None


class Allowance(Frozen):
    """Caps for one user or one project, in US dollars; None means no cap."""

    per_job_usd: float | None = Field(default=None, ge=0, le=1_000_000)
    per_day_usd: float | None = Field(default=None, ge=0, le=1_000_000)


Name = Annotated[str, Field(min_length=1, max_length=120)]


class Team(Frozen):
    """The people who share a ledger. Only the policy file sets them, never a variable.

    If `approvers` has entries, only those people may approve. If `people` or `projects` has entries, a job of any other
    user or project requires approval. `caps` apply to all users and projects together.
    """

    approvers: tuple[Name, ...] = Field(default=(), max_length=200)
    people: dict[Name, Allowance] = Field(default={}, max_length=1_000)
    projects: dict[Name, Allowance] = Field(default={}, max_length=1_000)


class Policy(Frozen):
    """The complete policy. `rehearsal_caps` limit simulated spending, so that a rehearsal can include an approval."""

    caps: Caps = Caps()
    rehearsal_caps: Annotated[Caps, FILE_ONLY] = Caps(per_job_usd=10, per_day_usd=100, per_instance_usd=20)
    platforms: Annotated[tuple[str, ...], NARROWER] = ("*",)
    approval: Approval = Approval()
    secrets: Secrets = Secrets()
    artifact_stores: ArtifactStores = ArtifactStores()
    watch: Watch = Watch()
    receipt_ttl_s: Annotated[int, LOWER] = Field(default=1800, ge=30, le=86_400)
    local: Local = Local()
    hosts: Annotated[Hosts, FILE_ONLY] = Hosts()
    teardown: Annotated[TeardownPolicy, FILE_ONLY] = TeardownPolicy()
    team: Annotated[Team, FILE_ONLY] = Team()
    http: Annotated[Http, FILE_ONLY] = Http()

    def allows(self, platform: str) -> bool:
        """Return whether a platform may be used; entries are names or patterns such as `rehearsal/*`."""
        return any(fnmatchcase(platform, pattern) for pattern in self.platforms)

    def caps_for(self, platform: str) -> Caps:
        """Return the caps for real or for simulated spending."""
        return self.rehearsal_caps if platform.startswith("rehearsal/") else self.caps


@dataclass(frozen=True)
class PolicyField:
    """One policy value: its path, its type, and how a variable may change it (None: not at all)."""

    path: str
    kind: Any
    by_variable: ByVariable | None


def policy_fields(model: type[BaseModel] = Policy, prefix: str = "", *, settable: bool = True) -> Iterator[PolicyField]:
    """Yield every policy value; values in tables have dotted paths."""
    for name, field in model.model_fields.items():
        kind, ours = field.annotation, settable and FILE_ONLY not in field.metadata
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from policy_fields(kind, f"{prefix}{name}.", settable=ours)
        else:
            marks = [m for m in field.metadata if isinstance(m, ByVariable)] if ours else []
            yield PolicyField(f"{prefix}{name}", kind, marks[0] if marks else None)


_SCRYPT = {"n": 2**14, "r": 8, "p": 1}


def hash_pin(pin: str, salt: bytes | None = None) -> str:
    """Return `scrypt$salt$digest` for a PIN, in hex."""
    salt = salt or os.urandom(16)
    return f"scrypt${salt.hex()}${hashlib.scrypt(pin.encode(), salt=salt, **_SCRYPT).hex()}"


def pin_matches(pin: str, pin_hash: str) -> bool:
    """Return whether a PIN matches the hash. The comparison takes constant time."""
    parsed = _parse_pin(pin_hash)
    return parsed is not None and hmac.compare_digest(hash_pin(pin, parsed), pin_hash.lower())


def _parse_pin(text: str) -> bytes | None:
    parts = text.split("$")
    try:
        salt, key = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
    except (IndexError, ValueError):
        return None
    return salt if parts[0] == "scrypt" and len(parts) == 3 and len(salt) == 16 and len(key) == 64 else None
