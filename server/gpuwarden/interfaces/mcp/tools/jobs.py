"""The tools on jobs and their machines: submit_job, check_job, cancel_job and list_instances."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools that are made in a function.
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec, Verb
from gpuwarden.interfaces import results
from gpuwarden.interfaces.mcp.tools.base import ENDS, READ, WRITE, JobId, answer
from gpuwarden.interfaces.results.templates import TEMPLATES
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.wait import MAX_WAIT_S, Until, wait
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.scripts.shipped_trainers import trainer


def add(server: MCPServer[Any], ctx: Context) -> None:
    """Put the tools on a server."""
    _add_submit(server, ctx)

    @server.tool(annotations=WRITE)
    async def check_job(
        job_id: JobId,
        log_cursor: Annotated[
            int | None, Field(description="Read the log from this byte; omit for its end", ge=0)
        ] = None,
        log_bytes: Annotated[int, Field(description="Bytes of log to return", ge=0, le=16_000)] = 2_000,
        until: Annotated[Until | None, Field(description="Wait up to 45 s for this news")] = None,
    ) -> Annotated[CallToolResult, results.CheckReply]:
        """State, step, metrics, meter and log of a job, now. Also moves it on: boots, launches, resumes."""
        if until is not None:
            await wait(ctx, job_id, until, MAX_WAIT_S)
        result = await check(ctx, job_id, cursor=log_cursor, limit=log_bytes)
        values = ctx.hidden(result.texts, result.job.spec.secrets)
        return answer(ctx, results.checked(result, values), result.job.spec.secrets)

    @server.tool(annotations=ENDS)
    async def cancel_job(job_id: JobId) -> Annotated[CallToolResult, results.CheckReply]:
        """End a job's process, with a signal first so that it can save. Its machine stays and bills on."""
        return answer(ctx, results.canceled(await cancel(ctx, job_id)))

    @server.tool(name="list_instances", annotations=READ)
    async def instances() -> Annotated[CallToolResult, results.InstancesReply]:
        """Every rented machine, ours or not: state, billing, cost, job. What can't be seen is unknown, not gone."""
        return answer(ctx, results.listed(await list_instances(ctx)))


def _add_submit(server: MCPServer[Any], ctx: Context) -> None:
    @server.tool(annotations=WRITE)
    async def submit_job(
        platform: Annotated[
            str, Field(description="Profile name: local, runpod ...; rehearsal/<name> is free practice")
        ],
        script: Annotated[
            str | None, Field(description="Text of a PEP 723 Python script, or gpuwarden://templates/NAME")
        ] = None,
        command: Annotated[list[str] | None, Field(description="Argument list, instead of script")] = None,
        args: Annotated[list[str] | None, Field(description="Arguments of the script")] = None,
        name: Annotated[str, Field(description="Short name")] = "job",
        env: Annotated[dict[str, str] | None, Field(description="Plain variables, never secrets")] = None,
        secrets: Annotated[
            list[str] | None, Field(description="Names of variables the user has set, such as HF_TOKEN")
        ] = None,
        inputs: Annotated[
            list[str] | None, Field(description="Files or folders to send along, below the working directory")
        ] = None,
        outputs: Annotated[
            list[str] | None, Field(description="Files or folders to keep, relative to the working folder")
        ] = None,
        keep: Annotated[str, Field(description="Upload outputs as saved: s3://bucket/path or hf://owner/repo")] = "",
        timeout_s: Annotated[int | None, Field(description="Hard limit; estimate + 30 % or more")] = None,
        estimate_s: Annotated[int | None, Field(description="Expected run time")] = None,
        max_cost_usd: Annotated[float | None, Field(description="Stop the job at this cost")] = None,
        gpu: Annotated[str | None, Field(description="GPU name")] = None,
        gpu_count: Annotated[int, Field(description="GPUs")] = 1,
        disk_gb: Annotated[int | None, Field(description="Disk")] = None,
        interruptible: Annotated[bool, Field(description="Cheaper; resumes from its last checkpoint")] = False,
        durable_storage: Annotated[bool, Field(description="Ask for the tier that survives teardown")] = False,
        teardown: Annotated[Verb, Field(description="How the machine will end")] = "terminate",
        max_restarts: Annotated[int, Field(description="Relaunches after interruptions")] = 3,
        options: Annotated[
            dict[str, Any] | None, Field(description="What only this platform has; see its profile")
        ] = None,
        project: Annotated[str, Field(description="Tag for costs")] = "",
        dry_run: Annotated[bool, Field(description="Only check")] = False,
        receipt: Annotated[
            str | None, Field(description="From the checking call, to launch exactly these arguments")
        ] = None,
    ) -> Annotated[CallToolResult, results.SubmitReply]:
        """Check a training job and launch it. On a rented platform the first call returns findings, price and a
        receipt; calling again with the receipt launches, once. Returns at once; follow with check_job.
        """
        # The parameters of what is to run, which are the spec's fields; what was left out takes the spec's default.
        given = {
            field: value for field, value in locals().items() if field in JobSpec.model_fields and value is not None
        }
        if script is not None and script.startswith(TEMPLATES):
            given["script"] = trainer(script.removeprefix(TEMPLATES)).text
        return answer(
            ctx, results.submitted(await submit(ctx, build(JobSpec, given), dry_run=dry_run, receipt=receipt))
        )
