"""A job's view for its page: progress, cost, evidence, machine, diagnosis, log and timeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.guidance import Action, NextStep, do
from gpuwarden.core.models import Heartbeat
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.next_step import Copy
from gpuwarden.core.plural import counted
from gpuwarden.core.reasons import Code
from gpuwarden.core.sanitize import unfenced
from gpuwarden.core.states import Job
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.drawing import local, span
from gpuwarden.interfaces.http.pages.now import job_row
from gpuwarden.interfaces.http.pages.rendering import ACTIVE, Row, View, shown, size, step_rows
from gpuwarden.interfaces.results.check import CheckReply
from gpuwarden.interfaces.results.history import quoted_events
from gpuwarden.interfaces.results.overview import job_line
from gpuwarden.lifecycle.artifacts.proof_steps import ProofStage, ProofStep, StageState, proof_steps
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.monitoring.check import PAUSABLE, CheckedJob
from gpuwarden.lifecycle.monitoring.overview import JobLine, line_of
from gpuwarden.lifecycle.records import JobRecord, read_job, story

EVENTS: Final = 200
"""Maximum number of events in a timeline. The latest events are shown."""
FULL: Final = 95.0
"""Memory or disk usage, in percent, at which a gauge is highlighted."""
TITLES: Final = {
    ProofStage.DECLARED: "Outputs declared",
    ProofStage.COPIED: "Copied to this machine",
    ProofStage.EQUAL: "Digests equal",
    ProofStage.LOADED: "Loads as a checkpoint",
    ProofStage.STORED: "In the artifact store",
}
HELD: Final = {
    StageState.YES: "yes",
    StageState.NO: "no",
    StageState.NOT_YET: "not yet",
    StageState.UNKNOWN: "unknown",
    StageState.UNASKED: "not requested",
}
COPIES: Final = {
    Copy.STALE: "copied before the job ended or another output was declared",
    Copy.PARTIAL: "some files could not be copied",
    Copy.EMPTY: "the machine has none of the outputs",
}


def job_view(ctx: Context, job_id: str, seen: CheckedJob | None, error: WardenError | None) -> View:
    """Return the view of one job, based on its last poll `seen` or, without a poll, on the ledger. Raises NotFound."""
    job = read_job(ctx.ledger, job_id)
    line = line_of(ctx, job)
    # If the machine is gone, its last poll contains the job's progress.
    last = replace(seen, observation=line.seen) if seen and not seen.observation and job.state not in ACTIVE else seen
    reply = (
        results.checked(last, ctx.hidden(last.texts, job.spec.secrets))
        if last
        else CheckReply(job_id=job.id, state=job.state, why=job.why)
    )
    steps, row = seen.next_steps if seen else following(ctx, job), job_row(job_line(line))
    stays = f"{' and '.join(line.storage)} still billed" if line.storage else ""
    return {
        "texts": {
            **_texts(job, reply),
            "to_come": _to_come(reply, line),
            "ending": row["ending"],
            "cost": usd(line.cost_usd, line.estimated),
            "rate": f"billed {usd_per_hour(line.price_usd_per_hour)}" if line.billing else stays or "not billed",
            "worst": usd(job.worst_cost) if job.worst_cost is not None else "unknown",
            "looked": _looked(seen, error),
            "control": "Resume this job" if job.state is Job.PAUSED else "Pause this job",
        },
        "numbers": {"percent": 100 * reply.step / reply.total_steps if reply.step and reply.total_steps else 0.0},
        "flags": {
            "progress": bool(reply.step and reply.total_steps),
            "billing": line.billing,
            "active": job.state in ACTIVE,
            "silent": seen is None,
            "log": bool(seen and seen.log),
        },
        "meters": {"cost": {"amount": line.cost_usd, "rate": (line.price_usd_per_hour or 0.0) * line.billing}},
        "lists": {
            "steps": step_rows(steps),
            "controls": step_rows(controls(ctx, job)),
            "rungs": [step_row(step) for step in proof_steps(ctx, job)],
            "store": _store(reply),
            "health": list(_health(seen)),
            "metrics": [{"key": k, "name": shown(k), "value": f"{v:.6g}"} for k, v in reply.metrics.items()],
            "alerts": [{"key": text, "text": shown(text)} for text in reply.alerts],
            "diagnoses": [
                {
                    "key": d.id,
                    "href": f"/knowledge/{d.id}",
                    "state": d.certainty,
                    "name": f"{d.id} {shown(d.title)}",
                    "certainty": d.certainty,
                    "text": shown(d.why),
                    "fix": shown(d.fix),
                    "lines": shown(unfenced(d.lines)) if d.lines else "",
                }
                for d in reply.diagnoses
            ],
            "clocks": [
                {
                    "key": f"{c.at} {c.trigger}",
                    "name": local(c.at, "%m-%d %H:%M"),
                    "text": f"{shown(c.trigger)}: {shown(c.effect)}",
                }
                for c in job_line(line).clocks
            ],
            "events": event_rows(ctx, job_id),
        },
        "job": row,
        "log": log_view(seen),
    }


def controls(ctx: Context, job: JobRecord) -> tuple[NextStep, ...]:
    """Return the step that pauses or resumes a job. The page shows the step as a command, because the page's session is
    read-only.
    """
    if job.state is Job.PAUSED and not job.resume_requested:
        return (do(Action.RESUME, "to continue from its checkpoint, within the approval and the caps", job_id=job.id),)
    serverless = ctx.profile(job.spec.platform).kind == "serverless"
    if job.state not in PAUSABLE or job.pausing or serverless:
        return ()
    return (do(Action.PAUSE, "to let it save and end its process; the machine is still billed", job_id=job.id),)


def _texts(job: JobRecord, reply: CheckReply) -> Row:
    whole = f"of {reply.total_steps:,}" if reply.total_steps and reply.step is not None else ""
    source = {
        "metrics": "from its metrics",
        "output": "from its output",
        "files": "from saved files",
        "posted": "from its posted metrics",
    }.get(reply.progress_from, "")
    return {
        "state": reply.state,
        "why": shown(reply.why) if reply.why != reply.state else "",
        "note": shown(reply.message),
        "name": shown(job.spec.name),
        "platform": shown(job.spec.platform),
        "project": shown(job.spec.project),
        "step": f"{reply.step:,}" if reply.step is not None else "-",
        "source": ", ".join(filter(None, (whole, source))),
        "started": local(reply.started_at, "%Y-%m-%d %H:%M"),
        "accepted": local(job.accepted_at, "%Y-%m-%d %H:%M"),
        "elapsed": span(reply.elapsed_s),
        "left": span(reply.remaining_s),
        "attempt": str(max(1, reply.attempt)),
        # The reason for a normal exit already contains the exit code.
        "exit": "" if reply.exit_code is None or reply.reason == Code.EXITED else f"exit code {reply.exit_code}",
    }


def _to_come(reply: CheckReply, line: JobLine) -> str:
    """Return the projected cost at the job's last step. It is estimated here if the provider reports costs late."""
    if reply.projected_cost_usd is not None:
        return usd(reply.projected_cost_usd)
    if reply.remaining_s is None or line.cost_usd is None or line.price_usd_per_hour is None:
        return "-"
    return usd(line.cost_usd + line.price_usd_per_hour * reply.remaining_s / 3_600)


def _looked(seen: CheckedJob | None, error: WardenError | None) -> str:
    if error is not None:
        return f"the last poll failed: {shown(error.message)}"
    if seen is None:
        return "polling the machine"
    return f"updated {local(seen.observation.at, '%H:%M:%S')}" if seen.observation and seen.observation.at else ""


def step_row(step: ProofStep) -> Row:
    """Return one verification step.

    Its text describes the evidence, such as the number of files, their size and the time.
    """
    parts = []
    if step.files is not None:
        parts.append(counted(step.files, "file") + (f", {size(step.bytes)}" if step.bytes is not None else ""))
    if step.names:
        parts.append(", ".join(shown(name) for name in step.names[:5]))
    if step.copy in COPIES:
        parts.append(COPIES[step.copy])
    if step.stage is ProofStage.STORED and step.names:
        parts.append("compared with the machine's files when teardown is requested")
    if step.at is not None and step.stage is not ProofStage.DECLARED:
        parts.append(local(step.at, "%m-%d %H:%M"))
    parts += [shown(problem) for problem in step.problems[:3]]
    return {
        "key": step.stage,
        "state": step.state,
        "name": TITLES[step.stage],
        "held": HELD[step.state],
        "text": " · ".join(parts),
    }


def _store(reply: CheckReply) -> list[Row]:
    """Return the files in the job's artifact store; no rows while the machine itself can be read."""
    if (store := reply.artifact_store) is None:
        return []
    what = f"{counted(store.files, 'file')}, {size(store.bytes)}" if store.files else ""
    parts = [what, ", ".join(map(shown, store.newest)), shown(store.why)]
    return [{"key": store.store, "name": shown(store.store), "text": " · ".join(filter(None, parts))}]


def _health(seen: CheckedJob | None) -> list[Row]:
    """Return the machine's last report as gauges, each with the percentage in use."""
    observed = seen.observation if seen else None
    beat = observed.beat if observed and observed.beat else Heartbeat()
    disk = _used(beat.disk_free, beat.disk_total)
    inodes = _used(beat.inodes_free, beat.inodes_total)
    rows = [
        _gauge("GPU", beat.gpu_util, 100.0, f"{beat.gpu_util or 0:.0f} %"),
        _gauge("GPU memory", beat.gpu_mem_used, None, size(beat.gpu_mem_used)),
        _gauge("Memory", beat.mem_used, beat.mem_limit, f"{size(beat.mem_used)} of {size(beat.mem_limit)}"),
        _gauge("Disk", disk, beat.disk_total, f"{size(beat.disk_free)} free of {size(beat.disk_total)}"),
        _gauge("Inodes", inodes, beat.inodes_total, f"{beat.inodes_free or 0:,} free of {beat.inodes_total or 0:,}"),
        _gauge("Killed for memory", beat.oom_kills or None, None, counted(beat.oom_kills or 0, "time"), bad=True),
        _gauge(
            "Last heartbeat",
            observed.last_beat_at if observed else None,
            None,
            local(observed.last_beat_at if observed else None, "%H:%M:%S"),
            bad=bool(observed and observed.stale),
        ),
    ]
    return [row for row in rows if row is not None]


def _used(free: int | None, total: int | None) -> int | None:
    return None if free is None or total is None else total - free


def _gauge(name: str, used: float | None, of: float | None, value: str, *, bad: bool = False) -> Row | None:
    """Return one gauge, or None if the machine does not report the value.

    Full memory or a full disk is highlighted; a busy GPU is not.
    """
    if used is None:
        return None
    share = 100 * used / of if of else None
    bad = bad or (share is not None and share >= FULL and name != "GPU")
    percent = "" if share is None else f"{min(100.0, share):.1f}"
    return {"key": name, "name": name, "value": value, "percent": percent, "state": "bad" if bad else ""}


def event_rows(ctx: Context, job_id: str) -> list[Row]:
    """Return the ledger's events for a job, its machines and its tickets, latest first."""
    events = story(ctx.ledger, job_id)[-EVENTS:]
    rows = quoted_events([event.as_dict() for event in reversed(events)])
    return [
        {
            "key": str(row["seq"]),
            "at": local(row["at"], "%m-%d %H:%M:%S"),
            "name": str(row["kind"]).replace(".", " ").replace("_", " "),
            "state": str(row["state"] or ""),
            "subject": shown(row["subject"]),
            "page": f"/approve/{ticket}" if (ticket := str(row["subject"]).partition("teardown/")[2]) else "",
            "actor": shown(row["actor"]),
            "text": shown(row["body"].get("why") or row["body"].get("by") or ""),
        }
        for row in rows
    ]


def log_view(seen: CheckedJob | None) -> View:
    """Return the end of a log: its readable text, its start offset and the log's size in bytes."""
    if seen is None or seen.log is None:
        return {"text": "", "start": 0, "size": 0}
    return {"text": seen.log.text, "start": seen.log.start, "size": seen.log.size}
