"""Convert a job for Slurm: its options, the `sbatch` arguments, and the batch script."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field, field_validator

from gpuwarden.core.engine import EngineRequest, engine_options
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen, JobSpec
from gpuwarden.core.sanitize import line
from gpuwarden.remote.host.node_talk import agent_source
from gpuwarden.remote.ssh.shell_quote import quote

WARNING_S: Final = 120
"""Seconds between the warning and the end of the allocation. Slurm checks every 30 seconds and may warn a minute
early."""
ROOM_S: Final = WARNING_S + 120
"""Seconds by which the allocation exceeds the job's time limit: time to start, to save, and to end before the
warning."""
NO_MODULE: Final = 98
NO_TASK: Final = 97
TASK: Final = "GPUWARDEN_ENGINE_JOB"
REQUEUE: Final = '[ "$(squeue -h -j "$1" -o %T)" = RUNNING ] && exec scontrol requeue "$1"'
"""Requeues a job unless it is already ending, for example because its user ran `scancel`."""
"""The variable that contains the batch job's id in Slurm, which is unique even for an array's last task."""
ANY_GPU: Final = frozenset({"gpu", "any"})

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,99}$")]
_List = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:,\[\]&|()*-]{0,299}$")]


class SlurmOptions(Frozen):
    """Slurm's own options. Every field is optional."""

    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    nodes: int = Field(default=1, ge=1, le=10_000)
    cpus: int | None = Field(default=None, ge=1, le=100_000)
    memory_gb: int | None = Field(default=None, ge=1, le=1_000_000)
    gres: _List | None = None
    constraint: _List | None = None
    exclude: _List | None = None
    reservation: _Word | None = None
    exclusive: bool = False
    walltime_s: int | None = Field(default=None, ge=60, le=60 * 86400)
    modules: tuple[_Word, ...] = Field(default=(), max_length=32)

    @field_validator("modules", mode="before")
    @classmethod
    def _one(cls, modules: object) -> object:
        return (modules,) if isinstance(modules, str) else modules


def read_options(spec: JobSpec) -> SlurmOptions:
    """Return a spec's options. Raises BadRequest if one is invalid; the fix lists the valid options."""
    return engine_options(SlurmOptions, spec.options, "Slurm")


def engine_request(spec: JobSpec) -> EngineRequest:
    """Return the resources to request. If `walltime_s` is unset, the walltime is the job's time limit plus `ROOM_S`."""
    options = read_options(spec)
    walltime = options.walltime_s or (spec.timeout_s + ROOM_S if spec.timeout_s else None)
    kind, count = _gpus(spec, options)
    return EngineRequest(
        queue=options.partition or "",
        account=options.account or "",
        qos=options.qos or "",
        walltime_s=math.ceil(walltime / 60) * 60 if walltime else None,
        nodes=options.nodes,
        cpus=options.cpus,
        memory_mb=options.memory_gb * 1024 if options.memory_gb else None,
        gpu=kind,
        gpus=count,
    )


def _gpus(spec: JobSpec, options: SlurmOptions) -> tuple[str, int]:
    """Return the type and number of the GPUs in one machine; the type "" means any type."""
    if options.gres is not None:
        for part in options.gres.split(","):
            if found := re.fullmatch(r"gpu(?::([A-Za-z_][\w.-]*))?(?::(\d+))?", part):
                return found[1] or "", int(found[2] or 1)
        return "", 0
    if spec.gpu is None:
        return "", 0
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*", spec.gpu, re.ASCII) is None:  # "a100:1,license:x" would request more
        raise BadRequest(f"{line(spec.gpu, 80)} is not a GPU type in Slurm", "Specify a type, such as a100, or `any`.")
    return ("" if spec.gpu.lower() in ANY_GPU else spec.gpu), spec.gpu_count


def arguments(spec: JobSpec) -> list[str]:
    """Return the `sbatch` arguments for the resources and the time limit."""
    options, request = read_options(spec), engine_request(spec)
    gpus = f"gpu:{request.gpu}:{request.gpus}" if request.gpu else f"gpu:{request.gpus}"
    given = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": str(options.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": options.cpus,
        "mem": f"{options.memory_gb}G" if options.memory_gb else None,
        "gres": options.gres or (gpus if request.gpus else None),
        "constraint": options.constraint,
        "exclude": options.exclude,
        "reservation": options.reservation,
        "time": str(request.walltime_s // 60) if request.walltime_s else None,
    }
    flags = ["--exclusive"] if options.exclusive else []
    return [f"--{name}={value}" for name, value in given.items() if value is not None] + flags


def array_request(spec: JobSpec, attempt: int) -> object:
    """Return the values that must be equal for all tasks in an array: request, modules, attempt and restarts."""
    return arguments(spec), read_options(spec).modules, attempt, bool(spec.max_restarts)


def own_arguments(spec: JobSpec, name: str, run_dir: str, *, array: bool = False) -> list[str]:
    """Return the `sbatch` arguments that gpuwarden needs: job name, files, warning signal and restarts."""
    walltime = engine_request(spec).walltime_s
    warning = min(WARNING_S, walltime // 3) if walltime else WARNING_S
    log = run_dir.replace("%", "%%") + ("/engine.%a.log" if array else "/engine.log")
    return [
        f"--job-name={name}",
        f"--comment=gpuwarden {name} {spec.name}",
        f"--chdir={run_dir}",
        f"--output={log}",
        "--open-mode=append",
        f"--signal=B:USR1@{warning}",
        "--requeue" if spec.max_restarts else "--no-requeue",
    ]


def node_files(spec: JobSpec) -> dict[str, bytes]:
    """Return the files that a multi-node job needs in its run folder: the agent that checks each node."""
    return {"node_agent.py": agent_source().encode()} if read_options(spec).nodes > 1 else {}


def batch_script(spec: JobSpec, attempt: int, python: str, runner: str, run_dir: str) -> str:
    """Return the script that Slurm starts, and restarts after an interruption. The runner detects the restart.

    `runner` is the name of the runner's file in the run folder.
    """
    return _script(spec, attempt, python, [f"folder={quote(run_dir)}", f"{TASK}=$SLURM_JOB_ID"], runner)


def array_script(spec: JobSpec, attempt: int, python: str, runner: str, run_dirs: Sequence[str]) -> str:
    """Return the batch script for an array. Each task uses its index to look up its run folder in the script's table.

    The last task's job id is also the array's id, so a task uses an id such as `12_7`.
    """
    table = [f"{index}) folder={quote(run_dir)} ;;" for index, run_dir in enumerate(run_dirs)]
    which = ['case "$SLURM_ARRAY_TASK_ID" in', *table, f"*) exit {NO_TASK} ;;", "esac"]
    return _script(spec, attempt, python, [*which, f"{TASK}=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"], runner)


def _script(spec: JobSpec, attempt: int, python: str, which: Sequence[str], runner: str) -> str:
    # A later attempt is already a restart by gpuwarden: if Slurm also requeued it, the two limits would multiply.
    again = ["sh", "-c", REQUEUE, "sh", "{id}"] if spec.max_restarts and attempt == 1 else None
    request: dict[str, object] = {"attempt": attempt, "restarts": "SLURM_RESTART_COUNT", "id": TASK, "requeue": again}
    request["part"] = "SLURM_ARRAY_TASK_ID"
    given = read_options(spec)
    if given.nodes > 1:
        each = [f"--nodes={given.nodes}", f"--ntasks={given.nodes}", "--ntasks-per-node=1"]
        request |= {"nodes": ["srun", *each, "--overlap", "--kill-on-bad-exit=0"], "count": given.nodes}
    modules = given.modules
    load = [f"module load {quote(module)} || exit {NO_MODULE}" for module in modules]
    return "\n".join(
        [
            "#!/bin/sh",
            "# Started by Slurm for gpuwarden, and again after an interruption.",
            *([". /etc/profile", *load] if load else []),
            *which,
            f"export {TASK}",
            f"python={quote(python)}",
            '[ -x "$python" ] || python=python3',
            f'exec "$python" -I -S "$folder"/{runner} allot "$folder" <<\'END_OF_REQUEST\'',
            json.dumps(request),
            "END_OF_REQUEST",
            "",
        ]
    )
