"""The bodies of job requests, and the available hardware flavors."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from gpuwarden.rehearsal.hub.strict import StrictBody

# name: (display name, dollars per hour, GPUs, gigabytes of memory per GPU), from the Hub's list as of August 2026.
FLAVORS: Final[dict[str, tuple[str, float, int, int]]] = {
    "cpu-basic": ("CPU basic", 0.01, 0, 0),
    "cpu-upgrade": ("CPU upgrade", 0.03, 0, 0),
    "t4-small": ("Nvidia T4", 0.40, 1, 16),
    "t4-medium": ("Nvidia T4", 0.60, 1, 16),
    "l4x1": ("Nvidia L4", 0.80, 1, 24),
    "l40sx1": ("Nvidia L40S", 1.80, 1, 48),
    "a10g-small": ("Nvidia A10G", 1.00, 1, 24),
    "a10g-large": ("Nvidia A10G", 1.50, 1, 24),
    "a100-large": ("Nvidia A100", 2.50, 1, 80),
    "a100x4": ("Nvidia A100", 10.00, 4, 80),
    "h200": ("Nvidia H200", 5.00, 1, 141),
    "rtx-pro-6000": ("Nvidia RTX PRO 6000", 2.75, 1, 96),
}
SCHEDULE: Final = (
    r"^(?:(@(annually|yearly|monthly|weekly|daily|hourly))|((((\d+,)+\d+|((\*|\d+)(\/|-)\d+)|\d+|\*) ?){5,7}))$"
)
_LABEL: Final = r"^[a-zA-Z0-9._-]*$"

Port = Annotated[int, Field(ge=1, le=65535)]
Label = Annotated[str, Field(max_length=100, pattern=_LABEL)]


class Volume(StrictBody):
    """A repo or bucket to mount. Only a bucket can be mounted for writing."""

    type: Literal["bucket", "model", "dataset", "space"]
    source: str = Field(pattern=r"^[^/]+/[^/]+$")
    mountPath: str = Field(pattern=r"^/.*")  # noqa: N815
    revision: str | None = None
    readOnly: bool | None = None  # noqa: N815
    path: str | None = None

    @property
    def writable(self) -> bool:
        """Return whether the job may write to the mount."""
        return self.type == "bucket" and not self.readOnly


class Expose(StrictBody):
    """The job ports that are reachable from outside."""

    ports: list[Port] = Field(max_length=20)
    portsPublic: list[Port] = Field(default=[], max_length=20)  # noqa: N815

    @model_validator(mode="after")
    def _subset(self) -> Expose:
        if not set(self.portsPublic) <= set(self.ports):
            raise ValueError("portsPublic must be a subset of ports")
        return self


class Ssh(StrictBody):
    """A job's SSH options."""

    enabled: bool = False


class Network(StrictBody):
    """A group of jobs that can connect to each other.

    Client version 2.4 sends this field, although it is missing from the API description of August 2026.
    """

    group: str
    aliases: list[str] = []


class JobBody(StrictBody):
    """The description of a new job."""

    flavor: Literal[tuple(FLAVORS)]  # type: ignore[valid-type]
    dockerImage: str | None = None  # noqa: N815
    spaceId: str | None = None  # noqa: N815
    command: list[Annotated[str, Field(min_length=1)]] = []
    arguments: list[str] = []
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}
    arch: Literal["amd64", "arm64"] | None = None
    timeoutSeconds: int | None = Field(default=None, ge=1, le=2**53 - 1)  # noqa: N815
    attempts: int = Field(default=1, ge=1)
    labels: dict[Label, Label] = {}
    volumes: list[Volume] = []
    expose: Expose | None = None
    ssh: Ssh = Ssh()
    network: Network | None = None
    resourceGroupId: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{24}$")  # noqa: N815

    @field_validator("volumes")
    @classmethod
    def _distinct(cls, volumes: list[Volume]) -> list[Volume]:
        paths = [v.mountPath.rstrip("/") for v in volumes]
        if "" in paths or any(".." in p.split("/") for p in paths) or len(set(paths)) < len(paths):
            raise ValueError("mount paths must be distinct folders under the root")
        return volumes

    @model_validator(mode="after")
    def _image(self) -> JobBody:
        if (self.dockerImage is None) == (self.spaceId is None):
            raise ValueError("exactly one of dockerImage and spaceId is required")
        if not self.command and not self.arguments and self.spaceId is None:
            raise ValueError("a command is required")
        return self


class LabelsBody(StrictBody):
    """The new labels for a job or a scheduled job."""

    labels: dict[Label, Label]


class ScheduledBody(StrictBody):
    """A new scheduled job: the job and its schedule."""

    jobSpec: JobBody  # noqa: N815
    schedule: str = Field(pattern=SCHEDULE)
    suspend: bool = False
    concurrency: bool = False


class ScheduleBody(StrictBody):
    """The new schedule for a scheduled job."""

    schedule: str = Field(pattern=SCHEDULE)
