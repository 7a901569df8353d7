"""Test a client's entry for the server: start the server as the client does, and rehearse a job with it.

The rehearsal ends when the job's outputs are copied and proven. The server uses a ledger, a policy and a state
folder in a temporary folder, and receives no secrets.
"""

from __future__ import annotations

import logging
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from gpuwarden.app import open_context
from gpuwarden.config import PREFIX
from gpuwarden.core.errors import BadRequest, WardenError
from gpuwarden.core.models import Instance, InstanceState, JobSpec, Known
from gpuwarden.core.sanitize import SECRET_NAME, line, plain
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.interfaces.launch import FIRST_START_S, Run
from gpuwarden.interfaces.variables import variables
from gpuwarden.policy_record import Record, write_record
from gpuwarden.private import private_folder, write_private
from gpuwarden.providers.base import account_keys

POLICY: Final = """platforms = ["rehearsal/*"]
[local]
unsandboxed = true  # the script is part of gpuwarden
"""
PATIENCE_S: Final = 180.0
"""Maximum time in seconds from the server's start until the outputs are copied and proven."""
END_S: Final = 20.0
TAIL: Final = 5
"""Maximum number of lines from the server's standard error in an error message."""

Show = Callable[[str], None]


async def rehearse(title: str, run: Run, spec: JobSpec, env: Mapping[str, str], show: Show) -> None:
    """Run a job through the server entry `run` of the client `title`, and pass one line for each step to `show`.

    Raises BadRequest with the client, the command and the end of the server's standard error.
    """
    logging.getLogger("mcp").addHandler(logging.NullHandler())  # the error below reports unreadable output
    with (
        tempfile.TemporaryDirectory(prefix="gpuwarden-setup-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        scratch = _scratch(Path(folder))
        server = StdioServerParameters(
            command=run["command"], args=run["args"], env={**_passed(run, env, scratch), **scratch}, cwd=folder
        )
        try:
            with anyio.fail_after(FIRST_START_S) as limit:
                async with Client(stdio_client(server, errors), mode="legacy") as client:
                    limit.deadline = anyio.current_time() + PATIENCE_S
                    await _follow(client, spec, show)
        except Exception as error:
            errors.seek(0)
            tail = [line(row, 200) for row in errors.read().splitlines() if row.strip()][-TAIL:]
            ending = "; its standard error ends with: " + " | ".join(tail) if tail else ""
            command = line(shlex.join([run["command"], *run["args"]]), 400)
            raise BadRequest(
                f"the rehearsal through {title}'s entry failed: {_why(error)}; the command was `{command}`{ending}",
                "Run gpuwarden doctor to find the cause. Then run gpuwarden setup again.",
            ) from error
        finally:
            with anyio.move_on_after(END_S, shield=True):
                await _end_machines(scratch, spec.platform)


def _scratch(folder: Path) -> dict[str, str]:
    """Create the server's folders, and return the variables that name them."""
    home, policy = private_folder(folder / "home"), folder / "policy.toml"
    write_private(policy, POLICY)
    write_record(home, Record(path=str(policy), digest="", at=0.0, chosen=True))
    return {"GPUWARDEN_HOME": str(home), "GPUWARDEN_POLICY": str(policy), "XDG_STATE_HOME": str(folder / "state")}


def _passed(run: Run, env: Mapping[str, str], scratch: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the client passes through this entry, except secrets and gpuwarden's settings."""
    withheld = account_keys() | {v.name for v in variables() if v.secret}
    given = {
        name: value
        for name, value in env.items()
        if name not in withheld and not name.startswith(PREFIX) and not SECRET_NAME.search(name)
    } | dict(scratch)
    if "env_vars" in run:
        given = {name: given[name] for name in run["env_vars"] if name in given}
    expanded = {k: re.sub(r"\$\{(\w+):-\}", lambda m: given.get(m[1], ""), v) for k, v in run.get("env", {}).items()}
    return given | expanded


async def _follow(client: Client, spec: JobSpec, show: Show) -> None:
    name = f"{info.name} {info.version}" if (info := client.server_info) else "the server"
    show(f"started {name}, protocol {client.protocol_version}")
    show(f"listed {len((await client.list_tools()).tools)} tools")
    checked = await _call(client, "submit_job", **spec.model_dump(mode="json", exclude_defaults=True))
    show(f"checked the job {spec.name} on {spec.platform}: receipt {checked['receipt']}")
    job_id = (await _call(client, "submit_job", receipt=checked["receipt"]))["job_id"]
    show(f"submitted as {job_id}")
    state = ""
    while state not in TERMINAL_JOBS:
        seen = await _call(client, "check_job", job_id=job_id, until="state")
        if seen["state"] != state:
            state = seen["state"]
            show(f"job {state}")
    if state != "succeeded":
        raise WardenError(f"the job ended as {state}: {line(seen['why'], 200)}")
    pulled = await _call(client, "pull_artifacts", job_id=job_id)
    show(f"copied {pulled['files']} files, {pulled['bytes']:,} bytes")
    proof = await _call(client, "verify_checkpoint", job_id=job_id)
    show(f"verified the copy: {proof['verdict']}")


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool and return its reply. Raises WardenError if the reply is an error."""
    result = await client.call_tool(tool, arguments)
    body = result.structured_content or {}
    if result.is_error or not body.get("ok"):
        rules = " ".join(f["rule"] for f in body.get("findings", []))
        raise WardenError(f"{tool} answered {body.get('code', 'an error')}: {body.get('message', '')} {rules}".rstrip())
    return body


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "the time limit has passed"
    if isinstance(error, FileNotFoundError):
        return "the command does not exist"
    return line(plain(str(error)), 400) or type(error).__name__


async def _end_machines(scratch: Mapping[str, str], platform: str) -> None:
    """Terminate the simulated machines, whose processes would otherwise outlive their folder."""
    if not (Path(scratch["GPUWARDEN_HOME"]) / "ledger.db").exists():
        return
    ctx = open_context("setup", env=scratch)
    provider = ctx.provider(platform)

    async def there() -> tuple[Instance, ...]:
        found = await provider.list()
        return tuple(i for i in found.value if i.state is not InstanceState.GONE) if isinstance(found, Known) else ()

    for instance in await there():
        await provider.terminate(instance.id)
    while await there():
        await ctx.clock.sleep(0.1)
