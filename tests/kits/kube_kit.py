"""A cluster on loopback: an in-memory API server, a job controller, and a node whose containers are processes.

Each test has a separate folder for run folders. Pods mount the claim at the same path, so that a container's command
runs here unchanged. `PlayedNode` emulates the kubelet, for a real API server too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuwarden.backends._kube_arrays import MOST_TASKS
from gpuwarden.backends._kube_rows import indexes
from gpuwarden.core.models import JobSpec
from sshd import free_port

KINDS = {"jobs": "Job", "pods": "Pod", "secrets": "Secret", "persistentvolumeclaims": "PersistentVolumeClaim"}
V5 = "v5.channel.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


Secret = dict[str, str] | None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class PlayedNode:
    """An emulated kubelet: it starts a pod's command as a process and serves `exec`. `report` receives new statuses."""

    def __init__(self, report: Callable[[str, dict[str, Any]], None], secret: Callable[[str], Secret]) -> None:
        self.report, self.secret = report, secret
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.commands: set[int] = set()

    def start(self, pod: dict[str, Any]) -> None:
        """Run a pod in a separate thread."""
        self.gates[pod["metadata"]["uid"]] = threading.Event()
        threading.Thread(target=self._run, args=(pod,), daemon=True).start()

    def _run(self, pod: dict[str, Any]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        (container,) = pod["spec"]["containers"]
        command = [*container["command"], *container.get("args", ())]
        env = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "LANG"}}
        if (index := pod["metadata"].get("annotations", {}).get(INDEX)) is not None:
            env["JOB_COMPLETION_INDEX"] = index
        wanted = {v["name"]: v["secret"]["secretName"] for v in pod["spec"].get("volumes", ()) if "secret" in v}
        try:
            for row in container.get("env", ()):
                source = row.get("valueFrom", {})
                if "fieldRef" in source:
                    env[row["name"]] = uid
                elif "secretKeyRef" in source:
                    own = source["secretKeyRef"]
                    env[row["name"]] = self._key(uid, own["name"], own["key"])
            for mount in (
                m for m in container.get("volumeMounts", ()) if m["name"] in wanted
            ):  # the file is at another path here
                key = mount["subPathExpr"].replace("$(JOB_COMPLETION_INDEX)", str(index))
                file = Path(tempfile.mkdtemp(prefix="gw-mount-")) / "order"
                file.write_text(self._key(uid, wanted[mount["name"]], key))
                command = [word.replace(mount["mountPath"], str(file)) for word in command]
        except InterruptedError:
            self._over(name, 137)
            return
        process = subprocess.Popen(
            command, env=env, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.processes[uid] = process
        self.report(name, {"phase": "Running", "containerStatuses": [_container({"running": {"startedAt": now()}})]})
        if self.gates[uid].is_set():
            self.end(uid)
        code = process.wait()
        self._over(name, 128 - code if code < 0 else code)

    def _key(self, uid: str, secret: str, key: str) -> str:
        """Wait for a secret, as a kubelet does, and return the value of one of its keys."""
        while (found := self.secret(secret)) is None:
            if self.gates[uid].wait(0.02):
                raise InterruptedError
        return found[key]

    def _over(self, name: str, code: int) -> None:
        ended = _container({"terminated": {"exitCode": code, "finishedAt": now(), "startedAt": now()}})
        self.report(name, {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]})

    def end(self, uid: str, number: int = signal.SIGTERM) -> None:
        """Signal a pod's first process, as a deletion does. A pod that has not started yet ends too."""
        self.gates[uid].set()
        process = self.processes.get(uid)
        if process is not None and process.poll() is None:
            with suppress(OSError):
                os.kill(process.pid, number)

    def stop(self) -> None:
        """End all pods, and wait until no command is being served."""
        for pid in [*(process.pid for process in self.processes.values()), *self.commands]:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for _ in range(500):
            if not self.commands:
                return
            threading.Event().wait(0.01)

    async def exec(self, socket: WebSocket) -> None:
        """Serve one command, in the protocol version that supports closing its input."""
        await socket.accept(subprotocol=V5)
        process = await asyncio.create_subprocess_exec(
            *socket.query_params.getlist("command"), stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        assert process.stdin and process.stdout and process.stderr
        self.commands.add(process.pid)

        async def pump(stream: asyncio.StreamReader, channel: int) -> None:
            while data := await stream.read(1 << 16):
                with suppress(RuntimeError, WebSocketDisconnect):  # the client disconnected, but the command continues
                    await socket.send_bytes(bytes([channel]) + data)

        async def feed(stdin: asyncio.StreamWriter) -> None:
            with suppress(WebSocketDisconnect, ConnectionError, RuntimeError):
                while True:
                    data = await socket.receive_bytes()
                    if data[0] == 255:
                        stdin.close()
                    elif data[1:]:
                        stdin.write(data[1:])
                        await stdin.drain()
            stdin.close()

        feeding = asyncio.create_task(feed(process.stdin))
        try:
            await asyncio.gather(pump(process.stdout, 1), pump(process.stderr, 2))
            code = await process.wait()
            code = 128 - code if code < 0 else code
            causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
            failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes}
            await socket.send_bytes(b"\x03" + json.dumps(failed if code else {"status": "Success"}).encode())
            await socket.close()
        except (RuntimeError, WebSocketDisconnect):
            return
        finally:
            feeding.cancel()
            self.commands.discard(process.pid)


def _container(state: dict[str, Any]) -> dict[str, Any]:
    return {"name": "job", "ready": "running" in state, "restartCount": 0, "image": "", "imageID": "", "state": state}


class Cluster:
    """A fake API server with a job controller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, dict[str, Any]]] = {plural: {} for plural in KINDS}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.trouble = ""
        self.made = 0
        self.failures: dict[tuple[str, int], int] = {}
        self.rules: list[dict[str, Any]] = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
        self.node = PlayedNode(self._reported, self._secret)
        self.port = free_port()
        self.claim()
        base, pods = "/{group:path}/namespaces/{ns}/{plural}", "/api/v1/namespaces/{ns}/pods/{name}/exec"
        app = Starlette(
            routes=[
                WebSocketRoute(pods, self._exec),
                Route("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", self._review, methods=["POST"]),
                Route(base + "/{name}", self._object, methods=["GET", "DELETE"]),
                Route(base, self._collection, methods=["GET", "POST"]),
            ]
        )
        self.server = uvicorn.Server(
            uvicorn.Config(
                app, port=self.port, log_level="error", ws="websockets-sansio", loop="asyncio", lifespan="off"
            )
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self) -> Cluster:
        self.thread.start()
        while not self.server.started:
            threading.Event().wait(0.01)
        self.config.write_text(config_text(f"http://127.0.0.1:{self.port}"))
        return self

    def stop(self) -> None:
        self.node.stop()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)

    @property
    def config(self) -> Path:
        return self.folder / "kubeconfig"

    def claim(self, name: str = "runs", **spec: Any) -> None:
        """Create a claim with our label."""
        about = {"name": name, "uid": f"uid-of-{name}", "labels": {"gpuwarden.dev/runs": "yes"}}
        given = {"accessModes": ["ReadWriteMany"], **spec}
        kind = {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": about, "spec": given}
        self.objects["persistentvolumeclaims"][name] = kind

    # ------------------------------------------------------------------------------------------------------ requests

    async def _exec(self, socket: WebSocket) -> None:
        if self._troubled():
            await socket.close()
        else:
            await self.node.exec(socket)

    def _troubled(self, *, review: bool = False) -> Response | None:
        if self.trouble == "down":
            return refuse(503, "the server is currently unable to handle the request")
        if self.trouble == "forbidden" and not review:
            return refuse(403, 'jobs.batch is forbidden: User "u" cannot list resource "jobs"')
        return JSONResponse({"welcome": "to the cluster"}) if self.trouble == "odd" else None

    async def _review(self, request: Request) -> Response:
        status = {"resourceRules": self.rules, "nonResourceRules": [], "incomplete": False}
        return self._troubled(review=True) or JSONResponse(
            {"kind": "SelfSubjectRulesReview", "metadata": {}, "status": status}, 201
        )

    async def _collection(self, request: Request) -> Response:
        plural = request.path_params["plural"]
        self.asked.append(f"{request.method} {plural}")
        if troubled := self._troubled():
            return troubled
        if request.method == "GET":
            label = request.query_params.get("labelSelector", "")
            with self.lock:
                rows = [o for o in self.objects[plural].values() if not label or label in o["metadata"]["labels"]]
                return JSONResponse(
                    {"kind": f"{KINDS[plural]}List", "metadata": {}, "items": json.loads(json.dumps(rows))}
                )
        body = await request.json()
        if "dryRun" in request.query_params:
            return JSONResponse({**body, "metadata": {**body["metadata"], "uid": "dry"}}, 201)
        answer = self._create(plural, body)
        if self.trouble == "cut" and plural == "jobs":
            self.trouble = ""
            return refuse(504, "the request timed out")
        return answer

    async def _object(self, request: Request) -> Response:
        plural, name = request.path_params["plural"], request.path_params["name"]
        self.asked.append(f"{request.method} {plural}/")
        if troubled := self._troubled():
            return troubled
        with self.lock:
            found = self.objects.get(plural, {}).get(name)
            if found is None:
                return refuse(404, f'{plural} "{name}" not found')
            if request.method == "GET":
                return JSONResponse(json.loads(json.dumps(found)))
            body = await request.json()
            if body.get("preconditions", {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
                return refuse(409, "the UID in the precondition does not match")
            self._delete(plural, found)
            return JSONResponse({"kind": "Status", "status": "Success"})

    def _create(self, plural: str, body: dict[str, Any]) -> Response:
        with self.lock:
            name = body["metadata"]["name"]
            if name in self.objects[plural]:
                return refuse(409, f"{plural} {name} already exists")
            self.created.append(json.loads(json.dumps(body)))
            body["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=now())
            body.setdefault("status", {})
            self.objects[plural][name] = body
            if plural == "pods":
                self.node.start(body)
            elif plural == "jobs":
                self._advance(body)
            return JSONResponse(json.loads(json.dumps(body)), 201)

    # ---------------------------------------------------------------------------------------------------- controller

    def pods_of(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        uid = job["metadata"]["uid"]
        pods = self.objects["pods"].values()
        return [p for p in pods if any(o["uid"] == uid for o in p["metadata"].get("ownerReferences", ()))]

    def _advance(self, job: dict[str, Any]) -> None:
        """Apply the job controller's reaction to a change."""
        pods = self.pods_of(job)
        if job["spec"].get("completionMode") == "Indexed" and not job["metadata"].get("deletionTimestamp"):
            self._advance_indexed(job, pods)
            return
        if any(p["status"].get("phase") not in {"Failed", "Succeeded"} for p in pods):
            return
        if job["metadata"].get("deletionTimestamp"):
            for pod in pods:
                self.objects["pods"].pop(pod["metadata"]["name"])
            self.objects["jobs"].pop(job["metadata"]["name"])
            self.objects["secrets"].pop(job["metadata"]["name"], None)
            return
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        if job["spec"].get("suspend") or job["status"].get("conditions"):
            return
        if len(pods) > len(failed):
            self._end(job, "Complete", "")
        elif failed and not _counted(failed[-1]):
            self._end(job, "Failed", "PodFailurePolicy")
        elif len(failed) > job["spec"]["backoffLimit"]:
            self._end(job, "Failed", "BackoffLimitExceeded")
        else:
            self._pod(job)

    def _advance_indexed(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        """Create the pods of each index, lowest first, up to the parallelism; a failed index does not end others."""
        spec, status = job["spec"], job["status"]
        if spec.get("suspend") or status.get("conditions"):
            return
        done = {kind: indexes(status.get(f"{kind}Indexes")) for kind in ("completed", "failed")}
        live = set()
        for pod in pods:
            index, phase = int(pod["metadata"]["annotations"][INDEX]), pod["status"].get("phase")
            count = pod["metadata"]["failures"] + 1
            if phase == "Succeeded":
                done["completed"] |= {index}
            elif phase != "Failed":
                live.add(index)
            elif index not in done["completed"] | done["failed"] and not pod["metadata"].get("counted"):
                pod["metadata"]["counted"] = True
                if not _counted(pod) or count > spec["backoffLimitPerIndex"]:
                    done["failed"] |= {index}
                else:
                    self.failures[job["metadata"]["uid"], index] = count
        status |= {f"{kind}Indexes": ",".join(map(str, sorted(found))) for kind, found in done.items()}
        over = done["completed"] | done["failed"]
        if len(over) == spec["completions"]:
            self._end(job, *(("Failed", "FailedIndexes") if done["failed"] else ("Complete", "")))
        for index in range(spec["completions"]):
            if index not in over | live and len(live) < spec["parallelism"]:
                live.add(index)
                self._pod(job, index)

    def _end(self, job: dict[str, Any], kind: str, reason: str) -> None:
        job["status"]["conditions"] = [{"type": kind, "status": "True", "reason": reason}]

    def _pod(self, job: dict[str, Any], index: int | None = None) -> None:
        template = json.loads(json.dumps(job["spec"]["template"]))
        which = "" if index is None else f"-{index}"
        name = f"{job['metadata']['name']}{which}-{uuid.uuid4().hex[:5]}"
        owner = {"kind": "Job", "uid": job["metadata"]["uid"], "controller": True, "name": job["metadata"]["name"]}
        about = {**template["metadata"], "name": name, "uid": str(uuid.uuid4()), "ownerReferences": [owner]}
        self.made += 1
        about["creationTimestamp"] = f"{now()}.{self.made:06}"
        if index is not None:
            about |= {"annotations": {INDEX: str(index)}, "failures": self.failures.get((owner["uid"], index), 0)}
        pod = {"kind": "Pod", "metadata": about, "spec": template["spec"], "status": {"phase": "Pending"}}
        self.objects["pods"][name] = pod
        self.node.start(pod)

    def _reported(self, name: str, status: dict[str, Any]) -> None:
        with self.lock:
            pod = self.objects["pods"].get(name)
            if pod is None:
                return
            pod["status"] = {**pod["status"], **status}
            for job in list(self.objects["jobs"].values()):
                if pod in self.pods_of(job):
                    self._advance(job)
            if pod["metadata"].get("deletionTimestamp") and status["phase"] in {"Failed", "Succeeded"}:
                self.objects["pods"].pop(name, None)

    def _secret(self, name: str) -> Secret:
        with self.lock:
            found = self.objects["secrets"].get(name)
            return dict(found["stringData"]) if found else None

    def _delete(self, plural: str, found: dict[str, Any]) -> None:
        found["metadata"]["deletionTimestamp"] = now()
        for pod in self.pods_of(found) if plural == "jobs" else [found] if plural == "pods" else []:
            self.node.end(pod["metadata"]["uid"])
        if plural == "jobs":
            self._advance(found)

    def names(self, plural: str) -> list[str]:
        """Return the names of a kind's objects that belong to our jobs."""
        with self.lock:
            found = self.objects[plural].values()
            return sorted(o["metadata"]["name"] for o in found if "gpuwarden.dev/job" in o["metadata"]["labels"])

    def preempt(self, job: str, index: int | None = None) -> None:
        """Preempt the pod of a job, or of one of its indexes."""
        which = None if index is None else str(index)
        with self.lock:
            for pod in self.pods_of(self.objects["jobs"][job]):
                mine = which is None or pod["metadata"]["annotations"][INDEX] == which
                if mine and pod["status"]["phase"] == "Running":
                    pod["status"]["conditions"] = [PREEMPTED]
                    self.node.end(pod["metadata"]["uid"])

    def suspend(self, job: str) -> None:
        """Suspend a running job, as Kueue does: its pods are deleted, and it waits again."""
        with self.lock:
            found = self.objects["jobs"][job]
            found["spec"]["suspend"] = True
            for pod in self.pods_of(found):
                self._delete("pods", pod)

    def queue(self, name: str, **conditions: Any) -> None:
        """Create a Kueue local queue."""
        rows = [{"type": kind, **given} for kind, given in conditions.items()]
        kind = {"kind": "LocalQueue", "metadata": {"name": name, "uid": f"uid-of-{name}"}}
        self.objects["localqueues"] = {name: {**kind, "spec": {"clusterQueue": "c"}, "status": {"conditions": rows}}}

    def admit(self, job: str) -> None:
        """Let a suspended job run, as Kueue does."""
        with self.lock:
            self.objects["jobs"][job]["spec"]["suspend"] = False
            self._advance(self.objects["jobs"][job])


def _counted(pod: dict[str, Any]) -> bool:
    """Return whether the failure policy counts a pod's failure toward the backoff limit, so that the pod is retried."""
    code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    return PREEMPTED in pod["status"].get("conditions", ()) or code == 143


def refuse(code: int, message: str) -> JSONResponse:
    return JSONResponse({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)


def config_text(server: str, user: dict[str, Any] | None = None, **cluster: Any) -> str:
    """Return a configuration with one context, `test`, whose namespace is `team`."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
            "users": [{"name": "u", "user": user or {}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        }
    )


class KubeEngine:
    """The cluster as the backend contract's engine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "kubernetes/test", "command": ["sh", "-c", text], "timeout_s": 600}
        return JobSpec.model_validate({**given, "options": {"image": "busybox"}, **fields})

    @contextmanager
    def _in(self, trouble: str) -> Iterator[None]:
        self.cluster.trouble = trouble
        try:
            yield
        finally:
            self.cluster.trouble = ""

    def cut(self) -> Any:
        return self._in("cut")

    def down(self) -> Any:
        return self._in("down")

    def odd(self) -> Any:
        return self._in("odd")

    def questions(self) -> int:
        return self.cluster.asked.count("GET jobs")

    def array_limit(self) -> int:
        return MOST_TASKS
