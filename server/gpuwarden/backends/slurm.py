"""Run jobs as Slurm batch jobs, on a cluster that is reached over SSH or whose login node is this machine.

The run folder is on a file system that the login node and the compute nodes share. The batch script starts the runner,
which works in an allocation as on any other machine. The job's files are read on the login node. A job's state comes
from Slurm's queue, which is listed once for all jobs, or from accounting if the job has left the queue. A command's
process id can't be checked from another node, so the command's state is read from the runner's status, and Slurm
determines whether the job can still run.

A job's name in Slurm contains the token and the attempt. Jobs are found by that name, never by Slurm's number. The
tasks of a job array share one name, so each task's run folder names the array, and the array's folder contains the list
of its tasks.
"""

from __future__ import annotations

import json
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import anyio

from gpuwarden.backends import _slurm_options as options
from gpuwarden.backends._engine import EngineBackend
from gpuwarden.backends._slurm_limits import read_limits
from gpuwarden.backends._slurm_observation import observation, unfinished
from gpuwarden.backends._slurm_rows import ENDED, Row, accounting_rows, newest, queue_rows
from gpuwarden.backends.base import ArrayTask, check_tasks
from gpuwarden.backends.local import LocalBackend
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core import processes
from gpuwarden.core.clock import Clock
from gpuwarden.core.engine import EngineLimits
from gpuwarden.core.errors import BadReply, BadRequest, NoSandbox, Unreachable
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Answer, Handle, JobSpec, Known, Observation, Place, StopResult, Unknown
from gpuwarden.core.policy import Local
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.remote import launch
from gpuwarden.remote.host.any_python import ANY_PYTHON, python_command
from gpuwarden.remote.ssh.host_keys import HostKey

ASK_S: Final = 150.0
"""Time limit for the agent; each Slurm command has its own, shorter limit."""
STOP_S: Final = 15.0
SECOND_LOOK_S: Final = 2.0
_LOADER: Final = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'slurm_agent.py', 'exec'))"


def create(clock: Clock) -> SlurmBackend:
    """Return a new backend for the registry."""
    return SlurmBackend(clock)


class _LoginNode(LocalBackend):
    """Access to files on a cluster whose login node is this machine. The cluster's jobs do not run in the sandbox."""

    name = "slurm"

    def mapping(self, place: Place) -> dict[str, object]:
        """Return the path mapping without the sandbox's limits."""
        return place.mapping


class _FarLoginNode(SshBackend):
    """Access to files on a cluster over SSH."""

    name = "slurm"


class SlurmBackend(EngineBackend):
    """Runs jobs as batch jobs on a Slurm cluster."""

    name = "slurm"

    def __init__(self, clock: Clock, config: Path | None = None) -> None:
        self._clock = clock
        self._here = _LoginNode(clock)
        self._far = _FarLoginNode(clock, config)
        self._policy: Callable[[], Local] = Local

    async def aclose(self) -> None:
        """Close all connections; the next call reconnects."""
        await self._far.aclose()

    def files(self, place: Place) -> LocalBackend | SshBackend:
        """Return the backend that reads and writes the files, locally or over SSH."""
        return self._far if place.host else self._here

    def confine(self, policy: Callable[[], Local], hidden: Sequence[Path]) -> None:
        """Set the policy, which can allow unsandboxed jobs on the machine that stores gpuwarden's own files."""
        self._policy = policy

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` if the cluster's login node is this machine, unless the policy allows unsandboxed jobs.

        The cluster's jobs run as this user, with this home folder and without a sandbox, so they could change the
        policy.
        """
        if spec.platform.partition("/")[2] == "local" and not self._policy().unsandboxed:
            raise NoSandbox(
                "jobs on this machine's own Slurm run without a sandbox and can write to the home folder, including"
                " gpuwarden's files",
                (
                    "Run gpuwarden on another machine and specify the cluster as slurm/HOST.",
                    do(Action.ALLOW_LOCAL, "to allow these jobs", alternative=True),
                ),
            )

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec unchanged. Raises BadRequest for an option that Slurm does not support."""
        options.engine_request(spec)
        return spec

    def attempts(self, spec: JobSpec) -> int:
        """Return 1, because Slurm restarts a job only after an interruption."""
        return 1

    async def host_key(self, place: Place) -> HostKey:
        """Connect to the login node and return its host key."""
        return await self._far.host_key(place)

    async def check(self, place: Place) -> list[Finding]:
        """Check whether run folders can be created on the login node; `limits` checks the cluster's limits."""
        if place.host:
            return [f for f in await self._far.check(place) if not f.rule.startswith("PF-GPU")]
        return await self._here.check(place)

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        """Return the cluster's limits, and the result of Slurm's own check of this job."""
        found = await self._ask(place, "limits", args=options.arguments(spec))
        return read_limits(found, options.engine_request(spec))

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the requirements that the login node does not meet. The compute nodes start scripts with its Python or
        uv. A missing command may still exist on the compute nodes, through modules or local disks.
        """
        wanted = replace(needs, gpu=False)  # `limits` checks the partitions' GPUs
        found = await self.files(place).readiness(place, wanted) if wanted.any else Readiness()
        network = found.network or not place.host  # Slurm's jobs do not run in this machine's sandbox
        return replace(found, where="on the login node", network=network)

    # ------------------------------------------------------------------------------------------------------ launch

    async def submit(
        self,
        spec: JobSpec,
        place: Place,
        token: str,
        *,
        secrets: Mapping[str, str],
        attempt: int = 1,
        inputs: Mapping[str, Path] | None = None,
    ) -> Handle:
        """Submit the attempt, or adopt the job with its name. Secrets are passed in `sbatch`'s environment."""
        near = self.files(place)
        handle, ready = await near.stage(spec, place, token, inputs)
        order = _order(ready, spec, token, attempt)
        await near.put_file(handle, f"order.{attempt}.json", json.dumps(order).encode())
        for name, content in options.node_files(spec).items():
            await near.put_file(handle, name, content)
        name = f"{launch.run_name(token)}-a{attempt}"
        python = await self._python(place)
        await self._ask(
            handle.place,
            "submit",
            folder=handle.run_dir,
            name=name,
            args=[*options.own_arguments(spec, name, handle.run_dir), *options.arguments(spec)],
            script=options.batch_script(spec, attempt, python, ready.runner, handle.run_dir),
            secrets=dict(secrets),
        )
        return handle

    async def submit_array(
        self, tasks: Sequence[ArrayTask], place: Place, token: str, *, at_once: int
    ) -> dict[str, Handle]:
        """Submit the tasks as one job array. One call sends all of their files except the inputs."""
        check_tasks(tasks, lambda task: options.array_request(task.spec, task.attempt))
        near, first, python = self.files(place), tasks[0], await self._python(place)
        home = await near.handle_of(place, token)
        rows, pool, runner = [], dict[str, str](), ""
        for index, task in enumerate(tasks):
            handle, ready = await near.prepare(task.spec, home.place, task.token)
            if task.inputs:
                await near.bring(handle, task.inputs)
            order = _order(ready, task.spec, task.token, task.attempt)
            files = {
                **ready.files,
                **options.node_files(task.spec),
                f"order.{task.attempt}.json": json.dumps(order).encode(),
            }
            named = launch.digests(files)
            pool |= {named[n]: b64encode(files[n]).decode() for n in files if named[n] not in pool}
            name, runner = f"{launch.run_name(task.token)}-a{task.attempt}", ready.runner
            rows.append((handle, {"name": name, "folder": handle.run_dir, "index": index, "files": named}))
        name, spec = f"{launch.run_name(token)}-a{first.attempt}", first.spec
        await near.put_file(home, "array.json", json.dumps({"tasks": len(rows)}).encode())  # creates the folder
        folders = [handle.run_dir for handle, _ in rows]
        await self._ask(
            home.place,
            "array",
            folder=home.run_dir,
            name=name,
            at_once=at_once,
            args=[*options.own_arguments(spec, name, home.run_dir, array=True), *options.arguments(spec)],
            script=options.array_script(spec, first.attempt, python, runner, folders),
            tasks=[{**row, "secrets": dict(task.secrets)} for task, (_, row) in zip(tasks, rows, strict=True)],
            files=pool,
        )
        return {task.token: handle for task, (handle, _) in zip(tasks, rows, strict=True)}

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs on a target with one list from Slurm and one poll of their run folders.

        While accounting is down, jobs that are only in accounting are omitted.
        """
        if not handles:
            return {}
        (rows, blind), seen = await self._rows(handles), await self._look(handles)
        lost = [h for h in handles if launch.run_name(h.token) not in rows and unfinished(seen[h.run_dir])]
        if lost:  # a job counts as lost only if a second poll confirms it
            await self._clock.sleep(SECOND_LOOK_S)
            again, blind = await self._rows(lost)
            rows, seen = {**rows, **again}, {**seen, **await self._look(lost)}
        unseen = {h.token for h in lost if launch.run_name(h.token) in blind}
        visible = (h for h in handles if h.token not in unseen)
        return {h.token: observation(seen[h.run_dir], rows.get(launch.run_name(h.token))) for h in visible}

    async def listed(self, handle: Handle) -> Answer[bool]:
        """Return whether Slurm lists the job; Unknown if accounting is down or the job is being submitted."""
        (rows, blind), name = await self._rows([handle]), launch.run_name(handle.token)
        return Unknown(blind[name]) if name in blind else Known(name in rows)

    async def _rows(self, handles: Sequence[Handle]) -> tuple[dict[str, Row], dict[str, str]]:
        """Return Slurm's newest row for each job, by the name that all attempts of the job share.

        Also return the reason for each job that may exist although it has no row: accounting does not respond, or the
        job is being submitted, possibly by a process that has since died.
        """
        folders = {launch.run_name(h.token): h.run_dir for h in handles}
        reply = await self._ask(handles[0].place, "jobs", folders=folders)
        queue, accounting = reply.get("queue"), reply.get("accounting")
        if not isinstance(queue, dict):
            raise BadReply("the list of jobs in Slurm's queue can't be parsed", "Try again.")
        if queue.get("rows") is None:
            raise Unreachable(f"Slurm does not list its jobs: {line(queue.get('err') or 'no reason given')}", TOO_OLD)
        rows, blind = newest(queue_rows(queue)), dict[str, str]()
        if isinstance(accounting, dict) and accounting.get("rc") == 0:
            rows = newest([*rows.values(), *accounting_rows(str(accounting.get("out")), folders)])
        elif isinstance(accounting, dict) and accounting.get("kept") is not False:
            why = f"Slurm's accounting does not answer: {line(accounting.get('err') or 'no reason given')}"
            blind = dict.fromkeys(folders.keys() - rows, why)
        sending = reply.get("sending")
        on_its_way = {stem for stem in folders if stem in sending} if isinstance(sending, list) else set()
        blind |= dict.fromkeys(on_its_way - rows.keys(), "this job is being submitted")
        message = reply.get("messages")
        words = {k: line(v, 300) for k, v in message.items() if v} if isinstance(message, dict) else {}
        return {stem: replace(row, message=words.get(stem, "")) for stem, row in rows.items()}, blind

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job: cancel a waiting job immediately; signal a running job, and cancel it after its grace period."""
        reply = await self._ask(
            handle.place,
            "stop",
            name=launch.run_name(handle.token),
            token=handle.token,
            folder=handle.run_dir,
            grace_s=grace_s,
            wait_s=min(grace_s + 5, STOP_S),
            ended=sorted(ENDED),
        )
        try:
            return StopResult(str(reply.get("result")))
        except ValueError as error:
            raise BadReply(f"the Slurm agent's stop returned {line(reply.get('result'))}", do(Action.CHECK)) from error

    # ------------------------------------------------------------------------------------------------------- agent

    async def _python(self, place: Place) -> str:
        """Return the interpreter for the runner; compute nodes are expected to have it at the same path."""
        if place.host:
            return (await self._far.host_info(place)).runner_python
        return sys.executable or shutil.which("python3") or "python3"

    async def _ask(self, place: Place, verb: str, **request: Any) -> dict[str, Any]:
        """Run one agent verb on the host that has Slurm's commands, and return its reply."""
        env = {"PATH": (await self._far.host_info(place)).path, **place.env} if place.host else place.env
        sent = json.dumps({"verb": verb, "env": env, **request}).encode()
        source = _agent()
        raw = await self._run(place, python_command(ANY_PYTHON, _LOADER, str(len(source))), source + sent)
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise BadReply("the response from the Slurm agent can't be parsed", "Try again.")
        if reply.get("ok") is True:
            return reply
        message = line(reply.get("error") or "no reason given", 500)
        if reply.get("code") == "refused":
            raise BadRequest(f"Slurm refused the job: {message}", "Change the refused option, then submit again.")
        if reply.get("code") == "io_error":
            raise BadRequest(
                f"file access failed on the login node: {message}",
                "Free space or fix the permissions there, then try again.",
            )
        raise Unreachable(
            f"Slurm does not answer: {message}", "The request may have been carried out; the next call will check."
        )

    async def _run(self, place: Place, argv: list[str], stdin: bytes) -> bytes:
        if place.host:
            return await self._far.command(place, argv, stdin, timeout_s=ASK_S)
        try:
            with anyio.fail_after(ASK_S):
                _, output = await processes.run(argv, stdin)
        except (OSError, TimeoutError) as error:
            raise Unreachable(
                f"Slurm's commands failed: {error}", "The request may have been carried out; try again."
            ) from error
        return output


def _order(ready: launch.Launch, spec: JobSpec, token: str, attempt: int) -> dict[str, Any]:
    """Return the content of an attempt's order file."""
    files = {**ready.spec["files"], **launch.digests(options.node_files(spec))}
    return {"spec": {**ready.spec, "files": files}, "token": token, "attempt": attempt}


TOO_OLD: Final = "Check that slurmctld is up. `squeue --json` needs Slurm 21.08 or newer, with its JSON plugin."


@cache
def _agent() -> bytes:
    return files("gpuwarden.remote.host").joinpath("slurm_agent.py").read_bytes()
