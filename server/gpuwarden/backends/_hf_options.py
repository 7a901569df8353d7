"""The options of Hugging Face Jobs, and the buckets that outlive a job's container."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import Field, field_validator, model_validator

from gpuwarden.core.engine import engine_options
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen, JobSpec
from gpuwarden.core.sanitize import line

BUCKETS: Final = "/hub/buckets"
MOST_ATTEMPTS: Final = 10
OURS: Final = "gpuwarden-"
_VOLUME = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces|buckets)/)?(?P<source>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<path>[^:@]+))?:(?P<mount>/[^:]+)(?::(?P<mode>ro|rw))?"
)
_BUCKET_OUTPUT = re.compile(rf"{BUCKETS}/([\w.-]+/[\w.-]+)(?:/.+)?")
_Label = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9._-]*$")]


class Volume(Frozen):
    """A repo or bucket that is mounted into a job. Only a bucket can be written to."""

    type: str
    source: str
    mount: str
    path: str = ""
    revision: str | None = None
    writable: bool = False

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Parse a volume in the notation of the `hf` command line: `hf://buckets/me/ck/run1:/ckpt`."""
        found = _VOLUME.fullmatch(text)
        mount = found["mount"].rstrip("/") if found else ""
        if found is None or not mount or ".." in f"{mount}/{found['path'] or ''}".split("/"):
            raise ValueError(f"{line(text, 100)!r} is not a volume, such as hf://buckets/OWNER/NAME:/ckpt")
        kind = (found["kind"] or "models").removesuffix("s")
        if found["mode"] == "rw" and kind != "bucket":
            raise ValueError(f"{line(text, 100)!r} can't be written to; only buckets can")
        return cls(
            type=kind,
            source=found["source"],
            mount=mount,
            path=(found["path"] or "").strip("/"),
            revision=found["revision"],
            writable=kind == "bucket" and found["mode"] != "ro",
        )

    @property
    def body(self) -> dict[str, Any]:
        """Return the volume in the Hub API's format."""
        body: dict[str, Any] = {"type": self.type, "source": self.source, "mountPath": self.mount}
        body |= {"readOnly": not self.writable}
        body |= {"path": self.path} if self.path else {}
        return body | ({"revision": self.revision} if self.revision else {})


class HfJobsOptions(Frozen):
    """The options of Hugging Face Jobs. Every field is optional."""

    image: str | None = Field(default=None, max_length=300)
    space: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    namespace: str | None = Field(default=None, pattern=r"^[\w.-]{1,96}$")
    attempts: int = Field(default=1, ge=1, le=MOST_ATTEMPTS)
    volumes: tuple[str, ...] = Field(default=(), max_length=16)
    ssh: bool = False
    labels: dict[_Label, _Label] = Field(default={}, max_length=16)
    schedule: str | None = None

    @field_validator("schedule")
    @classmethod
    def _never(cls, schedule: str | None) -> str | None:
        if schedule is not None:
            raise ValueError(
                "gpuwarden creates no schedules, because the jobs that they start would not be checked individually;"
                " the user can create one with `hf jobs scheduled run`, and gpuwarden then lists it as billed"
            )
        return schedule

    @field_validator("labels")
    @classmethod
    def _theirs(cls, labels: dict[str, str]) -> dict[str, str]:
        if taken := sorted(k for k in labels if k == "name" or k.startswith(OURS)):
            raise ValueError(f"{', '.join(taken)}: reserved for gpuwarden")
        return labels

    @field_validator("volumes", mode="before")
    @classmethod
    def _one(cls, volumes: object) -> object:
        return (volumes,) if isinstance(volumes, str) else volumes

    @field_validator("volumes")
    @classmethod
    def _apart(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        mounts = sorted(f"{Volume.parse(text).mount}/" for text in texts)
        for one, other in pairwise(mounts):
            if other.startswith(one):
                raise ValueError(f"{other} is mounted inside {one}; volumes can't be nested")
        return texts

    @model_validator(mode="after")
    def _one_image(self) -> HfJobsOptions:
        if self.image and self.space:
            raise ValueError("specify image or space, not both")
        return self


def read_options(spec: JobSpec) -> HfJobsOptions:
    """Return a spec's options. Raises BadRequest if one is invalid; the fix lists the valid options."""
    return engine_options(HfJobsOptions, spec.options, "Hugging Face Jobs")


def settle(spec: JobSpec) -> JobSpec:
    """Return the spec, with outputs on a mounted bucket replaced by bucket paths, because only the bucket outlives the
    job.

    Raises BadRequest for invalid options, and for an output with an incomplete bucket name.
    """
    mounted = [v for text in read_options(spec).volumes if (v := Volume.parse(text)).writable]
    outputs = []
    for output in spec.outputs:
        if output.startswith(f"{BUCKETS}/") and not _BUCKET_OUTPUT.fullmatch(output):
            raise BadRequest(
                f"the output {line(output, 100)} has an incomplete bucket name", f"Specify {BUCKETS}/OWNER/NAME/FOLDER."
            )
        home = next((v for v in mounted if f"{output}/".startswith(f"{v.mount}/")), None)
        if home is not None:
            inner = "/".join(part for part in (home.path, output.removeprefix(home.mount).strip("/")) if part)
            output = f"{BUCKETS}/{home.source}" + (f"/{inner}" if inner else "")
        outputs.append(output)
    return spec.model_copy(update={"outputs": tuple(dict.fromkeys(outputs))})


def volumes_of(spec: JobSpec) -> list[Volume]:
    """Return the volumes to mount: those requested, and the buckets for outputs that are not on a requested volume."""
    volumes = [Volume.parse(text) for text in read_options(spec).volumes]
    for output in spec.outputs:
        if (found := _BUCKET_OUTPUT.fullmatch(output)) is None:
            continue
        bucket, inner = found[1], output.removeprefix(f"{BUCKETS}/{found[1]}").strip("/")
        covered = any(
            v.writable and v.source == bucket and f"{inner}/".startswith(f"{v.path}/" if v.path else "")
            for v in volumes
        )
        if not covered:
            volumes.append(Volume(type="bucket", source=bucket, mount=f"{BUCKETS}/{bucket}", writable=True))
    return volumes
