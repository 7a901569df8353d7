"""The command line, for users and scripts. It uses the same terms as the MCP tools. Slow modules are imported inside
the commands.

With `--json` every command prints exactly one JSON object. An error prints `{"ok": false, "code", "message", "hint"}`
and exits non-zero. Exit codes: 0 done or proven, 1 refused, refuted or failed, 2 wrong usage or inconclusive.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

import click

from gpuwarden.core.errors import BadRequest, WardenError, as_warden_error
from gpuwarden.interfaces.cli import (  # each module registers its commands
    admin,
    audit,
    billing,
    estimating,
    fan_out,
    glance,
    jobs,
    knowledge,
    metrics,
    nodes,
    passkeys,
    policy,
    reference,
    rehearsal,
    rehearsing,
    serving,
    templates,
)
from gpuwarden.interfaces.cli.base import GroupedCommands, begin, cli, fail, print_open_approvals

GroupedCommands.rooms = {
    glance.__name__: "At a glance",
    jobs.__name__: "Jobs",
    fan_out.__name__: "Many runs",
    metrics.__name__: "Metrics",
    nodes.__name__: "Several nodes",
    templates.__name__: "Templates",
    estimating.__name__: "Estimates",
    rehearsing.__name__: "Rehearsal of a script",
    billing.__name__: "Billing and teardown",
    reference.__name__: "Reference",
    knowledge.__name__: "Knowledge and notes",
    policy.__name__: "Policy",
    passkeys.__name__: "Passkeys",
    serving.__name__: "HTTP server",
    audit.__name__: "Audit",
    admin.__name__: "Installation",
    rehearsal.__name__: "Practice",
}


SILENT: Final = frozenset({"mcp", "hooks"})
"""Commands whose output is meant for programs."""


def run(argv: list[str] | None = None) -> int:
    """Run a command, print the open approvals after its output, and return its exit code."""
    begin()
    code = _run(argv)
    words = sys.argv[1:] if argv is None else argv
    if not _wants_json(argv) and not SILENT & set(words[:1]):
        with contextlib.suppress(BrokenPipeError):
            print_open_approvals()
    return code


def _run(argv: list[str] | None) -> int:
    try:
        code = cli.main(argv, standalone_mode=False, prog_name="gpuwarden")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:  # for example, `gpuwarden knowledge` without a subcommand
        click.echo(error.format_message())
        return 0
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise the interpreter reports an error at exit
        return 1
    except Exception as error:
        return fail(_as_warden_error(error), _wants_json(argv))
    except KeyboardInterrupt as error:
        return fail(_as_warden_error(error), _wants_json(argv))


def _as_warden_error(error: BaseException) -> WardenError:
    """Convert any exception to a WardenError. GPUWARDEN_DEBUG=1 prints an unexpected exception's traceback."""
    if isinstance(error, WardenError):
        return error
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return BadRequest("interrupted", "Run the command again to continue.")
    if isinstance(error, click.ClickException):
        at = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "gpuwarden"
        return BadRequest(" ".join(error.format_message().split()), f"See {at} --help.")
    if os.environ.get("GPUWARDEN_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    return as_warden_error(error)


def _wants_json(argv: list[str] | None) -> bool:
    """Return whether `--json` is given before `--`; words after `--` belong to the job."""
    words = sys.argv[1:] if argv is None else argv
    return "--json" in words[: words.index("--") if "--" in words else None]
