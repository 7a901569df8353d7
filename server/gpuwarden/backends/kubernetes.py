"""Run jobs as Kubernetes Jobs, in the namespace of a context in the user's kubeconfig.

Run folders are on one persistent volume claim in that namespace, because a pod's own disk is lost whenever the pod is
replaced. The user selects the claim with the label `gpuwarden.dev/runs`. The runner is the container's command. A small
pod that mounts the same claim provides access to the files before a job starts and after it has ended. The cluster
determines a job's state; the runner's status describes the command's result.

A job's name contains the token and the attempt, and its annotations repeat the token and the run folder. Jobs with
identical requests can run as an array: one Indexed Job with an index for each job. Each job is found, observed and
stopped separately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread

from gpuwarden.backends import _kube_arrays as arrays
from gpuwarden.backends import _kube_manifests as manifests
from gpuwarden.backends._engine import EngineBackend
from gpuwarden.backends._kube_api import KubeApi, part_of
from gpuwarden.backends._kube_exec import PodConnection, claim_key, claim_uid
from gpuwarden.backends._kube_image import image_readiness
from gpuwarden.backends._kube_options import engine_request, read_options
from gpuwarden.backends._kube_rows import KubeRow, is_of, rows_of, settled
from gpuwarden.backends._slurm_observation import observation
from gpuwarden.backends.base import ArrayTask
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import Clock
from gpuwarden.core.engine import EngineLimits, Queue
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, NotFound, Unreachable, WardenError
from gpuwarden.core.guidance import NextStep, steps
from gpuwarden.core.models import Answer, Handle, JobSpec, Known, Observation, Place, StopResult
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.machine import Ssh

# Importing the client takes most of a second, so it is imported when it is first used.
if find_spec("kubernetes") is None:
    raise ModuleNotFoundError("No module named 'kubernetes'", name="kubernetes")

STOP_S: Final = 15.0
SECOND_LOOK_S: Final = 2.0
LOOK_S: Final = 0.3
WORK_S: Final = 300.0
"""Time limit in seconds for one operation on a cluster, which may read many pages."""
AT_ONCE: Final = 8
"""Maximum number of run folders in an array that are filled concurrently."""
SHARED: Final = "ReadWriteMany"
_CHECKED: Final = "check"
_NOT_STARTED: Final = {"state": "canceled", "reason": "stopped", "why": "the job was stopped before it started"}

T = TypeVar("T")


def create(clock: Clock) -> KubernetesBackend:
    """Return a new backend for the registry."""
    return KubernetesBackend(clock)


class _ClaimFiles(SshBackend):
    """Access to the files on a persistent volume claim, through a pod that mounts the claim."""

    name = "kubernetes"

    def __init__(self, clock: Clock, api: Callable[[str], KubeApi]) -> None:
        super().__init__(clock)
        self._api = api

    async def reach(self, place: Place) -> Ssh:
        """Return a client that reaches the files through the file access pod, which is created on first use."""
        api, mount = self._api(place.host or ""), place.run_root
        namespace = await to_thread.run_sync(lambda: api.namespace)
        endpoint = Endpoint(place.host or "", place.host or "", 443, namespace)
        return Ssh(endpoint, dial=lambda pin: PodConnection(api, mount, pin))


class KubernetesBackend(EngineBackend):
    """Runs jobs on one Kubernetes cluster."""

    name = "kubernetes"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._apis: dict[str, KubeApi] = {}
        self._threads = anyio.CapacityLimiter(40)  # abandoned work must not occupy the threads of other backends
        self._files = _ClaimFiles(clock, self.api)

    def api(self, context: str) -> KubeApi:
        """Return the client for a context. Raises BadRequest if no context is named."""
        if not context:
            raise BadRequest(
                "no cluster is named", "Specify kubernetes/CONTEXT; `kubectl config get-contexts` lists the contexts."
            )
        return self._apis.setdefault(context, KubeApi(context))

    def files(self, place: Place) -> SshBackend:
        """Return the backend for the claim's files."""
        return self._files

    async def aclose(self) -> None:
        """Close all connections; the next call reconnects."""
        await self._files.aclose()
        apis, self._apis = self._apis, {}
        for api in apis.values():
            api.close()

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec unchanged. Raises BadRequest for an option that the Kubernetes backend does not support."""
        read_options(spec)
        return spec

    def attempts(self, spec: JobSpec) -> int:
        """Return 1, because the cluster restarts a job only after an interruption."""
        return 1

    async def check(self, place: Place) -> list[Finding]:
        """Check that the user has the required rights in the namespace, and that every node can mount the claim for run
        folders.
        """
        try:
            if missing := ", ".join(await self._there(place, lambda api: api.missing_rights())):
                message = f"the cluster does not allow this user to {missing} in the namespace of {place.host}"
                cure = "Ask the cluster's administrator for the rights in docs/kubernetes-rights.yaml."
                return [_unusable(message, cure)]
            claim = await self._there(place, lambda api: api.claim())
        except (BadRequest, NotFound, AuthFailed) as error:
            return [_unusable(error.message, *error.next_steps)]
        modes = part_of(claim, "spec").get("accessModes") or ()
        if SHARED in modes:
            pinned = place.model_copy(update={"host_key": claim_key(claim).line})
            found = [f for f in await self._files.check(pinned) if not f.rule.startswith("PF-GPU")]
            # the PF-HOST findings are about the file access pod, but the job gets its own pod
            return [f for f in found if f.blocks or not f.rule.startswith("PF-HOST")]
        name, given = line(claim["metadata"]["name"], 100), line(", ".join(map(str, modes)), 100)
        message = (
            f"the claim {name} is {given or 'without an access mode'}: a job's pod and the file access pod may be on"
            " different nodes, and only one of them could mount the claim"
        )
        return [_unusable(message, f"Choose a claim with the access mode {SHARED}.")]

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        """Return the cluster's limits, and the result of a dry run of this job. The nodes are not read, because
        gpuwarden does not require the right to list them.
        """

        def ask(api: KubeApi) -> EngineLimits:
            folder = f"{place.run_root}/gw-{_CHECKED}"
            body = manifests.job_manifest(spec, _CHECKED, 1, "runner.py", folder, api.claim(), secret=False)
            refusal = ""
            try:
                api.create(body, dry_run=True)
            except BadRequest as error:
                refusal = error.message
            request = engine_request(spec, api.namespace)
            kueue = read_options(spec).queue
            queue = api.local_queue(kueue) if kueue else Queue(name=request.queue, default=True, preempts="requeue")
            queues = (queue,) if queue else ()
            return EngineLimits(
                engine=self.name,
                version="",
                request=request,
                queues=queues,
                refusal=refusal,
                max_array=arrays.MOST_TASKS,
            )

        return await self._there(place, ask)

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the requirements that the job's image, judging by its name, does not meet. The nodes are not read."""
        return image_readiness(needs.image, needs)

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
        """Create the attempt's job, or adopt the job or array task that exists for this token and attempt."""
        handle = await self.handle_of(place, token)
        rows, ran = await self._started([handle], {token: attempt})
        if ran or (token in rows and rows[token].index is not None):
            return handle
        handle, runner = await self._prepare(ArrayTask(spec, token, secrets, attempt, inputs), handle.place)

        def create_job(api: KubeApi) -> None:
            claim, path = api.claim(claim_uid(handle.place.host_key)), f"{handle.run_dir}/{runner}"
            body = manifests.job_manifest(spec, token, attempt, path, handle.run_dir, claim, secret=bool(secrets))
            _give(api, _make(api, body, [handle]), {"order": json.dumps(dict(secrets))} if secrets else {})

        await self._there(place, create_job)
        return handle

    async def submit_array(
        self, tasks: Sequence[ArrayTask], place: Place, token: str, *, at_once: int
    ) -> dict[str, Handle]:
        """Create one Indexed Job for the tasks that have not been started, or adopt the array with this token."""
        arrays.check_array(tasks)
        handles = {task.token: await self.handle_of(place, task.token) for task in tasks}
        rows, ran = await self._started(list(handles.values()), {task.token: task.attempt for task in tasks})
        name, rest = arrays.array_name(token), [task for task in tasks if task.token not in ran]
        fresh = [task for task in rest if task.token not in rows]
        own = [task for task in rest if (row := rows.get(task.token)) and row.index is not None and row.job == name]
        if not fresh and not own:
            return handles
        pinned = handles[tasks[0].token].place
        ready = await self._prepare_all(fresh, pinned)

        def create_array(api: KubeApi) -> None:
            job = api.job(arrays.array_name(token))
            if fresh:
                claim = api.claim(claim_uid(pinned.host_key))
                folders = [handle for handle, _ in ready]
                job = _make(
                    api, arrays.array_manifest(fresh, token, ready[0][1], folders, claim, at_once=at_once), folders
                )
            if job is not None:
                # an earlier call may have been interrupted before this step
                _give(api, job, arrays.orders_of(job, tasks))

        await self._there(place, create_array)
        return handles

    async def _started(
        self, handles: Sequence[Handle], attempts: Mapping[str, int]
    ) -> tuple[dict[str, KubeRow], set[str]]:
        """Return the cluster's rows for these or later attempts, and the tokens whose attempt has already run."""
        rows, seen = await self._rows(handles), await self._look(handles)
        ran = set()
        for handle in handles:
            status, attempt = seen[handle.run_dir], attempts[handle.token]
            started = status.get("attempt") if status.get("token") == handle.token else None
            if isinstance(started, int) and started >= attempt:  # its job may have been deleted since then
                ran.add(handle.token)
        return {token: row for token, row in rows.items() if row.attempt >= attempts[token]}, ran

    async def _prepare_all(self, tasks: Sequence[ArrayTask], place: Place) -> list[tuple[Handle, str]]:
        """Prepare the tasks' run folders, at most `AT_ONCE` at a time. Raises the first error."""
        ready: dict[str, tuple[Handle, str]] = {}
        trouble: list[WardenError] = []
        limit = anyio.CapacityLimiter(AT_ONCE)

        async def prepare(task: ArrayTask) -> None:
            async with limit:
                try:
                    if not trouble:
                        ready[task.token] = await self._prepare(task, place)
                except WardenError as error:
                    trouble.append(error)

        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(prepare, task)
        if trouble:
            raise trouble[0]
        return [ready[task.token] for task in tasks]

    async def _prepare(self, task: ArrayTask, place: Place) -> tuple[Handle, str]:
        """Write a job's files to its run folder. Return its handle, and the name of the runner's file there."""
        handle, ready = await self._files.stage(task.spec, place, task.token, task.inputs)
        # The file access pod's environment and interpreters differ from those in the job's image.
        env = {k: v for k, v in ready.spec["env"].items() if k != "PATH" or k in task.spec.env}
        words = ready.spec["argv"]
        argv = words if task.spec.script is None else ["python3", *words[-1 - len(task.spec.args) :]]
        order = {"spec": {**ready.spec, "env": env, "argv": argv}, "token": task.token, "attempt": task.attempt}
        await self.put_file(handle, f"order.{task.attempt}.json", json.dumps(order).encode())
        return handle, ready.runner

    async def handle_of(self, place: Place, token: str) -> Handle:
        """Return the handle for a token. The handle's `place` names the claim that stores the job's files."""
        key = place.host_key or await self._there(place, lambda api: claim_key(api.claim()).line)
        return await self._files.handle_of(place.model_copy(update={"host_key": key}), token)

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs on a target with one request for jobs, one for pods, and one poll of the run folders."""
        if not handles:
            return {}
        rows, seen = await self._rows(handles), await self._look(handles)
        lost = [h for h in handles if h.token not in rows and seen[h.run_dir].get("state") == "running"]
        if lost:  # a job counts as lost only if a second poll confirms it
            await self._clock.sleep(SECOND_LOOK_S)
            rows, seen = {**rows, **await self._rows(lost)}, {**seen, **await self._look(lost)}
        return {h.token: observation(seen[h.run_dir], settled(rows.get(h.token), seen[h.run_dir])) for h in handles}

    async def listed(self, handle: Handle) -> Answer[bool]:
        """Return whether the cluster lists a job for this handle."""
        return Known(handle.token in await self._rows([handle]))

    async def _rows(self, handles: Sequence[Handle]) -> dict[str, KubeRow]:
        """Return the cluster's row for each job, keyed by token."""
        jobs, pods = await self._there(handles[0].place, lambda api: (api.jobs(), api.pods()))
        return rows_of(jobs, pods, handles)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """Delete the job; its pods get their grace period. Returns STOPPED only if the deletion is confirmed.

        For an array task, only its own pods are deleted. A waiting task is marked as canceled, so that its pod
        exits as soon as it starts.
        """
        row = await self._row(handle)
        if row is None or row.over:
            return StopResult.GONE
        first, ending = row, {uid for _, uid in row.pods}
        await self._end(handle, row, grace_s)
        with anyio.move_on_after(min(grace_s + 5, STOP_S)):
            while row is not None and (not row.over or ending & {uid for _, uid in row.pods}):
                await self._clock.sleep(LOOK_S)
                row = await self._row(handle)
                if row is not None and row.index is not None and row.waits:
                    # The pod wrote no status, or wrote that it was interrupted.
                    await self._record_end(handle, first.attempt)
                    row = await self._row(handle)
            if first.index is None:  # the job may have been deleted before its runner wrote a status
                status = (await self._look([handle]))[handle.run_dir]
                if status.get("token") != handle.token or status.get("attempt") != first.attempt:
                    await self._record_end(handle, first.attempt)
            return StopResult.STOPPED
        return StopResult.PENDING

    async def _row(self, handle: Handle) -> KubeRow | None:
        rows, seen = await self._rows([handle]), await self._look([handle])
        return settled(rows.get(handle.token), seen[handle.run_dir])

    async def _end(self, handle: Handle, row: KubeRow, grace_s: float) -> None:
        """Ask the cluster to terminate a job or an array task's pods.

        The cancellation is recorded first, so that a pod that starts in the meantime exits, and so that the runner does
        not treat SIGTERM as an interruption.
        """
        if row.waits:
            await self._record_end(handle, row.attempt)
        await self.put_file(handle, f"canceled.{row.attempt}", b"")
        await self.put_file(handle, "stop.json", json.dumps({"grace_s": grace_s}).encode())
        delete, ends = (
            (KubeApi.delete_job, ((row.job, row.uid),)) if row.index is None else (KubeApi.delete_pod, row.pods)
        )
        for name, uid in ends:
            await self._there(handle.place, partial(delete, name=name, uid=uid))

    async def _record_end(self, handle: Handle, attempt: int) -> None:
        """Write the final status of an attempt that was stopped before it ran."""
        last = {**_NOT_STARTED, "token": handle.token, "attempt": attempt, "ended_at": self._clock.now()}
        await self.put_file(handle, "status.json", json.dumps(last).encode())

    # ------------------------------------------------------------------------------------------------- API server

    async def _there(self, place: Place, work: Callable[[KubeApi], T]) -> T:
        """Run `work` with the cluster's client in a worker thread, and return the result.

        The client limits only the time for each read, and a reply may arrive byte by byte.
        """
        api = self.api(place.host or "")
        try:
            with anyio.fail_after(WORK_S):
                return await to_thread.run_sync(lambda: work(api), abandon_on_cancel=True, limiter=self._threads)
        except TimeoutError as late:
            raise Unreachable(
                f"the cluster {place.host} did not complete its replies within {WORK_S:.0f} s",
                "The request may have been carried out; try again.",
            ) from late


def _unusable(message: str, *cure: str | NextStep) -> Finding:
    return Finding(rule="PF-PLACE-001", severity=Severity.ERROR, message=message, fix=steps(cure))


def _make(api: KubeApi, body: manifests.Manifest, handles: Sequence[Handle]) -> dict[str, Any]:
    """Create the job, or return the existing job. Raises Conflict if another tool's job has its name."""
    name = str(body["metadata"]["name"])
    try:
        return api.create(body)
    except Conflict:
        there = api.job(name)
        if there is not None and all(is_of(there, handle) for handle in handles):
            return there
        raise Conflict(
            f"the cluster already has a job {name} from another tool or for other tasks",
            "Inspect it in the cluster; gpuwarden does not change it.",
        ) from None


def _give(api: KubeApi, job: Mapping[str, Any], orders: Mapping[str, str]) -> None:
    """Create a job's secret unless it already exists."""
    if orders:
        with suppress(Conflict):
            api.create(manifests.secret_manifest(job, orders))
