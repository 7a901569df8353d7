"""Start a rehearsal in the sandbox for local jobs, with time and memory limits, and read its outcome."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from gpuwarden.core.errors import BadRequest, NoSandbox
from gpuwarden.core.models import MAX_INPUT_BYTES
from gpuwarden.core.sanitize import line
from gpuwarden.remote.first_step import child, keeper
from gpuwarden.remote.first_step.outcome import Outcome, stopped
from gpuwarden.remote.first_step.pruning import RUN, prune_runs, remove
from gpuwarden.remote.sandbox import boxes
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.start import start
from gpuwarden.remote.sandbox.words import Kind, sandbox_arguments
from gpuwarden.remote.transfer.safe_open import open_regular

_PACKAGE: Final = "gpuwarden/remote/first_step/child"
_REPORT: Final = 1 << 20
_LOG: Final = 8_000
_LOOK_S: Final = 0.2
_MEMORY: Final = Path("/proc/meminfo")
_LOAD: Final = Path("/proc/loadavg")
_END_S: Final = 5.0
_GRACE_S: Final = 15.0
"""A process is killed this many seconds after its deadline."""
_CODE: Final = "import sys; sys.path.insert(0, sys.argv[1]); from gpuwarden.remote.first_step.child.main import main; main(sys.argv[2])"  # noqa: E501
_SET: Final = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "TRANSFORMERS_VERBOSITY": "error",
}
_CACHES: Final = {
    "HF_HOME": "", "HF_HUB_CACHE": "/hub", "HUGGINGFACE_HUB_CACHE": "/hub", "TRANSFORMERS_CACHE": "/hub",
    "HF_DATASETS_CACHE": "/datasets",
}  # fmt: skip
"""Variables that set cache folders on the job's machine, and the subfolders of the sandbox's cache to use instead."""
PRETEND: Final = "hf_pretend"
"""The value that each declared secret has in a rehearsal."""


@dataclass(frozen=True)
class Limits:
    """Limits for one rehearsal: wall-clock and CPU time in seconds; memory, file size and disk usage in bytes.

    `spare` is the number of bytes that must stay free both in memory and on disk. `tasks` is the maximum increase in
    the number of processes and threads on this machine.
    """

    seconds: float = 150.0
    cpu_s: int = 300
    memory: int = 12 << 30
    file_bytes: int = 4 << 30
    disk: int = 16 << 30
    spare: int = 1 << 30
    tasks: int = 2000


@dataclass(frozen=True)
class Order:
    """The script to rehearse, and the files downloaded for it from the Hub.

    `models` contains the small files of each model's repo; `datasets` contains configs, splits, features and rows.
    `inputs` contains the job's input files; `digests` contains their digests at the time of approval. If
    `own_environment` is true, the interpreter meets the requirements in the script's header.
    """

    script: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    models: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    own_environment: bool = False


def rehearse(order: Order, python: str, hidden: tuple[str, ...] = (), limits: Limits | None = None) -> Outcome:
    """Rehearse a script with the interpreter `python`, and return the outcome.

    Raises NoSandbox if no sandbox works on this machine, and BadRequest if an input has changed or is missing.
    """
    found = detect()
    if found.kind is Kind.NONE:
        raise NoSandbox(f"no sandbox works on this machine ({found.why}), so scripts can't be rehearsed on it")
    limits = limits or Limits()
    prune_runs(time.time())
    made = tempfile.mkdtemp(prefix=RUN)
    try:
        run_dir = f"{os.path.realpath(made)}/run"  # the sandbox does not trust programs next to a run folder
        os.mkdir(run_dir, 0o700)
        env = {**_SET, "HOME": str(Path.home())}
        box = boxes.box_for(run_dir, env, boxes.Allowed(caches=False, hidden=hidden), [python])
        read = list(box.read)
        if os.path.realpath(python) == os.path.realpath(sys.executable):  # its packages may be outside its environment
            packages = [p for p in sys.path if p.endswith(("site-packages", "dist-packages")) and os.path.isdir(p)]
            read += map(os.path.realpath, packages)
        box = replace(box, read=tuple(dict.fromkeys(read)), devices=())
        boxes.prepare(box)
        env |= {**dict.fromkeys(order.secrets, PRETEND), "HF_HOME": "", **order.env, **boxes.environment(found, box)}
        cache = f"{env['HOME']}/.cache/huggingface"
        env |= {name: cache + below for name, below in _CACHES.items() if name in env}
        _lay_out(order, box, cache, limits)
        init, content = boxes.init_source()
        Path(run_dir, init).write_bytes(content)
        prefix = sandbox_arguments(found, box, boxes.system(), f"{run_dir}/{init}")
        if found.kind is Kind.BUBBLEWRAP:  # unlike a job, a rehearsal must end with this process
            prefix.insert(1, "--die-with-parent")
        elif found.kind is Kind.LANDLOCK:
            prefix = [sys.executable, "-I", "-S", keeper.__file__, *prefix]
        command = [python, "-I", "-B", "-c", _CODE, f"{run_dir}/code", f"{run_dir}/order.json"]
        with tempfile.TemporaryFile() as output:
            ended = _run(prefix, command, env, output, limits, run_dir)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LOG))
            log = output.read().decode("utf-8", "replace")
        return _outcome(Path(box.own_home), log, ended)
    finally:
        remove(made)


def _lay_out(order: Order, box: Any, hub_home: str, limits: Limits) -> None:
    """Copy the program, the script, its inputs and the Hub files into the sandbox's folders."""
    run_dir, home = Path(box.run_dir), Path(box.own_home)
    code = run_dir / "code" / _PACKAGE
    shutil.copytree(Path(child.__file__).parent, code, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (code.parent, *list(code.parent.parents)[:2]):
        (folder / "__init__.py").touch()
    script = run_dir / "script.py"
    script.write_text(order.script, encoding="utf-8")
    for name, source in order.inputs.items():
        target = Path(box.work, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        seen, left = hashlib.sha256(), MAX_INPUT_BYTES
        with open_regular(source.resolve()) as given, target.open("wb") as copy:
            while left > 0 and (block := given.read(1 << 20)):
                copy.write(block)
                seen.update(block)
                left -= len(block)
        if name in order.digests and seen.hexdigest() != order.digests[name]:
            raise BadRequest(
                f"the input {line(name)} has changed since it was listed",
                "Rehearse again once the file stops changing.",
            )
    cache = home / ".cache/huggingface/hub"
    for name, files in order.models.items():
        repo = cache / f"models--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs/main").write_text("rehearsal")
        for path, content in files.items():
            file = repo / "snapshots/rehearsal" / path
            # A mirror may list both `a` and `a/b`, but only one of them can be created.
            with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
    request = {
        "script": str(script),
        "args": list(order.args),
        "work": box.work,
        "hub_cache": f"{hub_home}/hub",
        "outcome": f"{os.path.dirname(os.path.dirname(hub_home))}/outcome.json",
        "models": {name: sorted(files) for name, files in order.models.items()},
        "datasets": dict(order.datasets),
        "own_environment": order.own_environment,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "cpu_s": limits.cpu_s,
        "file_bytes": limits.file_bytes,
    }
    (run_dir / "order.json").write_text(json.dumps(request), encoding="utf-8")


def _run(
    prefix: list[str], command: list[str], env: Mapping[str, str], output: Any, limits: Limits, folder: str
) -> str:
    """Run a command in the sandbox. Return the reason why it was killed, or an empty string if it exited on its own.

    The resource limits of the processes do not cover the number of processes, shared memory, or the memory used by
    `/tmp`, so this function monitors the machine.
    """
    until, free, tasks = time.monotonic() + limits.seconds + _GRACE_S, shutil.disk_usage(folder).free, _tasks()
    why = ""
    with start(prefix, command, env, stdout=output, stderr=subprocess.STDOUT) as process:
        while not why:
            try:
                process.wait(_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                left = shutil.disk_usage(folder).free
                about = _MEMORY.read_text(encoding="ascii") if _MEMORY.exists() else ""
                available = re.search(r"(?m)^MemAvailable: +(\d+) kB", about)
                if time.monotonic() > until:
                    why = f"the script took longer than {limits.seconds:.0f} s"
                elif free - left > limits.disk or left < limits.spare:
                    why = "the script filled the disk"
                elif available and int(available[1]) << 10 < limits.spare:
                    why = "the script needs more memory than this machine has"
                elif _tasks() - tasks > limits.tasks:
                    why = "the script started too many processes"
        process.terminate()  # a terminated keeper also kills its command
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with suppress(ProcessLookupError, PermissionError):  # not every sandbox kills the script's other processes
            os.killpg(process.pid, signal.SIGKILL)
    return why


def _tasks() -> int:
    """Return the number of processes and threads on this machine; 0 if unknown."""
    return int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[2]) if _LOAD.exists() else 0


def _outcome(home: Path, log: str, late: str) -> Outcome:
    """Return the outcome in the child's report; `stopped` if the report is invalid, missing or over `_REPORT` bytes."""
    try:
        fd = os.open(home / "outcome.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("not a file")
            report = json.loads(file.read(_REPORT))
        return Outcome.model_validate({**report, "log": log})
    except (OSError, ValueError, TypeError, RecursionError, ValidationError):
        return stopped(late or "the script's process ended without a report", log)
