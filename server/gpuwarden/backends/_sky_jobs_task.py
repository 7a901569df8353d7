"""Build the task for a SkyPilot managed job: its name, and a command that contains gpuwarden's runner.

gpuwarden can't connect to a managed job's machines. Therefore the command contains the runner, the archive that
seals checkpoints, and the job's script, and unpacks all of them on each machine that the controller rents.
"""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
from collections.abc import Mapping
from typing import Any, Final

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import JobSpec, Place, Resources
from gpuwarden.core.store_address import StoreAddress
from gpuwarden.remote import launch
from gpuwarden.remote.host.interpreter import uv_run
from gpuwarden.remote.runner.store_clients import CLIENTS
from gpuwarden.remote.sky.rows import task
from gpuwarden.static_analysis.script import start_header

MAX_FILES: Final = 640 << 10
"""Maximum size in bytes of the packed files, most of which belong to gpuwarden. SkyPilot stores the command with every
job.
"""
ATTEMPT: Final = re.compile(r"(gw-.+)-a([1-9]\d{0,3})")
FOLDER: Final = "/GPUWARDEN_RUN_FOLDER"
"""A placeholder for the run folder, replaced on the machine because its home folder is not known in advance."""
RUN_ID: Final = "SKYPILOT_INTERNAL_JOB_ID"
"""The environment variable that the runner uses to distinguish repeated starts of a job on the same machine."""
_RUN = """\
set -eu
export PATH="$HOME/.local/bin:$PATH"
umask 077
folder="$HOME/gpuwarden/{stem}"
mkdir -p "$folder"
base64 -d <<'END_OF_FILES' | tar -xzf - -C "$folder"
{files}END_OF_FILES
sed -i "s|{folder}|$folder|g" "$folder/order.{attempt}.json"
{check}exec python3 -I -S "$folder/{runner}" allot "$folder" <<'END_OF_REQUEST'
{request}
END_OF_REQUEST
"""
_CLIENT = """\
command -v uv > /dev/null || python3 -c 'import {module}' || {{
  echo 'nothing can upload to the artifact store: this machine has neither uv nor {module}; nothing was started'
  exit 69
}}
"""


def stem_of(place: Place, token: str) -> str:
    """Return the name prefix that a token's attempts share, taken from the reservation's id if there is one."""
    lease = place.instance_id or ""
    return launch.run_name(lease if lease.startswith(f"{token}-") else token)


def named(name: str) -> tuple[str, int]:
    """Return the stem and the attempt in a managed job's name; the stem is empty if the job is not gpuwarden's."""
    found = ATTEMPT.fullmatch(name)
    return (found[1], int(found[2])) if found else ("", 0)


def machine(spec: JobSpec, place: Place) -> dict[str, Any]:
    """Return the task's resources section, which prevents SkyPilot from restarting a job whose command fails."""
    asked = Resources(
        gpu=spec.gpu,
        gpu_count=spec.gpu_count,
        disk_gb=spec.disk_gb,
        interruptible=spec.interruptible,
        options=spec.options,
    )
    return task(place.platform.partition("/")[2].lower(), asked)


def command(spec: JobSpec, place: Place, token: str, attempt: int) -> str:
    """Return the shell script that unpacks the runner and the job's files and starts the runner.

    Raises BadRequest if the job's script is too long to include.
    """
    stem = stem_of(place, token)
    interpreter = ("uv", *uv_run(spec.script)) if spec.script and start_header(spec.script) else ("python3",)
    ready = launch.prepare(spec, place, FOLDER, interpreter)
    # SkyPilot runs the same script again on another machine, where no record of the upload exists.
    order = {"spec": {**ready.spec, "recovers": True}, "token": token, "attempt": attempt}
    packed = _packed({**ready.files, f"order.{attempt}.json": json.dumps(order).encode()})
    if len(packed) > MAX_FILES:
        raise BadRequest(
            f"the script is too long for a managed job: {len(packed):,} bytes packed, more than {MAX_FILES:,}",
            "Upload the script to a repo or another URL, and run it from there with `uv run`.",
        )
    store = StoreAddress.parse(spec.artifact_store) if spec.artifact_store else None
    return _RUN.format(
        stem=stem,
        folder=FOLDER,
        attempt=attempt,
        files=base64.encodebytes(packed).decode("ascii"),
        check=_CLIENT.format(module=CLIENTS[store.scheme]) if store else "",
        runner=ready.runner,
        request=json.dumps({"attempt": attempt, "id": RUN_ID, "echo": True, "outlast": True}),
    )


def _packed(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()
