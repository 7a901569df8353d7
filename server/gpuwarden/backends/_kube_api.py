"""Call a cluster's API server with the official client, in the context's namespace. All calls block.

Replies are read as plain JSON. If a list is of an unexpected kind, BadReply is raised; the list is never treated as
empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

from gpuwarden.backends._kube_manifests import JOB, RUNS
from gpuwarden.core.engine import Queue
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Conflict, NotFound, NotSupported, Unreachable
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.sanitize import line

CALL_S: Final = (10.0, 30.0)
REPLY_S: Final = 120.0
MOST_REPLY: Final = 256 << 20
MAX_PAGES: Final = 200
PAGE: Final = 500
EXEC_PROTOCOL: Final = "v5.channel.k8s.io"
RIGHTS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("batch", "jobs"): ("create", "get", "list", "delete"),
    ("", "pods"): ("create", "get", "list", "delete"),
    ("", "pods/exec"): ("create", "get"),
    ("", "secrets"): ("create",),
    ("", "persistentvolumeclaims"): ("list",),
}
"""The required verbs by group and resource, in one namespace. docs/kubernetes-rights.yaml grants them."""
KUEUE_RIGHTS: Final = {("kueue.x-k8s.io", "localqueues"): ("get",)}
"""Optional rights to read a Kueue queue before a job is submitted to it."""


class KubeApi:
    """A client for one context in the user's kubeconfig."""

    def __init__(self, context: str) -> None:
        self.context = context

    @cached_property
    def _configured(self) -> tuple[Any, str]:
        """Return the client and the context's namespace."""
        from kubernetes import client, config
        from yaml import YAMLError

        configuration = client.Configuration()
        try:
            contexts, _ = config.list_kube_config_contexts()
            found = next((c for c in contexts if c["name"] == self.context), None)
            if found is None:
                names = line(", ".join(sorted(str(c["name"]) for c in contexts)), 300)
                raise NotFound(
                    f"the Kubernetes configuration has no context {self.context}", f"Its contexts are {names}."
                )
            config.load_kube_config(context=self.context, client_configuration=configuration)
        except (config.ConfigException, YAMLError, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise BadRequest(f"the Kubernetes configuration can't be read: {line(error, 300)}") from error
        configuration.retries = False  # must be set before the client is created: it disables retries and redirects
        return client.ApiClient(configuration), str(found["context"].get("namespace") or "default")

    def close(self) -> None:
        """Close all connections."""
        if "_configured" in self.__dict__:
            self._configured[0].rest_client.pool_manager.clear()

    @property
    def namespace(self) -> str:
        """Return the context's namespace."""
        return self._configured[1]

    @cached_property
    def core(self) -> Any:
        """Return the client for pods, claims and secrets."""
        from kubernetes import client

        return client.CoreV1Api(self._configured[0])

    @cached_property
    def batch(self) -> Any:
        """Return the client for jobs."""
        from kubernetes import client

        return client.BatchV1Api(self._configured[0])

    def missing_rights(self) -> list[str]:
        """Return the rights that are missing in the namespace; empty if the cluster can't list all granted rights."""
        from kubernetes import client

        ask = client.AuthorizationV1Api(self._configured[0]).create_self_subject_rules_review
        kind = "SelfSubjectRulesReview"
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": {"namespace": self.namespace}}
        found = self._call(ask, "", body=body)
        status = found.get("status")
        status = status if isinstance(status, dict) and found.get("kind") == kind else {}
        rules = status.get("resourceRules")
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise BadReply(f"the cluster {self.context} lists rights in an unknown format", "Try again.")
        if status.get("incomplete"):
            return []
        return [
            f"{verb} {resource}"
            for (group, resource), verbs in RIGHTS.items()
            for verb in verbs
            if not any(_grants(rule, group, resource, verb) for rule in rules)
        ]

    def claim(self, uid: str = "") -> dict[str, Any]:
        """Return the claim for run folders: the claim with gpuwarden's label, or the claim `uid` of an earlier job."""
        if uid:
            every = self._list(self.core.list_namespaced_persistent_volume_claim, "PersistentVolumeClaimList", "")
            own = next((claim for claim in every if claim["metadata"]["uid"] == uid), None)
            if own is None:
                raise NotFound(f"the claim {uid}, which contains the job's files, is not in {self.namespace}")
            return own
        found = self._list(self.core.list_namespaced_persistent_volume_claim, "PersistentVolumeClaimList", RUNS)
        if len(found) != 1:
            how = f"kubectl --context {self.context} label pvc NAME {RUNS}=yes"
            many = "has no claim" if not found else f"has {len(found)} claims"
            raise BadRequest(f"the namespace {self.namespace} {many} with the label {RUNS}", f"Choose one: `{how}`")
        return found[0]

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs with gpuwarden's label."""
        return self._list(self.batch.list_namespaced_job, "JobList", JOB)

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of all jobs with gpuwarden's label."""
        return self._list(self.core.list_namespaced_pod, "PodList", JOB)

    def job(self, name: str) -> dict[str, Any] | None:
        """Return the job with this name, or None if it does not exist."""
        return self._one(self.batch.read_namespaced_job, name, "Job")

    def pod(self, name: str) -> dict[str, Any] | None:
        """Return the pod with this name, or None if it does not exist."""
        return self._one(self.core.read_namespaced_pod, name, "Pod")

    def local_queue(self, name: str) -> Queue | None:
        """Return a Kueue queue and its current state; None if Kueue has no queue with that name."""
        from kubernetes import client

        ask = client.CustomObjectsApi(self._configured[0]).get_namespaced_custom_object
        where = {"group": "kueue.x-k8s.io", "version": "v1beta1", "plural": "localqueues"}
        queue = Queue(name=name, default=True, preempts="requeue")
        try:
            found = self._call(ask, "LocalQueue", namespace=self.namespace, name=name, **where)
        except NotFound as error:
            return None if f'"{name}" not found' in error.message else queue
        except (AuthFailed, Unreachable):  # if the cluster lacks this version of Kueue's API, its reply is plain text
            return queue
        active = [c for c in rows_in(part_of(found, "status"), "conditions") if c.get("type") == "Active"]
        stops = str(part_of(found, "spec").get("stopPolicy")) != "None"
        closed = stops or any(c.get("status") == "False" for c in active)
        state = "stopped" if stops else line(" ".join(str(c.get("message") or "") for c in active), 200)
        return queue.model_copy(update={"open": False if closed else True if active else None, "state": state})

    def create(self, body: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an object. Raises Conflict if its name is taken, or BadRequest if the cluster refuses it."""
        kind = str(body["kind"])
        ways = {
            "Job": lambda: self.batch.create_namespaced_job,
            "Pod": lambda: self.core.create_namespaced_pod,
            "Secret": lambda: self.core.create_namespaced_secret,
        }
        extra = {"dry_run": "All"} if dry_run else {}
        return self._call(ways[kind](), kind, namespace=self.namespace, body=dict(body), **extra)

    def delete_job(self, name: str, uid: str) -> None:
        """Delete the job with this uid and its pods. The pods get their grace period."""
        self._delete(self.batch.delete_namespaced_job, name, uid)

    def delete_pod(self, name: str, uid: str) -> None:
        """Delete the pod with this uid."""
        self._delete(self.core.delete_namespaced_pod, name, uid)

    def exec(self, pod: str, container: str, command: list[str]) -> Any:
        """Start a command in a pod and return its open WebSocket. Raises OSError if it can't be opened."""
        from kubernetes import client
        from kubernetes.stream import stream

        # The client's `stream` modifies the API object that is passed to it, so this object is not shared.
        api = client.CoreV1Api(client.ApiClient(self._configured[0].configuration))
        try:
            opened = stream(
                api.connect_get_namespaced_pod_exec, pod, self.namespace, container=container, command=command,
                stdin=True, stdout=True, stderr=True, tty=False, binary=True, _preload_content=False,
            )  # fmt: skip
        except (client.ApiException, OSError, AttributeError) as error:
            # Version 36 of the client raises AttributeError instead of an ApiException that has no body.
            raise ConnectionError(f"the pod {pod} did not start the command: {line(error, 300)}") from error
        if opened.subprotocol != EXEC_PROTOCOL:
            opened.close()
            raise NotSupported("the cluster can't close a command's stdin", "gpuwarden needs Kubernetes 1.30 or newer.")
        return opened

    # -------------------------------------------------------------------------------------------------------- calls

    def _list(self, ask: Callable[..., Any], kind: str, selector: str) -> list[dict[str, Any]]:
        """Return the items from all pages of a list."""
        rows: list[dict[str, Any]] = []
        more: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            page = self._call(ask, kind, namespace=self.namespace, label_selector=selector, limit=PAGE, **more)
            items, about = page.get("items"), page.get("metadata")
            if not isinstance(items, list) or not isinstance(about, dict) or not all(map(_is_object, items)):
                raise BadReply(f"the cluster's {kind} has an unknown format", "The reply was ignored; try again.")
            rows += items
            if not about.get("continue"):
                return rows
            more = {"_continue": str(about["continue"])}
        raise BadReply(f"the cluster's {kind} has too many pages", "Delete jobs that are no longer needed.")

    def _one(self, ask: Callable[..., Any], name: str, kind: str) -> dict[str, Any] | None:
        try:
            return self._call(ask, kind, name=name, namespace=self.namespace)
        except NotFound:
            return None

    def _delete(self, ask: Callable[..., Any], name: str, uid: str) -> None:
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Foreground"}
        try:
            self._call(ask, "", name=name, namespace=self.namespace, body=body)
        except (NotFound, Conflict):  # the object was deleted, or another object has its name now
            return

    def _call(self, ask: Callable[..., Any], kind: str, **given: Any) -> dict[str, Any]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            raw = _read_reply(ask(**given, _preload_content=False, _request_timeout=CALL_S))
        except ApiException as refused:
            raise _error(refused, self.context) from refused
        except (HTTPError, OSError) as lost:
            raise Unreachable(
                f"the cluster {self.context} does not answer: {line(lost, 300)}",
                "The request may have been carried out; try again.",
            ) from lost
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or (kind and found.get("kind") != kind):
            raise BadReply(f"the cluster {self.context} did not return a {kind or 'status'}", "Try again.")
        if kind and not kind.endswith("List") and not _is_object(found):
            raise BadReply(f"the cluster {self.context} returned a {kind} without a name", "Try again.")
        return found


def _read_reply(response: Any) -> bytes:
    """Read a complete reply. Raises OSError if it exceeds `MOST_REPLY` bytes or `REPLY_S` seconds."""
    raw, end = bytearray(), time.monotonic() + REPLY_S
    for piece in response.stream(1 << 20):
        raw += piece
        if len(raw) > MOST_REPLY or time.monotonic() > end:
            response.close()
            raise OSError(f"its reply is too long or too slow: {len(raw):,} bytes in {REPLY_S:.0f} s")
    return bytes(raw)


def _grants(rule: Mapping[str, Any], group: str, resource: str, verb: str) -> bool:
    """Return whether a rule grants a right on every object of a kind; rules for named objects do not count."""
    any_of = ("*", f"*/{resource.partition('/')[2]}", resource)
    asked = {"apiGroups": ("*", group), "resources": any_of, "verbs": ("*", verb)}
    return not rule.get("resourceNames") and all(
        any(word in words for word in (rule.get(key) or ())) for key, words in asked.items()
    )


def part_of(whole: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a nested object, or {} if it is absent. Raises BadReply if the value has another type."""
    found = whole.get(key)
    if found is not None and not isinstance(found, dict):
        raise BadReply(f"the cluster's {key} has an unknown format", "The reply was ignored; try again.")
    return found or {}


def rows_in(whole: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a nested list of objects, or [] if it is absent. Raises BadReply if the value has another type."""
    found = whole.get(key)
    if found is not None and not (isinstance(found, list) and all(isinstance(row, dict) for row in found)):
        raise BadReply(f"the cluster's {key} has an unknown format", "The reply was ignored; try again.")
    return found or []


def _is_object(found: object) -> bool:
    """Return whether this is a Kubernetes object whose parts have the expected types."""
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
        return False
    about = found["metadata"]
    named = all(isinstance(about.get(key), str) for key in ("name", "uid"))
    words = all(isinstance(about.get(key, {}), dict) for key in ("labels", "annotations"))
    return named and words and all(isinstance(found.get(part, {}), dict) for part in ("spec", "status"))


def _error(refused: Any, context: str) -> Exception:
    """Return the exception for an error status.

    A reply that is not from the API server proves nothing, except that the request was not authorized if the status is
    401 or 403: a proxy may require its own login.
    """
    try:
        found = json.loads(refused.body)
    except (ValueError, TypeError, RecursionError):
        found = None
    own = isinstance(found, dict) and found.get("kind") == "Status"
    words, code = line((own and found.get("message")) or refused.reason or "no reason given", 500), refused.status
    if code in {401, 403}:
        return AuthFailed(
            f"the cluster {context} does not allow the request: {words}",
            "Ask its administrator for the rights in docs/kubernetes-rights.yaml.",
        )
    if own and code == 404:
        return NotFound(f"the cluster {context} has no such object: {words}")
    if own and code == 409:
        return Conflict(f"the cluster {context} already has an object with that name: {words}", do(Action.CHECK))
    if own and code in {400, 422}:
        return BadRequest(
            f"the cluster {context} refused the job: {words}", "Change the refused option, then try again."
        )
    return Unreachable(
        f"the cluster {context} does not answer: {words}", "The request may have been carried out; try again."
    )
