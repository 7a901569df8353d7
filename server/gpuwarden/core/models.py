"""Models that modules pass to each other: specs, places, observations, manifests, reports.

Every model is frozen and rejects unknown fields. Times are seconds since the epoch (UTC), money is US dollars, sizes
are bytes, paths on machines are POSIX.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Final, Generic, Literal, TypeAlias, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from gpuwarden.core.evidence import Cause
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.core.store_address import StoreAddress

T = TypeVar("T")

MAX_SCRIPT_BYTES = 1 << 20
MAX_OUTPUTS = 64
MAX_INPUTS = 64
MAX_INPUT_BYTES = 64 << 20
"""The maximum total size of a job's inputs."""
MAX_OPTIONS = 8_192
MAX_CELLS = 1_000
MAX_ALTERNATIVES = 7
MAX_SETTING = 4_096
"""The maximum length of a setting's value in a cell, in characters."""
CELLS = "cells"
"""The folder for a fan-out's cells, inside the working folder."""
Verb: TypeAlias = Literal["stop", "terminate"]
Until: TypeAlias = Literal["end", "step", "state", "alert"]
"""The events for which a caller can wait."""
Where: TypeAlias = Literal["auto", "here", "instance"]
"""The machine on which a checkpoint is verified: the local machine or the job's machine."""


class Frozen(BaseModel):
    """The base class of all models: immutable, without unknown fields, NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class WithOptions(Frozen):
    """A model with platform-specific options.

    Fields that older versions do not have are omitted from the JSON form if they are empty, so that it matches the form
    in older ledgers.
    """

    options: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    """Options that only this platform has. The backend validates them with its own model."""

    @model_serializer(mode="wrap")
    def _plain(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        plain: dict[str, object] = handler(self)
        return {
            k: v
            for k, v in plain.items()
            if v or k not in {"options", "project", "artifact_store", "cells", "cell_timeout_s", "alternatives"}
        }


@dataclass(frozen=True)
class Known(Generic[T]):
    """A value that was read from a valid response."""

    value: T


@dataclass(frozen=True)
class Unknown:
    """The value could not be determined; `why` is the reason. Never treat it as safe, empty or zero."""

    why: str


Answer: TypeAlias = Known[T] | Unknown


def canonical(value: object) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, no NaN. Equal values have the same JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: object) -> str:
    """Return `sha256:` and the hex digest of the canonical JSON of `value`. Models are converted to dicts first."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return "sha256:" + hashlib.sha256(canonical(plain)).hexdigest()


# ---------------------------------------------------------------------------------------------------------- job

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PLATFORM = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}(/[A-Za-z0-9][A-Za-z0-9._-]{0,62})?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")

SettingName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,62}$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


def clean_path(text: str) -> str:
    """Return a normalized POSIX path.

    Raises ValueError for `..`, a control character, a backslash, an empty path or the root.
    """
    if not text or _CONTROL.search(text) or "\\" in text:
        raise ValueError(f"{text!r} is not a valid path: it is empty or contains a backslash or a control character")
    path = PurePosixPath(text)
    if ".." in path.parts:
        raise ValueError(f"{text!r} leaves its folder with '..'; use a path without '..'")
    if str(path) in {".", "/"}:
        raise ValueError(f"{text!r} is a root folder; specify a folder or file inside it")
    return str(path)


class Cell(Frozen):
    """One run in a fan-out: its index in the plan, its settings, and the digest of its full configuration."""

    index: int = Field(ge=0, lt=MAX_CELLS)
    settings: dict[SettingName, str] = Field(default_factory=dict, max_length=32)
    config: str

    @field_validator("settings")
    @classmethod
    def _are_arguments(cls, settings: dict[str, str]) -> dict[str, str]:
        for name, value in settings.items():
            if "\x00" in value or len(value) > MAX_SETTING:
                raise ValueError(
                    f"the value of {name} contains a NUL character or is longer than {MAX_SETTING:,} characters"
                )
        return settings

    @property
    def args(self) -> tuple[str, ...]:
        """Return the settings as arguments for the script."""
        return tuple(f"--{name}={value}" for name, value in self.settings.items())

    @property
    def folder(self) -> str:
        """Return the cell's own folder, relative to the working folder. No other cell writes to it."""
        return f"{CELLS}/{self.index:05d}"


class JobSpec(WithOptions):
    """One training command with its outputs and its limits. Exactly one of `script` and `command` is given."""

    name: str = "job"
    platform: str
    script: str | None = None
    command: tuple[str, ...] = Field(default=(), max_length=256)
    args: tuple[str, ...] = Field(default=(), max_length=256)
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=256)
    secrets: tuple[EnvName, ...] = Field(default=(), max_length=32)
    inputs: tuple[str, ...] = Field(default=(), max_length=MAX_INPUTS)
    outputs: tuple[str, ...] = Field(default=(), max_length=MAX_OUTPUTS)
    timeout_s: int | None = Field(default=None, ge=1, le=60 * 86400)
    estimate_s: int | None = Field(default=None, ge=1, le=60 * 86400)
    max_cost_usd: float | None = Field(default=None, gt=0, le=1_000_000)
    gpu: str | None = Field(default=None, max_length=64)
    gpu_count: int = Field(default=1, ge=1, le=64)
    disk_gb: int | None = Field(default=None, ge=1, le=100_000)
    interruptible: bool = False
    durable_storage: bool = False
    teardown: Verb = "terminate"
    max_restarts: int = Field(default=3, ge=0, le=100)
    project: str = ""
    artifact_store: str = Field(default="", max_length=1_000, validation_alias=AliasChoices("artifact_store", "keep"))
    """The address of the store to which the runner uploads outputs; called `keep` in older ledgers."""
    cells: tuple[Cell, ...] = Field(default=(), max_length=MAX_CELLS)
    """The fan-out cells that this machine runs, one per GPU at a time."""
    cell_timeout_s: int | None = Field(default=None, ge=1, le=60 * 86400)
    alternatives: tuple[str, ...] = Field(default=(), max_length=MAX_ALTERNATIVES)
    """Fallbacks, as `PLATFORM` or `PLATFORM:GPU`. Each is used only if no earlier choice has capacity."""

    @field_validator("artifact_store")
    @classmethod
    def _stored(cls, text: str) -> str:
        return str(StoreAddress.parse(text)) if text else ""

    @field_validator("project")
    @classmethod
    def _tagged(cls, text: str) -> str:
        if text and _NAME.fullmatch(text) is None:
            raise ValueError(
                "a project's name must start with a letter or digit, and have at most 63 letters, digits, dots, dashes "
                "and underscores"
            )
        return text

    @field_validator("name")
    @classmethod
    def _named(cls, text: str) -> str:
        if _NAME.fullmatch(text) is None:
            raise ValueError(
                "a job's name must start with a letter or digit, and have at most 63 letters, digits, dots, dashes "
                "and underscores"
            )
        return text

    @field_validator("platform")
    @classmethod
    def _placed(cls, text: str) -> str:
        if _PLATFORM.fullmatch(text) is None:
            raise ValueError("the platform's name is not valid; names look like runpod, ssh/box and rehearsal/runpod")
        return text

    @field_validator("alternatives")
    @classmethod
    def _choices(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            platform, mark, gpu = text.partition(":")
            if _PLATFORM.fullmatch(platform) is None or (mark and not gpu.strip()) or len(gpu) > 64:
                raise ValueError(f"the alternative {text[:80]!r} must be PLATFORM or PLATFORM:GPU, such as runpod:H100")
        return texts

    @field_validator("script")
    @classmethod
    def _script(cls, text: str | None) -> str | None:
        if text is None:
            return None
        size = len(text.encode("utf-8", "surrogatepass"))
        if not text.strip():
            raise ValueError("the script is empty")
        if size > MAX_SCRIPT_BYTES:
            raise ValueError(f"the script has {size:,} bytes; the limit is {MAX_SCRIPT_BYTES:,}")
        if "\x00" in text:
            raise ValueError("the script contains a NUL character; it is not text")
        return text

    @field_validator("outputs")
    @classmethod
    def _outputs(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(clean_path(p) for p in paths))

    @field_validator("inputs")
    @classmethod
    def _inputs(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if any(p.startswith("/") for p in paths):
            raise ValueError("an input has an absolute path; specify files and folders in the working directory")
        return tuple(dict.fromkeys(clean_path(p) for p in paths))

    @field_validator("command", "args")
    @classmethod
    def _argv(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        for word in argv:
            if "\x00" in word or len(word) > 32_768:
                raise ValueError("an argument contains a NUL character or is longer than 32,768 characters")
        return argv

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if "\x00" in value or len(value) > 32_768:
                raise ValueError(f"the value of {name} contains a NUL character or is longer than 32,768 characters")
        return env

    @field_validator("options")
    @classmethod
    def _options(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if len(json.dumps(options)) > MAX_OPTIONS:
            raise ValueError(f"the options are longer than {MAX_OPTIONS:,} characters")
        return options

    @model_validator(mode="after")
    def _one_of(self) -> JobSpec:
        if (self.script is None) == (not self.command):
            raise ValueError("specify exactly one of script and command")
        if self.args and self.script is None:
            raise ValueError("args can be used only with a script; put a command's arguments in command")
        if self.cells and self.script is None:
            raise ValueError("a fan-out's cells need a script; specify script instead of command")
        both = set(self.env) & set(self.secrets)
        if both:
            raise ValueError(f"{', '.join(sorted(both))} is in both env and secrets; keep it in secrets only")
        places = [(choice.platform, choice.gpu) for choice in self.choices]
        if len(set(places)) != len(places):
            raise ValueError("the alternatives repeat a platform and GPU; list each combination once")
        if len({platform.startswith("rehearsal/") for platform, _ in places}) > 1:
            raise ValueError("alternatives mix simulated and real platforms; use only one kind")
        taken = [path for path in self.outputs if self.artifact_store and StoreAddress.reserved(path)]
        if taken:
            raise ValueError(f"the artifact store reserves the path {taken[0]}; rename that output")
        return self

    @property
    def choices(self) -> tuple[JobSpec, ...]:
        """Return one job for each platform that may run it: its own platform first, then the alternatives in order."""
        places = (text.partition(":") for text in self.alternatives)
        there = (self.at(platform, gpu or self.gpu) for platform, _, gpu in places)
        return (self.at(self.platform, self.gpu), *there)

    def at(self, platform: str, gpu: str | None) -> JobSpec:
        """Return the same job on one platform and GPU, without alternatives."""
        return self.model_copy(update={"platform": platform, "gpu": gpu, "alternatives": ()})

    @property
    def digest(self) -> str:
        """Return the digest of the complete spec."""
        return digest(self)


# ------------------------------------------------------------------------------------------------------- machines


class SelfStop(Frozen):
    """How a machine stops itself: with a local command, or with a request that uses the key in the variable `key`."""

    command: tuple[str, ...] = ()
    method: str = ""
    url: str = ""
    body: dict[str, str] = Field(default_factory=dict)
    key: str = ""


class SelfStopOrder(Frozen):
    """A machine's self-stop order: the runner stops the machine after `after_s` seconds without contact.

    The time is counted from the job's end, or from `deadline_s` after the launch. `by` is the stop method. The
    machine is not stopped while one of the `outputs` is stored in memory; in a rehearsal the list is empty, because all
    files are on the local disk. `clock` is the file of a rehearsal's clock, which can be set forward; a real machine
    uses its own clock.
    """

    after_s: float = Field(gt=0)
    deadline_s: float | None = None
    by: SelfStop
    outputs: tuple[str, ...] = ()
    clock: str = ""

    @property
    def order(self) -> dict[str, object]:
        """Return the self-stop order in the runner's format."""
        request = {"method": self.by.method, "url": self.by.url, "body": self.by.body, "key": self.by.key}
        how = {"command": list(self.by.command)} if self.by.command else {"request": request}
        rest = {"clock": self.clock} if self.clock else {}
        return {"after_s": self.after_s, "deadline_s": self.deadline_s, "outputs": list(self.outputs), **how, **rest}


class Place(Frozen):
    """The target on which a backend runs a job: an address, and the parent folder of run folders.

    `root` is the prefix of every absolute path on the machine: empty on a real machine, the instance's folder in a
    rehearsal. `mounts` maps each volume's path on the machine to the folder that a rehearsal uses for the volume. `env`
    contains the variables that the platform sets for every process. `host_key` is the public key (`type base64`) that
    the machine presented on the first connection and must present on all later ones; None before the first connection.
    `self_stop_command` is the command with which a rehearsal's machine stops itself. `self_stop_order` is the order
    that the job's runner received at the launch.
    """

    platform: str
    instance_id: str | None = None
    root: str = ""
    mounts: dict[str, str] = Field(default_factory=dict)
    run_root: str
    host: str | None = None
    port: int | None = None
    user: str | None = None
    host_key: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    self_stop_command: tuple[str, ...] = Field(
        default=(), validation_alias=AliasChoices("self_stop_command", "self_stop")
    )
    self_stop_order: SelfStopOrder | None = Field(
        default=None, validation_alias=AliasChoices("self_stop_order", "park")
    )

    @model_serializer(mode="wrap")
    def _plain(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        plain: dict[str, object] = handler(self)
        return {k: v for k, v in plain.items() if v or k not in {"self_stop_command", "self_stop_order"}}

    @property
    def mapping(self) -> dict[str, object]:
        """Return the mapping for the machine's absolute paths, in the runner's format."""
        return {"root": self.root, "mounts": self.mounts}


class Supervisor(Frozen):
    """Identity of a job's supervisor process, as reported at the launch. Any other process differs in at least one
    field.

    `machine` changes whenever the machine starts; it is empty if it can't be read.
    """

    pid: int
    start_ticks: str = Field(default="", max_length=100)
    boot_id: str = Field(default="", max_length=100)
    machine: str = Field(default="", max_length=200)


class Handle(Frozen):
    """The data that a backend uses to find a job again. `run_dir` is the real path, including `root`.

    `declared` lists the outputs that were declared after the launch. They are stored in the job's record, not in the
    event with the handle.
    """

    backend: str
    token: str
    run_dir: str
    place: Place
    supervisor: Supervisor | None = None
    declared: tuple[str, ...] = Field(default=(), exclude=True)


class InstanceState(StrEnum):
    """The normalized state of a provider's instance.

    UNCLEAR: the provider lists the instance, but its state can't be determined.
    """

    BOOTING = "booting"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    STOPPING = "stopping"
    STOPPED = "stopped"
    TERMINATING = "terminating"
    GONE = "gone"
    FAILED = "failed"
    UNCLEAR = "unclear"


class Instance(Frozen):
    """A provider's report on one machine. `meter` is true if compute is billed now; None counts as true.

    `cost_usd` is the cost so far on the provider's own bill. `running_since` is the time of the last start, and
    `ends_at` is the time when the platform will automatically stop or end the machine, both in seconds since the epoch.
    Each of these is None if the platform does not report it. `stopped_usd_per_hour` is the price in the current state
    while compute is not billed, such as the price of storage.
    """

    id: str
    token: str = ""
    state: InstanceState
    place: Place | None = None
    meter: bool | None = None
    price_usd_per_hour: float | None = None
    stopped_usd_per_hour: float | None = None
    cost_usd: float | None = None
    created_at: float | None = None
    running_since: float | None = None
    ends_at: float | None = None
    why: str = ""


class Account(Frozen):
    """The account that rented an instance: salted digests of the account's key and, if reported, the account's id.

    The key can't be recovered from its digest. After the key is replaced, only `id` identifies the account.
    """

    salt: str
    key: str
    id: str | None = None


class Resources(WithOptions):
    """A request for an instance.

    `deadline_s` is the longest time for which the machine is needed. Platforms that support deadlines receive it.
    """

    gpu: str | None = None
    gpu_count: int = 1
    disk_gb: int | None = None
    interruptible: bool = False
    durable_storage: bool = False
    max_price_usd_per_hour: float | None = None
    deadline_s: int | None = Field(default=None, ge=1)


class Quote(Frozen):
    """The price of a requested instance. `price_usd_per_hour` is None if the provider did not state a price.

    `storage_usd_per_hour` is the price of storage that outlives the machine, if the provider reports it.
    """

    platform: str
    price_usd_per_hour: float | None
    source: str
    at: float
    note: str = ""
    storage_usd_per_hour: float | None = None


class Capacity(StrEnum):
    """Whether a platform can rent out the requested machine now. NOT_SOLD: the platform does not offer that machine."""

    AVAILABLE = "available"
    UNKNOWN = "unknown"
    NONE = "none"
    NOT_SOLD = "not_sold"


class Choice(Frozen):
    """One of a job's platforms, with its hourly price and worst-case cost at the time of the check."""

    platform: str
    gpu: str | None = None
    price: float | None = None
    worst_cost: float | None = None


class Balance(Frozen):
    """An account's balance in the account's currency.

    `per_hour` is the account's current spending per hour, as reported by the platform.
    """

    amount: float
    currency: str = "USD"
    per_hour: float | None = None


class Heartbeat(Frozen):
    """One heartbeat from a machine; a value that can't be read is None."""

    gpu_util: float | None = None
    gpu_mem_used: int | None = None
    mem_used: int | None = None
    mem_limit: int | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    inodes_free: int | None = None
    inodes_total: int | None = None
    oom_kills: int | None = None
    """Number of out-of-memory kills in the job's control group since the job began."""


class RunnerAlert(Frozen):
    """An alert from the runner. `subject` is the affected item, such as a metric; `step` is the training step."""

    kind: str
    text: str
    subject: str = ""
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Allocation(Frozen):
    """An engine's report on its job: id, state, nodes and usage. Times are seconds since the epoch.

    `id` is the engine's own id, which the engine may reuse for another job later; gpuwarden identifies a job by its
    token. `why` is the engine's reason for keeping a job waiting. `ends_at` is the latest time at which the engine ends
    the job.
    """

    engine: str
    id: str
    state: str
    why: str = ""
    queue: str = ""
    nodes: str = ""
    restarts: int = 0
    ends_at: float | None = None
    used_s: float | None = None
    resources: str = ""


MAX_METRICS: Final = 128
"""Maximum number of metrics in an observation."""


class Observation(Frozen):
    """A job's state and, separately, whether its machine is billed (None counts as billed).

    `reason` is the reason code for the state. `why` is the reason as a sentence; it may quote the job's output.
    `stale` is true if the last heartbeat is too old. `source` is the origin of the step: metrics, output or files.
    `curve` contains the loss at a few steps. `eta_at` is the time at which the last step will be reached at the current
    pace, in seconds since the epoch. `signal` is the signal that ended the job, which then has no exit code. `machine`
    changes with each start of the machine, if the machine reports it. `lost` means that the machine answered but has no
    status for the job. `upload` is the reason why uploads to the job's artifact store currently fail.
    """

    state: Job
    meter: bool | None = None
    why: str = ""
    reason: Code | None = None
    at: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    attempt: int = 1
    step: int | None = None
    total_steps: int | None = None
    eta_at: float | None = None
    source: str = ""
    curve: tuple[tuple[int, float], ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    started_at: float | None = None
    ended_at: float | None = None
    last_beat_at: float | None = None
    alerts: tuple[RunnerAlert, ...] = ()
    log_bytes: int = 0
    stale: bool = False
    beat: Heartbeat | None = None
    machine: str = ""
    lost: bool = False
    upload: str = ""
    allocation: Allocation | None = None
    """The report from the engine that runs the job; None without an engine."""


class StopResult(StrEnum):
    """The outcome of a request to stop a process."""

    STOPPED = "stopped"
    PENDING = "pending"
    GONE = "gone"


class LogChunk(Frozen):
    """A part of a log. `next` is the cursor for the next read; `size` is the log's size at the time of this read."""

    text: str
    next: int
    size: int
    truncated: bool = False
    latin: str = ""
    """The bytes as Latin-1, if they are not the UTF-8 form of `text`."""

    @classmethod
    def of(cls, piece: bytes, start: int, size: int, *, truncated: bool = False) -> LogChunk:
        """Return a chunk with the bytes `piece` at position `start`."""
        text = piece.decode("utf-8", "replace")
        latin = "" if text.encode() == piece else piece.decode("latin-1")
        return cls(text=text, next=start + len(piece), size=size, truncated=truncated, latin=latin)

    @classmethod
    def cut(cls, raw: bytes, cursor: int, limit: int, missing: int = 0) -> LogChunk:
        """Return the part of a log after a byte cursor; a negative cursor counts from the end of the log.

        `raw` lacks the first `missing` bytes of the log, which are skipped.
        """
        size = missing + len(raw)
        start = max(missing, min(cursor, size) if cursor >= 0 else size + cursor)
        piece = raw[start - missing : start - missing + limit]
        return cls.of(piece, start, size, truncated=start + len(piece) < size)

    @property
    def data(self) -> bytes:
        """Return the chunk's bytes."""
        return self.latin.encode("latin-1", "replace") if self.latin else self.text.encode()

    @property
    def start(self) -> int:
        """Return the position of the first byte."""
        return self.next - len(self.data)


# ----------------------------------------------------------------------------------------------------- artifacts


class SealLine(Frozen):
    """A seal-log entry from a machine for the current state of one file. `mac` authenticates the entry's writer."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    sealed_at: float = Field(ge=0, lt=1e12)
    mac: str = Field(default="", max_length=64)
    part_size: int | None = Field(default=None, ge=1)
    parts_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class Artifact(Frozen):
    """One file in a manifest. `path` is relative to the run folder, or absolute on the machine.

    Programs can set `mtime_ns`. `ctime_ns` changes with every change to the file and can't be set by programs.
    """

    path: str
    size: int = Field(ge=0)
    mtime_ns: int = 0
    ctime_ns: int = 0
    sha256: str | None = None
    sealed_at: float | None = None  # when the sealer computed `sha256`; None unless this was right after the save
    seal: SealLine | None = None  # the machine's claim about the digest; any of its processes may have written it
    xxh3_128: str | None = None  # many times faster than sha256; detects damage but not tampering
    crc32: str | None = None  # as fast as xxh3, but needs only the standard library on the machine that saves the file
    part_size: int | None = None  # the size of the parts, for a file that is uploaded in more than one part
    parts_sha256: str | None = None  # the digest of the parts' SHA-256 digests, as listed by a store

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Return a key, computed from metadata, that stays the same until the file changes on its machine."""
        return self.size, self.mtime_ns, self.ctime_ns


class InputFile(Frozen):
    """One job input. `path` is relative to the working directory, both locally and on the machine."""

    path: str
    size: int = Field(ge=0)
    sha256: str


class CommandOutput(Frozen):
    """A command's output on a machine. If the exit code is None, `why` is `missing`, `refused` or `timeout`."""

    exit: int | None = None
    text: str = ""
    why: str = ""


class SpoolPiece(Frozen):
    """Complete lines from a spool file, and the byte offset for the next read."""

    text: str
    next: int = Field(ge=0)


class Manifest(Frozen):
    """The list of a job's output files, made on the machine.

    `missing` lists declared outputs that do not exist. `skipped` has a line for each existing path that can't be copied
    and verified as a file (links that leave their folder, devices, names that are not UTF-8, files that kept changing).
    """

    taken_at: float
    files: tuple[Artifact, ...]
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return the digest over the files' paths, sizes and digests, without their times."""
        return digest([[f.path, f.size, f.sha256] for f in sorted(self.files, key=lambda f: f.path)])

    @property
    def bytes(self) -> int:
        """Return the total size of all files."""
        return sum(f.size for f in self.files)


class Disclosure(Frozen):
    """Undeclared content on a machine: processes that do not belong to a gpuwarden job, and files that no job declared.

    `complete` is false if a limit was reached or an entry could not be read, so the lists may be incomplete.
    """

    processes: tuple[str, ...] = ()
    files: tuple[Artifact, ...] = ()
    complete: bool = True


class Verdict(StrEnum):
    """The result of a verification. UNKNOWN means inconclusive and never counts as a pass."""

    PROVEN = "proven"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


class Level(StrEnum):
    """The depth of a verification. Each level includes the levels before it."""

    STRUCTURE = "structure"
    CONTENT = "content"
    LOAD = "load"
    RESUME = "resume"


class FileEvidence(Frozen):
    """The findings about one file. `proved` and `unproved` list facts in plain words.

    `problems` refute the file, `doubts` make its verdict unknown, and `warnings` do not affect the verdict. `sealed` is
    true if the bytes match a digest that was recorded earlier.
    """

    path: str
    format: str
    verdict: Verdict
    size: int = 0
    proved: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    sealed: bool = False
    causes: tuple[Cause, ...] = ()


class CheckpointEvidence(Frozen):
    """The findings about one checkpoint folder. `resume` lists the obstacles to resuming from this checkpoint.

    `path` is relative to the verified path; it is "." for that path itself.
    """

    path: str
    layout: str
    verdict: Verdict
    step: int | None = None
    proved: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()


class Report(Frozen):
    """The result of a verification: a verdict, the evidence per file, and the omitted checks.

    `problems`, `doubts` and `not_checked` contain entries that are not about one specific file. `step` and `newest` are
    the step and the path of the newest complete checkpoint, or None and "" if none exists. `unread` lists files in an
    unknown format that match a recorded digest. `aside` lists broken images, tables and logs outside of checkpoints
    that match a recorded digest, so they were already broken when they were saved. `readable` is the verdict without
    the files in `unread` and `aside`.
    """

    path: str
    level: Level
    verdict: Verdict
    files: tuple[FileEvidence, ...]
    checkpoints: tuple[CheckpointEvidence, ...] = ()
    proved: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    step: int | None = None
    newest: str = ""
    bytes: int = 0
    unread: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    readable: Verdict = Verdict.UNKNOWN
    causes: tuple[Cause, ...] = ()
    """The reasons why the path, its checkpoints and its files are not proven, most serious first."""
    job: str = ""
    """The id of the job that wrote the outputs; "" if a path was verified."""
    claimed: bool = False
    """Whether the machine checked its own files, in which case no copy was verified."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return all problems and doubts about the verified path, its checkpoints and its files."""
        parts = [("", self.problems + self.doubts)]
        parts += [(f"{c.path}: ", c.problems + c.doubts) for c in self.checkpoints]
        parts += [(f"{f.path}: ", f.problems + f.doubts) for f in self.files]
        return tuple(dict.fromkeys(at + why for at, whys in parts for why in whys))
