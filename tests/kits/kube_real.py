"""A real kube-apiserver, etcd, and controller manager on loopback, with an emulated scheduler and kubelet.

GPUWARDEN_KUBE names the folder with the programs; `make kube` builds them. Debian's version is 1.20. It drops fields
that it does not know (`podFailurePolicy`, `suspend`) and lacks Indexed Jobs, so these fields and arrays are tested on
the in-memory cluster. Identities, permissions, names, lists, deletions, owners, restarts, and the `exec` protocol are
real.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from gpuwarden.backends._kube_api import KubeApi
from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.models import JobSpec
from kube_kit import PREEMPTED, KubeEngine, PlayedNode, Secret, config_text
from paths import ROOT
from sshd import free_port

TEAM: Final = "/api/v1/namespaces/team"
USERS: Final = {"admin": "system:masters", "gpuwarden": "", "nobody": ""}
MERGE: Final = {"Content-Type": "application/merge-patch+json"}


class RealCluster:
    """The control plane in a separate folder, with one node and one labeled claim in the namespace `team`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.runs = folder / "runs"
        self.port, self.kubelet_port = free_port(), free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: set[str] = set()
        self.stopping = threading.Event()
        self.node = PlayedNode(self._reported, self._secret)
        self.threads: list[threading.Thread] = []

    # ------------------------------------------------------------------------------------------------ control plane

    def start(self) -> RealCluster:
        """Start all programs, and create the objects that an administrator would."""
        certs = self.folder / "certs"
        store, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self._run(
            "etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        (self.folder / "tokens.csv").write_text(
            "".join(f'{name}-key,{name},{name},"{group}"\n' for name, group in USERS.items())
        )
        key = self.folder / "accounts.pem"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        self._run(
            "kube-apiserver", f"--etcd-servers={store}", f"--secure-port={self.port}", "--bind-address=127.0.0.1",
            f"--cert-dir={certs}", "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder}/tokens.csv", "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}", "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        self._wait_for(lambda: (certs / "apiserver.crt").exists())
        for name in USERS:
            (self.folder / f"{name}.config").write_text(
                config_text(
                    f"https://127.0.0.1:{self.port}",
                    {"token": f"{name}-key"},
                    **{"certificate-authority": str(certs / "apiserver.crt")},
                )
            )
        self.admin = httpx2.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            verify=ssl.create_default_context(cafile=str(certs / "apiserver.crt")),
            headers={"Authorization": "Bearer admin-key"},
            timeout=30,
        )
        self._wait_for(self._is_ready)
        self._run(
            "kube-controller-manager", f"--kubeconfig={self.folder}/admin.config", "--controllers=job,garbagecollector",
            "--leader-elect=false", "--secure-port=0", "--port=0",
        )  # fmt: skip
        self._furnish()
        self._kubelet(certs)
        return self

    def _run(self, program: str, *args: str) -> None:
        found = shutil.which(program, path=f"{self.programs}:{os.environ['PATH']}:/usr/sbin")
        assert found is not None, f"{program} is missing"
        with (self.folder / f"{program}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen([found, *args], stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
            )

    def _wait_for(self, good: Any) -> None:
        for _ in range(1_200):
            if good():
                return
            assert all(p.poll() is None for p in self.processes), f"see the logs in {self.folder}"
            threading.Event().wait(0.1)
        pytest.fail(f"see the logs in {self.folder}")

    def _is_ready(self) -> bool:
        with suppress(httpx2.HTTPError):
            return self.admin.get("/readyz").status_code == 200
        return False

    def _furnish(self) -> None:
        self.put("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": "team"}})
        self.claim()
        rights = (ROOT / "docs/kubernetes-rights.yaml").read_text("utf-8")
        for document in yaml.safe_load_all(rights):
            plural = f"{document['kind'].lower()}s"
            self.put(f"/apis/rbac.authorization.k8s.io/v1/namespaces/team/{plural}", document)
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.kubelet_port}},
        }
        self.put("/api/v1/nodes", {"kind": "Node", "metadata": {"name": "n1"}, "status": status})

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object, as the cluster's owner."""
        answer = self.admin.post(path, json=body)
        assert answer.status_code < 300, answer.text
        return dict(answer.json())

    def claim(self, name: str = "runs", **spec: object) -> None:
        """Create a claim with our label."""
        about = {"name": name, "labels": {"gpuwarden.dev/runs": "yes"}}
        given = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, **spec}
        self.put(f"{TEAM}/persistentvolumeclaims", {"metadata": about, "spec": given})

    def stop(self) -> None:
        """End all programs."""
        self.stopping.set()
        self.node.stop()
        if self.threads:
            self.server.should_exit = self.server.force_exit = True
        for thread in self.threads:
            thread.join(10)
        for process in reversed(self.processes):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self.admin.close()

    # ------------------------------------------------------------------------------------------------------ kubelet

    def _kubelet(self, certs: Path) -> None:
        app = Starlette(routes=[WebSocketRoute("/exec/team/{pod}/{container}", self.node.exec)])
        tls = {"ssl_certfile": str(certs / "apiserver.crt"), "ssl_keyfile": str(certs / "apiserver.key")}
        config = uvicorn.Config(
            app, port=self.kubelet_port, log_level="error", ws="websockets-sansio", loop="asyncio", lifespan="off",
            **tls,  # type: ignore[arg-type]
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.threads = [threading.Thread(target=self.server.run), threading.Thread(target=self._serve)]
        for thread in self.threads:
            thread.start()

    def _serve(self) -> None:
        """Bind, start, end and remove pods, as a scheduler and a kubelet do."""
        while not self.stopping.wait(0.1):
            for pod in self.admin.get(f"{TEAM}/pods").json()["items"]:
                about = pod["metadata"]
                name, uid, leaves = about["name"], about["uid"], "deletionTimestamp" in about
                if not pod["spec"].get("nodeName"):
                    self.admin.post(
                        f"{TEAM}/pods/{name}/binding",
                        json={"metadata": {"name": name}, "target": {"kind": "Node", "name": "n1"}},
                    )
                elif uid not in self.node.gates and not leaves:
                    self.node.start(pod)
                elif leaves and (uid in self.ended or uid not in self.node.gates):
                    now = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                    self.admin.request("DELETE", f"{TEAM}/pods/{name}", json=now)
                elif leaves and uid in self.node.processes:
                    self.node.end(uid)

    def _reported(self, name: str, status: dict[str, Any]) -> None:
        told = self.admin.patch(f"{TEAM}/pods/{name}/status", content=json.dumps({"status": status}), headers=MERGE)
        if status["phase"] != "Running" and told.status_code == 200:
            self.ended.add(told.json()["metadata"]["uid"])

    def _secret(self, name: str) -> Secret:
        found = self.admin.get(f"{TEAM}/secrets/{name}")
        if found.status_code != 200:
            return None
        return {key: base64.b64decode(value).decode() for key, value in found.json()["data"].items()}

    # ---------------------------------------------------------------------------------------------------- test controls

    def objects(self, plural: str) -> list[dict[str, Any]]:
        """Return the objects of a kind that belong to our jobs."""
        base = "/apis/batch/v1/namespaces/team" if plural == "jobs" else TEAM
        return list(self.admin.get(f"{base}/{plural}", params={"labelSelector": "gpuwarden.dev/job"}).json()["items"])

    def names(self, plural: str) -> list[str]:
        """Return the names of `objects`."""
        return sorted(o["metadata"]["name"] for o in self.objects(plural))

    def clear(self) -> None:
        """Delete all jobs and their files, so that the next test starts with an empty cluster."""
        for name in self.names("jobs"):
            path, how = f"/apis/batch/v1/namespaces/team/jobs/{name}", {"propagationPolicy": "Background"}
            self.admin.request("DELETE", path, json=how)
        self._wait_for(lambda: not self.names("jobs") and not self.names("pods"))
        shutil.rmtree(self.runs, ignore_errors=True)

    def preempt(self, job: str) -> None:
        """Evict a job's pod, with the condition that newer versions set."""
        for pod in self.objects("pods"):
            name = pod["metadata"]["name"]
            if name.startswith(f"{job}-") and pod["status"]["phase"] == "Running":
                conditions = {"status": {"conditions": [PREEMPTED]}}
                self.admin.patch(f"{TEAM}/pods/{name}/status", content=json.dumps(conditions), headers=MERGE)
                self.put(
                    f"{TEAM}/pods/{name}/eviction",
                    {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}},
                )


class RealEngine(KubeEngine):
    """The real cluster as the backend contract's engine, with faults injected into the client."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.asked = patch, 0
        self.plain, plain_jobs = KubeApi._call, KubeApi.jobs

        def counted(api: KubeApi) -> list[dict[str, Any]]:
            self.asked += 1
            return plain_jobs(api)

        patch.setattr(KubeApi, "jobs", counted)

    @contextmanager
    def _in(self, trouble: str) -> Iterator[None]:
        plain = self.plain

        def call(api: KubeApi, ask: Any, kind: str, **given: Any) -> dict[str, Any]:
            if trouble == "odd":
                raise BadReply("the cluster answered something else", "Try again.")
            if trouble == "down":
                raise Unreachable("the cluster does not answer")
            found = plain(api, ask, kind, **given)
            if kind == "Job" and "body" in given:
                raise Unreachable("the reply was lost")
            return found

        with self.patch.context() as patch:
            patch.setattr(KubeApi, "_call", call)
            yield

    def questions(self) -> int:
        return self.asked

    def job(self, text: str, **fields: object) -> JobSpec:
        """Return a job without restarts: this version drops the policy that excludes a job's failures from retries."""
        return super().job(text, **{"max_restarts": 0, **fields})
