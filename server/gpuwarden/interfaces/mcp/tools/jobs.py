"""Tools for jobs and their machines: submit_job, check_job, cancel_job and list_instances."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools defined in a function.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mcp.server.mcpserver import Context as ClientContext
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from gpuwarden.core.errors import BadRequest, NotSupported
from gpuwarden.core.fan_out import gridded
from gpuwarden.core.guidance import is_fan_out
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec, Resources, Until, Verb
from gpuwarden.interfaces import results
from gpuwarden.interfaces.mcp.cards import with_card
from gpuwarden.interfaces.mcp.resources import TEMPLATES
from gpuwarden.interfaces.mcp.tools.base import ENDS, READ, WRITE, JobId, answer

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context


def add(server: MCPServer[Any], ctx: "Context") -> None:
    """Add the tools to a server."""
    _add_submit(server, ctx)

    @server.tool(annotations=WRITE)
    async def check_job(
        job_id: JobId,
        log_cursor: Annotated[int | None, Field(description="Log from this byte; omit for the end", ge=0)] = None,
        log_bytes: Annotated[int, Field(description="Bytes of log to return", ge=0, le=16_000)] = 2_000,
        until: Annotated[Until | None, Field(description="Wait up to 45 s for this event")] = None,
        client: ClientContext[Any, Any] = None,  # type: ignore[assignment]
    ) -> Annotated[CallToolResult, results.CheckReply]:
        """Return a job's state, step, metrics, billing and log. Also advances the job: boot, launch, resume."""
        if is_fan_out(job_id):
            from gpuwarden.lifecycle.fan_out.launching import advance_fan_out

            found = await advance_fan_out(ctx, job_id)
            assert found.now is not None
            return answer(ctx, results.fan_out_checked(found, found.now))
        from gpuwarden.lifecycle.monitoring.check import check
        from gpuwarden.lifecycle.monitoring.wait import MAX_WAIT_S, wait

        if until is not None:
            await wait(ctx, job_id, until, MAX_WAIT_S)
        result = await check(ctx, job_id, cursor=log_cursor, limit=log_bytes)
        values = ctx.hidden(result.texts, result.job.spec.secrets)
        reply = answer(ctx, results.checked(result, values), result.job.spec.secrets)
        return await with_card(client, reply, ctx, result)

    @server.tool(annotations=ENDS)
    async def cancel_job(
        job_id: JobId,
        action: Annotated[
            Literal["cancel", "pause", "resume"], Field(description="pause lets the job be resumed later")
        ] = "cancel",
    ) -> Annotated[CallToolResult, results.CheckReply]:
        """Signal a job's process so that it can save, then end it. Its machine keeps running and is billed."""
        if is_fan_out(job_id):
            if action == "pause":
                raise NotSupported("a fan-out can't be paused", "Cancel it and resume it later: proven cells are kept.")
            from gpuwarden.lifecycle.fan_out.deciding import cancel_fan_out, continue_fan_out

            decided = {"cancel": cancel_fan_out, "resume": continue_fan_out}[action]
            found = await decided(ctx, job_id, ctx.ledger.acting)
            assert found.now is not None
            return answer(ctx, results.fan_out_checked(found, found.now))
        from gpuwarden.lifecycle.monitoring.check import cancel, pause, resume

        use_case = {"cancel": cancel, "pause": pause, "resume": resume}[action]
        return answer(ctx, results.signaled(await use_case(ctx, job_id)))

    @server.tool(name="list_instances", annotations=READ)
    async def instances(
        offers_for: Annotated[str | None, Field(description="GPU to price on every platform")] = None,
        client: ClientContext[Any, Any] = None,  # type: ignore[assignment]
    ) -> Annotated[CallToolResult, results.InstancesReply]:
        """List all machines in the user's accounts: state, billing, cost, job. Unreadable ones may still exist."""
        from gpuwarden.lifecycle.monitoring.inventory import list_instances
        from gpuwarden.lifecycle.offers import offers

        reply = results.listed(await list_instances(ctx))
        if offers_for:
            reply.offers = results.offered(await offers(ctx, Resources(gpu=offers_for))).offers
        return await with_card(client, answer(ctx, reply), ctx, reply)


def _add_submit(server: MCPServer[Any], ctx: "Context") -> None:
    @server.tool(annotations=WRITE)
    async def submit_job(
        platform: Annotated[
            str | None, Field(description="local, runpod ...; rehearsal/<name> simulates it for free")
        ] = None,
        script: Annotated[
            str | None,
            Field(description="PEP 723 script: path, text, or gpuwarden://templates/NAME"),
        ] = None,
        command: Annotated[list[str] | None, Field(description="Argument list, instead of script")] = None,
        args: Annotated[list[str] | None, Field(description="Script's arguments")] = None,
        name: Annotated[str, Field(description="Short name")] = "job",
        env: Annotated[dict[str, str] | None, Field(description="Plain variables, never secrets")] = None,
        secrets: Annotated[list[str] | None, Field(description="Names of environment variables: HF_TOKEN")] = None,
        inputs: Annotated[
            list[str] | None, Field(description="Files or folders in the working directory to send")
        ] = None,
        outputs: Annotated[list[str] | None, Field(description="Paths in the working folder to keep")] = None,
        artifact_store: Annotated[str, Field(description="Upload outputs to s3://bucket/path or hf://owner/repo")] = "",
        timeout_s: Annotated[int | None, Field(description="Hard limit; estimate + 30 % or more")] = None,
        estimate_s: Annotated[int | None, Field(description="Expected run time")] = None,
        max_cost_usd: Annotated[float | None, Field(description="Stop the job at this cost")] = None,
        gpu: Annotated[str | None, Field(description="GPU name")] = None,
        gpu_count: Annotated[int, Field(description="GPUs")] = 1,
        disk_gb: Annotated[int | None, Field(description="Disk")] = None,
        interruptible: Annotated[bool, Field(description="Cheaper; resumes from a checkpoint")] = False,
        durable_storage: Annotated[bool, Field(description="Storage that survives teardown")] = False,
        teardown: Annotated[Verb, Field(description="How to end the machine")] = "terminate",
        max_restarts: Annotated[int, Field(description="Relaunches after interruptions")] = 3,
        alternatives: Annotated[list[str] | None, Field(description="If no capacity: PLATFORM[:GPU]")] = None,
        options: Annotated[dict[str, Any] | None, Field(description="Platform options; see its profile")] = None,
        project: Annotated[str, Field(description="Cost tag")] = "",
        grid: Annotated[
            dict[str, list[str]] | None, Field(description="Fan-out over combinations of --name=value")
        ] = None,
        seeds: Annotated[int, Field(description="Fan-out over --seed=0 to n-1", ge=0, le=1_000)] = 0,
        max_machines: Annotated[int, Field(description="Fan-out machines at once", ge=1, le=256)] = 1,
        dry_run: Annotated[bool, Field(description="Only check")] = False,
        rehearse: Annotated[bool, Field(description="Run the first step here")] = False,
        receipt: Annotated[str | None, Field(description="From the check; pass it alone to launch")] = None,
    ) -> Annotated[CallToolResult, results.SubmitReply]:
        """Check a training job and launch it. On a rented platform the first call returns findings, price and a
        receipt; a call with only that receipt launches, once. Returns at once; follow with check_job.
        """
        # The parameters that are spec fields; an omitted parameter gets the spec's default.
        given = {
            field: value for field, value in locals().items() if field in JobSpec.model_fields and value is not None
        }
        from gpuwarden.lifecycle.fan_out.accepting import fan_out
        from gpuwarden.lifecycle.receipts import launch_receipt
        from gpuwarden.lifecycle.submission.bundling import script_file, with_trainer_package
        from gpuwarden.lifecycle.submission.submit import Submission, submit

        if receipt and not (dry_run or rehearse or script or command or grid or seeds):
            found = await launch_receipt(ctx, receipt, given)
            reply = results.submitted(found) if isinstance(found, Submission) else results.fanned_out(found)
            return answer(ctx, reply)
        if platform is None:
            raise BadRequest("platform is missing", "Name a platform, or launch with only a receipt.")
        file = ""
        if script is not None and script.startswith(TEMPLATES):
            from gpuwarden.static_analysis.shipped_trainers import trainer

            given["script"] = trainer(script.removeprefix(TEMPLATES)).text
        elif script is not None and script.endswith(".py") and "\n" not in script:
            given["script"], file = script_file(ctx.cwd or Path.cwd(), script), script
        elif script is not None:
            given["script"] = with_trainer_package(script)
        if grid or seeds:
            if rehearse:
                raise BadRequest("a fan-out can't be rehearsed; nothing was done", "Rehearse one cell: pass its args.")
            limits = {"max_machines": max_machines, "max_cost_usd": max_cost_usd}
            plan = gridded(build(JobSpec, given), grid or {}, seeds, **limits)
            rows = await fan_out(ctx, plan, dry_run=dry_run, receipt=receipt, script_file=file)
            return answer(ctx, results.fanned_out(rows))
        spec = build(JobSpec, given)
        job = await submit(ctx, spec, dry_run=dry_run, receipt=receipt, script_file=file, rehearse=rehearse)
        return answer(ctx, results.submitted(job))
