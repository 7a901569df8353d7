"""Convert a job for Ray: its options, its entrypoint, and the runtime environment that the script's header defines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from gpuwarden.backends._ray_api import ATTEMPT, FOLDER, MARK, RESERVES, submission_id
from gpuwarden.core.engine import EngineRequest, engine_options
from gpuwarden.core.models import Frozen, JobSpec
from gpuwarden.remote.ssh.shell_quote import quote
from gpuwarden.static_analysis.script import read_header

STOP_WAIT_S: Final = 3_700
"""Seconds that Ray waits after SIGTERM.

The runner's grace period is at most an hour, so the runner kills the command earlier.
"""
NO_FOLDER: Final = 97
PYTHON: Final = "python3"
"""The interpreter on a node: from the runtime environment if one is used, otherwise from Ray's own PATH."""
_ANY_GPU: Final = frozenset({"gpu", "any"})

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]


class RayOptions(Frozen):
    """Ray's own options for the entrypoint. Every field is optional."""

    cpus: float | None = Field(default=None, gt=0, le=100_000)
    memory_gb: int | None = Field(default=None, ge=1, le=1_000_000)
    resources: dict[_Name, Annotated[float, Field(gt=0, le=1_000_000)]] = Field(default_factory=dict, max_length=32)


def read_options(spec: JobSpec) -> RayOptions:
    """Return a spec's options. Raises BadRequest if one is invalid; the fix lists the valid options."""
    return engine_options(RayOptions, spec.options, "Ray")


def engine_request(spec: JobSpec) -> EngineRequest:
    """Return the resources that a job requests from Ray."""
    options = read_options(spec)
    return EngineRequest(
        cpus=int(-(-options.cpus // 1)) if options.cpus else None,
        memory_mb=options.memory_gb * 1024 if options.memory_gb else None,
        gpu="" if spec.gpu is None or spec.gpu.lower() in _ANY_GPU else spec.gpu,
        gpus=spec.gpu_count if spec.gpu is not None else 0,
    )


def runtime_env(spec: JobSpec) -> dict[str, Any]:
    """Return the runtime environment with the header's dependencies.

    It contains no secrets, because Ray displays it.
    """
    header = read_header(spec.script) if spec.script is not None else None
    packages = list(header.dependencies) if header else []
    pip = {"pip": {"packages": packages, "pip_check": False}} if packages else {}
    return {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}, **pip}


def request(spec: JobSpec, stem: str, attempt: int, run_dir: str, runner: str) -> dict[str, Any]:
    """Return the body of the request that submits an attempt."""
    options, asked = read_options(spec), engine_request(spec)
    resources = dict(options.resources)
    if asked.gpu:
        resources[f"accelerator_type:{asked.gpu.upper()}"] = 0.001  # Ray uses this resource to choose nodes by GPU type
    given: Mapping[str, Any] = {
        "entrypoint_num_cpus": options.cpus,
        "entrypoint_num_gpus": asked.gpus or None,
        "entrypoint_memory": options.memory_gb * 2**30 if options.memory_gb else None,
        "entrypoint_resources": resources or None,
    }
    reserves = {RESERVES: "yes"} if any(given.values()) else {}
    return {
        "submission_id": submission_id(stem, attempt, run_dir),
        "entrypoint": entrypoint(attempt, run_dir, runner),
        "runtime_env": runtime_env(spec),
        "metadata": {MARK: stem, FOLDER: run_dir, ATTEMPT: str(attempt), "name": spec.name, **reserves},
        **{name: value for name, value in given.items() if value is not None},
    }


def secrets_name(attempt: int | None) -> str:
    """Return the name of the file with an attempt's secrets, or a pattern that matches the files of all attempts."""
    return f"secrets.{attempt or '*'}.json"


def entrypoint(attempt: int, run_dir: str, runner: str) -> str:
    """Return the shell script that Ray runs. It contains paths but no secrets, because the dashboard displays it."""
    secrets = quote(f"{run_dir}/{secrets_name(attempt)}")
    missing = f"the run folder {run_dir} is not on this node, or does not belong to this user"
    return "\n".join(
        [
            f"[ -r {quote(runner)} ] || {{ echo {quote(missing)} >&2; exit {NO_FOLDER}; }}",
            f'GPUWARDEN_ORDER="$(cat {secrets} 2>/dev/null)"; export GPUWARDEN_ORDER; rm -f {secrets}',
            f"exec {PYTHON} -I -S {quote(runner)} allot {quote(run_dir)} <<'END_OF_REQUEST'",
            json.dumps({"attempt": attempt, "guard": True}),
            "END_OF_REQUEST",
            "",
        ]
    )
