"""Convert a job for dstack: its options, and the run specification."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Final

from pydantic import Field, field_validator

from gpuwarden.backends._dstack_api import ATTEMPT, JOB, LEASE
from gpuwarden.core.engine import Image, engine_options
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen, JobSpec, Place, Resources
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.shell_quote import quote

MOST_PRICE: Final = "max-price"
"""The key in `Place.env` for the price that was checked. A run does not accept offers above this price."""
LEAST_WINDOW_S: Final = 300
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$")]
_Words = Annotated[tuple[_Word, ...], Field(max_length=32)]


class DstackOptions(Frozen):
    """dstack's own options. Every field is optional."""

    image: Image | None = None
    python: str | None = Field(default=None, pattern=r"^3\.\d{1,2}$")
    backends: _Words = ()
    regions: _Words = ()
    instance_types: _Words = ()
    fleets: _Words = ()
    wait_s: int | None = Field(default=None, ge=1, le=7 * 86400)
    idle_s: int = Field(default=0, ge=0, le=86400)
    min_gpu_percent: int | None = Field(default=None, ge=1, le=100)
    idle_window_s: int = Field(default=1800, ge=LEAST_WINDOW_S, le=3600)

    @field_validator("backends", "regions", "instance_types", "fleets", mode="before")
    @classmethod
    def _one(cls, words: object) -> object:
        return (words,) if isinstance(words, str) else words


def read_options(options: object) -> DstackOptions:
    """Return a job's options. Raises BadRequest if one is invalid; the fix lists the valid options."""
    if isinstance(options, dict) and "region" in options:  # the name of this option on other platforms
        options = {"regions": options["region"], **{k: v for k, v in options.items() if k != "region"}}
    return engine_options(DstackOptions, options, "dstack")


def run_name(token: str) -> str:
    """Return the name of a token's run. dstack allows at most 41 lowercase letters, digits and dashes."""
    if re.fullmatch(r"[a-z0-9-]{1,36}", token):
        return f"gw-{token}"
    return f"gw-{hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()[:36]}"


def project_of(platform: str) -> str:
    """Return the project in a platform's name. Raises BadRequest for a name that dstack does not allow."""
    project = platform.partition("/")[2]
    if re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,49}", project) is None:
        raise BadRequest(f"{line(platform, 80)} does not name a valid dstack project", "Specify dstack/PROJECT.")
    return project


def machine_of(asked: Resources, name: str) -> dict[str, Any]:
    """Return the part of a run's specification that determines its machine and price."""
    options = read_options(asked.options)
    gpu = {"name": [asked.gpu], "count": asked.gpu_count} if asked.gpu else {"count": 0}
    configuration: dict[str, Any] = {
        "type": "task",
        "name": name,
        "commands": ["true"],
        "resources": {"gpu": gpu} | ({"disk": {"size": f"{asked.disk_gb}GB.."}} if asked.disk_gb else {}),
        "spot_policy": "spot" if asked.interruptible else "on-demand",
        "creation_policy": "reuse-or-create",
        "idle_duration": options.idle_s,
    }
    for field in ("backends", "regions", "instance_types", "fleets"):
        configuration |= {field: list(getattr(options, field))} if getattr(options, field) else {}
    configuration |= {"max_price": asked.max_price_usd_per_hour} if asked.max_price_usd_per_hour else {}
    configuration |= {"image": options.image} if options.image else {"python": options.python or "3.12"}
    return {"run_name": name, "configuration": configuration}


def run_spec(spec: JobSpec, argv: list[str], place: Place, token: str, attempt: int) -> dict[str, Any]:
    """Return the specification of a run.

    Secret values are not sent: the run refers to the project's secrets by name, and the server inserts the values.
    """
    options, name = read_options(spec.options), run_name(token)
    price = place.env.get(MOST_PRICE)
    asked = Resources(
        gpu=spec.gpu,
        gpu_count=spec.gpu_count,
        disk_gb=spec.disk_gb,
        interruptible=spec.interruptible,
        max_price_usd_per_hour=float(price) if price else None,
        options=spec.options,
    )
    given = spec.env | {"GPUWARDEN_JOB": token, "GPUWARDEN_ATTEMPT": str(attempt)}
    env = {key: value.replace("$", "$$") for key, value in given.items()}  # escaped for dstack's interpolation
    whole = machine_of(asked, name)
    # dstack would interpolate ${{ ... }} in a command, so `${{` is split into two strings, which the shell joins.
    words = " ".join(quote(word).replace("${{", "$''{{") for word in argv)
    whole["configuration"] |= {
        "commands": [f"exec {words}"],
        "env": env | {secret: f"${{{{ secrets.{secret} }}}}" for secret in spec.secrets},
        "tags": {JOB: name, ATTEMPT: str(attempt)} | ({LEASE: place.instance_id} if place.instance_id else {}),
        "retry": {"on_events": ["no-capacity"], "duration": options.wait_s} if options.wait_s else False,
    }
    whole["configuration"] |= {"max_duration": spec.timeout_s} if spec.timeout_s else {}
    if options.min_gpu_percent is not None:
        policy = {"min_gpu_utilization": options.min_gpu_percent, "time_window": options.idle_window_s}
        whole["configuration"] |= {"utilization_policy": policy}
    return whole
