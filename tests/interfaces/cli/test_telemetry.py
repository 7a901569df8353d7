"""What a collector is sent: spans of jobs and machines that came to rest, metrics of now, each once, nobody's texts."""

from __future__ import annotations

import gzip
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from cli_kit import Cli
from fakes import FakeClock
from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest, DiskError, NotSupported, Unreachable
from gpuwarden.core.policy import Telemetry
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.teardown import approve, request
from gpuwarden.lifecycle.monitoring import telemetry
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.people import acting_as
from gpuwarden.rehearsal.model import Settings
from lifecycle_kit import launch, open_house, rent_cloud, work
from page_kit import busy_world
from real_parts import need

pytestmark = [pytest.mark.anyio, pytest.mark.real("OpenTelemetry")]


@dataclass
class Collector:
    """A collector on loopback that decodes what it is sent, or answers with an error."""

    url: str = ""
    status: int = 200
    spans: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> bytes:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

        self.raw.append(body)
        if path == "/v1/traces":
            sent = traces.ExportTraceServiceRequest.FromString(body)
            self.spans += [s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans]
            return bytes(traces.ExportTraceServiceResponse().SerializeToString())
        assert path == "/v1/metrics"
        measured = metrics.ExportMetricsServiceRequest.FromString(body)
        self.metrics += [m for r in measured.resource_metrics for scope in r.scope_metrics for m in scope.metrics]
        return bytes(metrics.ExportMetricsServiceResponse().SerializeToString())

    def value(self, name: str) -> float:
        """The latest value of a metric, over all labels."""
        last = [m for m in self.metrics if m.name == name][-1]
        return sum(point.as_double or point.as_int for point in last.gauge.data_points)


@contextmanager
def listening() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = found.take(self.path, body) if found.status == 200 else b""
            self.send_response(found.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def installed(name: str) -> bool:
    """Whether a package of a namespace is there; its parents may be missing as well."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def collector() -> Iterator[Collector]:
    need("OpenTelemetry's SDK and exporter", installed("opentelemetry.exporter"))
    with listening() as found:
        yield found


def pointed(ctx: Context, url: str, **more: Any) -> Context:
    ctx.policy = ctx.policy.model_copy(update={"telemetry": Telemetry(otlp_url=url, **more)})
    return ctx


@pytest.fixture
def house(tmp_path: Path, collector: Collector) -> Context:
    ctx = open_house(tmp_path / "home", FakeClock())
    rent_cloud(ctx, settings=Settings(boot_s=0, stop_s=0))
    return pointed(ctx, collector.url)


def push(ctx: Context) -> int:
    message = telemetry.gather(ctx)
    telemetry.send(ctx, message)
    return len(message.spans)


@pytest.mark.slow
async def test_a_job_is_a_trace_of_its_states_machine_and_end(house: Context, collector: Collector) -> None:
    with acting_as("alice"):
        job = await launch(house, work("one", "llm"))
    push(house)
    assert collector.value("gpuwarden.machines.billing") == 1
    assert "lease" not in [span.name for span in collector.spans], "its machine still runs"
    house.clock.advance(60)  # type: ignore[attr-defined]
    with acting_as("bob"):
        view = await request(house, job, "terminate")
        assert view.record.digest
        await approve(house, view.record.id, view.record.digest, channel="terminal", by="user bob", loss="one")
        house.clock.advance(60)  # type: ignore[attr-defined]
        await list_instances(house)
        await request(house, job, "terminate")
    push(house)
    assert collector.value("gpuwarden.jobs") == 0 and collector.value("gpuwarden.ledger.events") == house.ledger.count()
    names = [span.name for span in collector.spans]
    assert names.count("job") == names.count("lease") == names.count("teardown") == 1 and "job accepted" in names
    (root,) = [span for span in collector.spans if span.name == "job"]
    assert {span.trace_id for span in collector.spans} == {root.trace_id} and root.parent_span_id == b""
    assert {span.parent_span_id for span in collector.spans if span is not root} == {root.span_id}
    assert len({span.span_id for span in collector.spans}) == len(names)
    labels = {one.key: one.value.string_value for one in root.attributes}
    assert labels["gpuwarden.person"] == "alice" and labels["gpuwarden.project"] == "llm"
    (lease,) = [span for span in collector.spans if span.name == "lease"]
    assert 59e9 <= lease.end_time_unix_nano - lease.start_time_unix_nano <= 125e9
    assert {"cli/bob"} == {a.value.string_value for a in lease.attributes if a.key == "gpuwarden.actor"}
    before = len(collector.spans)
    assert push(house) == 0 and len(collector.spans) == before, "each is sent once"


async def test_what_a_collector_did_not_take_is_sent_again_as_the_same_spans(
    house: Context, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = pointed(busy_world(house.home.parent / "busy").ctx, collector.url)
    collector.status = 400  # which is not tried again at once
    with pytest.raises(Unreachable):
        push(ctx)
    collector.status = 200
    first = push(ctx)
    assert first == len(collector.spans) > 0
    (ctx.home / telemetry.FILE).write_text("torn")
    push(ctx)
    assert len({span.span_id for span in collector.spans}) == first
    assert collector.value("gpuwarden.cost.today") > 0


@pytest.mark.attack("secrets", "puts a key and commands into names that telemetry carries")
async def test_no_text_of_a_job_and_no_secret_is_sent(house: Context, collector: Collector, tmp_path: Path) -> None:
    keys = tmp_path / "headers"
    keys.write_text("Authorization: Bearer sesame\n\nX-Scope-OrgID: team\n")
    keys.chmod(0o644)
    ctx = pointed(busy_world(tmp_path / "busy").ctx, collector.url, headers_file=str(keys))
    with pytest.raises(DiskError, match="others may read"):
        push(ctx)
    keys.chmod(0o600)
    push(ctx)
    assert (
        collector.headers[-1]["authorization"] == "Bearer sesame" and collector.headers[-1]["x-scope-orgid"] == "team"
    )
    texts = b"".join(collector.raw)
    assert b"sesame" not in texts and b"train.py" not in texts and b"python" not in texts


@pytest.mark.attack("policy", "points telemetry elsewhere in a variable")
async def test_no_variable_points_telemetry_elsewhere(
    house: Context, collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listening() as other:
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "HTTP_PROXY", "http_proxy",
                     "ALL_PROXY", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):  # fmt: skip
            monkeypatch.setenv(name, other.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "none"))
        push(house)
        assert collector.raw and not other.headers
    file = tmp_path / "policy.toml"
    file.write_text('[telemetry]\notlp_url = "https://collector.example.org:4318"\n')
    file.chmod(0o600)
    env = {"GPUWARDEN_HOME": str(tmp_path / "h"), "GPUWARDEN_POLICY": str(file)}
    config = load_config({**env, "GPUWARDEN_TELEMETRY_OTLP_URL": "https://evil.example"})
    assert config.policy.telemetry.otlp_url == "https://collector.example.org:4318"
    file.write_text('[telemetry]\notlp_url = "http://collector.example.org:4318"\n')
    with pytest.raises(BadRequest, match="otlp_url"):
        load_config(env)


async def test_the_server_sends_by_itself_and_says_once_that_it_can_not(
    house: Context, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "EVERY_S", 0.01)
    monkeypatch.setattr(telemetry, "TIMEOUT_S", 0.2)
    collector.status = 400
    with caplog.at_level(logging.WARNING, telemetry.__name__):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(telemetry.follow, house)
            while len(collector.headers) < 3:
                await anyio.sleep(0.01)
            collector.status = 200
            while not collector.metrics:
                await anyio.sleep(0.01)
            while "again" not in caplog.messages[-1] or len(caplog.messages) < 2:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    ours = [record.getMessage() for record in caplog.records if record.name == telemetry.__name__]
    assert len(ours) == 2 and "did not take" in ours[0]


@pytest.mark.attack("telemetry", "answers a byte at a time, without end, so that the server never stops")
async def test_a_collector_that_never_finishes_its_answer_keeps_nothing_waiting(
    house: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, began = threading.Event(), threading.Event()

    def endless(_ctx: Context, _message: telemetry.Message) -> None:
        began.set()
        release.wait(60)

    monkeypatch.setattr(telemetry, "send", endless)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(telemetry.follow, house)
        await anyio.to_thread.run_sync(began.wait)
        tasks.cancel_scope.cancel()
    (thread,) = [one for one in threading.enumerate() if one.name == "telemetry"]
    assert thread.daemon and not release.is_set(), "the process ends without it"
    release.set()
    await anyio.to_thread.run_sync(thread.join, 60)


async def test_without_the_sdk_the_extra_is_named(house: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(NotSupported) as error:
        push(house)
    assert "gpuwarden[otel]" in str(error.value.next_steps) + str(error.value)


def test_the_command_sends_everything(run: Cli, home: Path, collector: Collector, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert run("audit", "send")[1]["code"] == "bad_request"
    file = tmp_path / "policy.toml"
    file.write_text(f'[telemetry]\notlp_url = "{collector.url}"\n')
    file.chmod(0o600)
    monkeypatch.setenv("GPUWARDEN_POLICY", str(file))
    ledger = Ledger(home / "ledger.db", FakeClock())
    for _ in range(telemetry.PIECE + 1):
        ledger.append("job/j1", "note")
    code, body = run("audit", "send")
    assert code == 0, body
    assert len([m for m in collector.metrics if m.name == "gpuwarden.ledger.events"]) == 2
