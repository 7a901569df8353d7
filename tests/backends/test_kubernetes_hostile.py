"""An unreadable configuration, and an API server that lies, redirects, or never completes its reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpuwarden.backends import _kube_api
from gpuwarden.backends._kube_api import KubeApi
from gpuwarden.backends._kube_exec import _ready
from gpuwarden.backends.kubernetes import KubernetesBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Conflict, NotFound, Unreachable, WardenError
from gpuwarden.core.models import Place, Unknown
from kube_kit import config_text
from wording import Wording

kubernetes = pytest.importorskip("kubernetes")
JOB = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {}}}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], KubeApi]:
    def write(text: bytes) -> KubeApi:
        (tmp_path / "config").write_bytes(text)
        return KubeApi("test")

    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    return write


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """Run a loopback server that answers with `answer`; yield its URL and the requests received."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(f"{self.command} {self.path.partition('?')[0]}")
            with suppress(OSError):
                answer(self)

        def do_GET(self) -> None:
            self._any()

        def do_POST(self) -> None:
            self._any()

        def do_DELETE(self) -> None:
            self._any()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def says(handler: BaseHTTPRequestHandler, code: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize(
    "text",
    [
        b"a: [1, {",
        b"a:\t- b\n\t- c",
        b"\xff\xfe\x00a: b",
        b"[1, 2]",
        b"hello",
        b"",
        config_text("https://127.0.0.1:1", {"client-certificate-data": "!!!", "client-key-data": "x"}).encode(),
        config_text("https://127.0.0.1:1", {"client-certificate": "/none", "client-key": "/none"}).encode(),
        config_text("https://127.0.0.1:1").replace("namespace: team", "namespace: team\n  - x").encode(),
    ],
)
def test_an_unreadable_configuration_is_one_clear_error(
    configured: Callable[[bytes], KubeApi], text: bytes, wording: Wording
) -> None:
    with pytest.raises(BadRequest) as refused:
        configured(text).jobs()
    wording(str(refused.value).partition(":")[0])


def test_failed_requests_are_not_retried(configured: Callable[[bytes], KubeApi]) -> None:
    with server(lambda handler: handler.connection.close()) as (url, asked):
        api = configured(config_text(url).encode())
        for call in (lambda: api.create(JOB), lambda: api.delete_job("j", "u"), lambda: api.jobs()):
            with pytest.raises(Unreachable):
                call()
    assert asked == [f"{verb} /apis/batch/v1/namespaces/team/jobs{name}" for verb, name in
                     (("POST", ""), ("DELETE", "/j"), ("GET", ""))]  # fmt: skip


def test_a_redirect_is_not_followed(configured: Callable[[bytes], KubeApi]) -> None:
    other = json.dumps({"kind": "JobList", "metadata": {}, "items": []}).encode()
    with (
        server(lambda handler: says(handler, 200, other)) as (elsewhere, stolen),
        server(lambda handler: says(handler, 302, Location=f"{elsewhere}/x")) as (url, asked),
    ):
        with pytest.raises(WardenError):
            configured(config_text(url, {"token": "a-key"}).encode()).jobs()
        assert len(asked) == 1 and stolen == [], "the key goes to nobody else, and an empty list is not believed"


PAGE = b"<!doctype html><title>Not here</title>"
OTHER = b'{"message": "no route", "code": 404}'


@pytest.mark.parametrize("body", [PAGE, OTHER, b"", b"[]", b"7"])
@pytest.mark.parametrize("code", [400, 404, 405, 409, 410, 422])
def test_a_refusal_not_written_by_the_cluster_raises_unreachable(
    configured: Callable[[bytes], KubeApi], code: int, body: bytes
) -> None:
    """A proxy's page does not mean that the job is missing, already exists, or was refused."""
    with server(lambda handler: says(handler, code, body)) as (url, _):
        api = configured(config_text(url).encode())
        calls = (lambda: api.job("j"), lambda: api.create(JOB), lambda: api.delete_job("j", "u"), api.jobs)
        for call in calls:
            with pytest.raises(Unreachable):
                call()


def test_the_clusters_own_refusals_map_to_distinct_errors(configured: Callable[[bytes], KubeApi]) -> None:
    own = b'{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "it says why"}'
    for code, error in ((403, AuthFailed), (409, Conflict), (422, BadRequest), (404, NotFound), (500, Unreachable)):
        with (
            server(lambda handler, code=code: says(handler, code, own)) as (url, _),
            pytest.raises(error, match="it says why"),
        ):
            configured(config_text(url).encode()).create(JOB)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n"])
async def test_a_reply_arriving_byte_by_byte_times_out(
    configured: Callable[[bytes], KubeApi], monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """Each byte arrives in time, but the reply never completes; other clusters are observed meanwhile."""
    monkeypatch.setattr("gpuwarden.backends.kubernetes.WORK_S", 0.5)
    over = threading.Event()

    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while not over.wait(0.05):
            handler.wfile.write(b"H")
            handler.wfile.flush()

    with server(drips) as (url, _):
        configured(config_text(url).encode())
        backend = KubernetesBackend(SystemClock())
        place = Place(platform="kubernetes/test", host="test", run_root="/runs")
        try:
            with anyio.fail_after(30):
                assert isinstance(await backend.find(place, "t"), Unknown)
        finally:
            over.set()


def test_an_endless_reply_is_aborted(
    configured: Callable[[bytes], KubeApi], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(_kube_api, "MOST_REPLY", 4 << 20)

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * (1 << 20))

    with server(endless) as (url, _), pytest.raises(Unreachable) as refused:
        configured(config_text(url).encode()).jobs()
    wording(refused)


def test_a_trickling_reply_times_out(
    configured: Callable[[bytes], KubeApi], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    times = iter(range(0, 100_000, 50))
    monkeypatch.setattr("gpuwarden.backends._kube_api.time.monotonic", lambda: float(next(times)))
    body = b'{"kind": "JobList", "metadata": {}, "items": []}'.ljust(4 << 20)
    with server(lambda handler: says(handler, 200, body)) as (url, _), pytest.raises(Unreachable) as refused:
        configured(config_text(url).encode()).jobs()
    wording(refused)


def test_a_list_with_endless_pages_is_rejected(configured: Callable[[bytes], KubeApi], wording: Wording) -> None:
    page = json.dumps({"kind": "JobList", "metadata": {"continue": "more"}, "items": []}).encode()
    with server(lambda handler: says(handler, 200, page)) as (url, asked):
        with pytest.raises(BadReply) as refused:
            configured(config_text(url).encode()).jobs()
        wording(refused)
        assert len(asked) == _kube_api.MAX_PAGES


def test_waiting_for_a_missing_pod_pauses_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vanishing:
        asked = 0

        def pod(self, name: str) -> None:
            self.asked += 1

        def create(self, body: Any) -> None:
            """Accept the pod and forget it."""

    now = [0.0]
    monkeypatch.setattr("gpuwarden.backends._kube_exec.time.monotonic", lambda: now[0])
    monkeypatch.setattr("gpuwarden.backends._kube_exec.time.sleep", lambda s: now.__setitem__(0, now[0] + s))
    api: Any = Vanishing()
    with pytest.raises(Unreachable):
        _ready(api, {"metadata": {"name": "runs", "uid": "u"}}, "/runs")
    assert api.asked <= 901


class Pods:
    """An API server that has only pods, where every created pod runs."""

    def __init__(self, **pods: dict[str, Any]) -> None:
        self.pods = pods

    def pod(self, name: str) -> dict[str, Any] | None:
        return self.pods.get(name)

    def create(self, body: dict[str, Any]) -> None:
        self.pods[body["metadata"]["name"]] = {**body, "status": {"phase": "Running"}}


def test_a_pod_on_a_lost_node_is_replaced(monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    now = [0.0]
    monkeypatch.setattr("gpuwarden.backends._kube_exec.time.monotonic", lambda: now[0])
    monkeypatch.setattr("gpuwarden.backends._kube_exec.time.sleep", lambda s: now.__setitem__(0, now[0] + s))
    claim = {"metadata": {"name": "runs", "uid": "u"}}
    api: Any = Pods()
    first = _ready(api, claim, "/runs")
    api.pods[first]["metadata"]["deletionTimestamp"] = "2026-11-01T10:00:00Z"
    second = _ready(api, claim, "/runs")
    assert second == f"{first}-2" == _ready(api, claim, "/runs")
    for pod in api.pods.values():
        pod["metadata"]["deletionTimestamp"] = "2026-11-01T10:00:00Z"
    assert _ready(api, claim, "/runs") == f"{first}-3"
    for n in range(4, 9):
        api.pods[f"{first}-{n}"] = api.pods[first]
    api.pods[f"{first}-3"] = api.pods[first]
    with pytest.raises(Unreachable) as refused:
        _ready(api, claim, "/runs")
    wording(refused, first)
