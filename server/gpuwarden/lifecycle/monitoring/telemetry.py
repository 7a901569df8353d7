"""Send what the ledger records to an OpenTelemetry collector, as spans and metrics over OTLP/HTTP.

A job is a trace: a span from its acceptance to its end, one for each state in between, one for each of its machines
while the meter ran, and one for each request to end a machine. A span is sent once its subject has come to rest; ids
follow from the ledger, so a repeated one is the same span. Only ids, names, states, people and costs are sent, never
the text of a job, a machine or a platform. Which events have been sent is kept beside the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.from_thread
import anyio.lowlevel

from gpuwarden import __version__
from gpuwarden.core.errors import NotSupported, Unreachable, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.spending import charges, day_start
from gpuwarden.lifecycle.records import job_ids, read_job
from gpuwarden.people import person_of
from gpuwarden.private import read_private, write_private

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)
FILE: Final = "telemetry.json"
PIECE: Final = 500
"""Events that are looked at for one message."""
TIMEOUT_S: Final = 10.0
EVERY_S: Final = 30.0
"""How often the server looks for more."""
_AT_REST: Final[Mapping[str, frozenset[str]]] = {
    "job": frozenset(TERMINAL_JOBS),
    "lease": frozenset({Lease.STOPPED, Lease.NONE}),
    "teardown": frozenset({Teardown.VERIFIED_STOPPED, Teardown.WITHDRAWN, Teardown.NEEDS_HUMAN}),
}
Labels = dict[str, str]


@dataclass(frozen=True)
class Span:
    """One span, times in seconds since the epoch. `key` and `parent` name spans uniquely, `trace` their job."""

    name: str
    trace: str
    key: str
    parent: str
    begun: float
    ended: float
    labels: Labels
    failed: bool = False


@dataclass(frozen=True)
class Message:
    """One shipment: spans of events up to `seq`, and values as they are now. `more`: there are later events."""

    spans: tuple[Span, ...]
    values: tuple[tuple[str, str, float, Labels], ...]
    seq: int
    more: bool


def gather(ctx: Context) -> Message:
    """Return what is to be sent next. Raises LedgerError."""
    try:
        after = int(json.loads((ctx.home / FILE).read_text("utf-8"))["seq"])
    except (OSError, ValueError, KeyError, TypeError):
        after = 0  # all is sent again
    events = ctx.ledger.events(after=after, limit=PIECE)
    found = [
        span
        for event in events
        if event.state in _AT_REST.get(event.subject.partition("/")[0], ())
        for span in _spans(ctx, event.subject, event.seq)
    ]
    seq = events[-1].seq if events else after
    return Message(tuple(found), tuple(_values(ctx)), seq, len(events) == PIECE)


def _spans(ctx: Context, subject: str, until: int) -> Iterator[Span]:
    """Yield the spans of a subject that came to rest with the event of a number."""
    machine = subject.partition("/")[0]
    moves = [e for e in ctx.ledger.history(subject) if e.state is not None and e.seq <= until]
    rests = [n for n, e in enumerate(moves[:-1]) if e.state in _AT_REST[machine]]
    moves = moves[rests[-1] + 1 if rests else 0 :]  # a machine that was started again has another span
    row = ctx.ledger.row(subject)
    job_id = subject.removeprefix("job/") if machine == "job" else (row.job if row else None)
    if job_id is None or ctx.ledger.state(f"job/{job_id}") in {None, Job.REFUSED}:
        return
    job, last = read_job(ctx.ledger, job_id), moves[-1]
    labels = {
        "gpuwarden.job": job_id,
        "gpuwarden.platform": job.spec.platform,
        "gpuwarden.project": line(job.spec.project, 80),
        "gpuwarden.person": job.person,
        "gpuwarden.subject": subject,
        "gpuwarden.state": str(last.state),
    }
    key, root = f"{subject}#{moves[0].seq}", f"job/{job_id}"
    if machine == "job":
        failed = last.state == Job.FAILED
        yield Span("job", root, root, "", moves[0].at, last.at, labels, failed)
        for one, following in pairwise(moves):
            phase = labels | {"gpuwarden.state": str(one.state), "gpuwarden.actor": one.actor}
            yield Span(f"job {one.state}", root, f"{subject}#{one.seq}", root, one.at, following.at, phase)
    else:
        who = {"gpuwarden.actor": last.actor, "enduser.id": person_of(last.actor)}
        yield Span(machine, root, key, root, moves[0].at, last.at, labels | who)


def _values(ctx: Context) -> Iterator[tuple[str, str, float, Labels]]:
    """Yield the name, the unit, the value and the labels of every metric as it is now."""
    for state in (s for s in Job if s not in TERMINAL_JOBS):
        yield "gpuwarden.jobs", "{job}", float(len(job_ids(ctx.ledger, state))), {"gpuwarden.state": str(state)}
    billing: dict[str, int] = {}
    for subject in ctx.ledger.subjects("lease", *LIVE_LEASES):
        row = ctx.ledger.row(subject)
        platform = (row.platform if row else None) or "unknown"
        billing[platform] = billing.get(platform, 0) + 1
    for platform, count in billing.items():
        yield "gpuwarden.machines.billing", "{machine}", float(count), {"gpuwarden.platform": platform}
    costs: dict[tuple[str, str, str], float] = {}
    for one in charges(ctx, day_start(ctx.clock.now())):
        if not one.pretend and one.usd is not None:
            whose = (one.platform, line(one.project, 80), one.person)
            costs[whose] = costs.get(whose, 0.0) + one.usd
    for (platform, project, person), cost in costs.items():
        whose_labels = {"gpuwarden.platform": platform, "gpuwarden.project": project, "gpuwarden.person": person}
        yield "gpuwarden.cost.today", "USD", cost, whose_labels
    yield "gpuwarden.alerts.open", "{alert}", float(len(ctx.ledger.standing_alerts())), {}
    yield "gpuwarden.ledger.events", "{event}", float(ctx.ledger.last_seq()), {}


def send(ctx: Context, message: Message) -> None:
    """Send a message; it is sent again where the collector did not take all of it. Call it in a thread.

    Raises Unreachable, NotSupported without the extra, or DiskError.
    """
    policy = ctx.policy.telemetry
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise NotSupported(
            "the policy names an OpenTelemetry collector, and its client is not installed here",
            "Install it: pip install 'gpuwarden[otel]'.",
        ) from error
    headers = {"x-gpuwarden": __version__}
    for row in read_private(policy.headers_file, "collector's headers").splitlines() if policy.headers_file else ():
        name, colon, value = row.partition(":")
        headers |= {name.strip().lower(): value.strip()} if colon else {}
    taken = True
    with requests.Session() as session:
        session.trust_env = False  # no variable leads it through another proxy, or trusts another authority
        where = f"{(policy.otlp_url or '').rstrip('/')}/v1"
        options: dict[str, Any] = {"headers": headers, "timeout": TIMEOUT_S, "session": session}
        if message.spans:
            spans = OTLPSpanExporter(endpoint=f"{where}/traces", **options)
            session.verify, session.cert = True, None  # the exporter reads both from variables
            taken = spans.export(_readable(message.spans)) is SpanExportResult.SUCCESS
        metrics = OTLPMetricExporter(endpoint=f"{where}/metrics", **options)
        session.verify, session.cert = True, None
        taken = taken and metrics.export(_measured(message)) is MetricExportResult.SUCCESS
    if not taken:
        raise Unreachable(
            f"the OpenTelemetry collector {where} did not take what was sent", "It is sent again at the next round."
        )
    write_private(ctx.home / FILE, json.dumps({"seq": message.seq}))


async def follow(ctx: Context) -> None:
    """Send, until canceled, what is new. What a collector does not take is sent again, and said once."""
    said = ""
    while True:
        more, trouble = False, ""
        try:
            message = gather(ctx)
            await _send_apart(ctx, message)
            more = message.more
        except WardenError as error:
            trouble = error.message
        if trouble != said:
            logger.warning("telemetry: %s", trouble or "the collector takes what is sent again")
        said = trouble
        await anyio.sleep(0 if more else EVERY_S)


async def _send_apart(ctx: Context, message: Message) -> None:
    """Send in a thread that the process does not wait for, as it would for a worker's. Raises as `send` does.

    A collector may answer a byte at a time, without end. The server would not end then, nor its successor start the
    watch.
    """
    done, token, failed = anyio.Event(), anyio.lowlevel.current_token(), list[Exception]()

    def work() -> None:
        try:
            send(ctx, message)
        except Exception as error:
            failed.append(error)
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            anyio.from_thread.run_sync(done.set, token=token)

    threading.Thread(target=work, name="telemetry", daemon=True).start()
    await done.wait()
    for error in failed:
        raise error


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")


def _readable(spans: Sequence[Span]) -> list[ReadableSpan]:
    """Return spans as the SDK exports them."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(trace: str, key: str) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(_number(trace, 16), _number(key, 8), is_remote=False, trace_flags=sampled)

    return [
        ReadableSpan(
            name=span.name,
            context=context(span.trace, span.key),
            parent=context(span.trace, span.parent) if span.parent else None,
            resource=Resource(_RESOURCE),
            attributes={name: value for name, value in span.labels.items() if value},
            status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
            start_time=int(span.begun * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=InstrumentationScope("gpuwarden", __version__),
        )
        for span in spans
    ]


_RESOURCE: Final = {"service.name": "gpuwarden", "service.version": __version__}


def _measured(message: Message) -> MetricsData:
    """Return the values as the SDK exports them."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.resources import Resource

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource(_RESOURCE), shutdown_on_exit=False)
    meter, gauges = provider.get_meter("gpuwarden", __version__), dict[str, Any]()
    for name, unit, value, labels in message.values:
        gauge = gauges.setdefault(name, None) or meter.create_gauge(name, unit)
        gauges[name] = gauge
        gauge.set(value, {key: text for key, text in labels.items() if text})
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None, "the number of events is always measured"
    return data
