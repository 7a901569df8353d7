"""The main command group, and the function that prints every reply."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gpuwarden.core.errors import WardenError
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.context import Context

M = TypeVar("M", bound="BaseModel")
R = TypeVar("R", bound="Result")


def _json_requested(ctx: click.Context, _: click.Parameter, asked: bool) -> bool:
    """Return whether `--json` was passed to the command or to one of its parent groups."""
    return asked or bool(ctx.parent and (ctx.parent.params.get("as_json") or _json_requested(ctx.parent, _, False)))


JSON = click.option("--json", "as_json", is_flag=True, callback=_json_requested, help="Print one JSON object.")
VERBS = click.Choice(["stop", "terminate"])
EXITS = {"unknown": 2, "bad_request": 2}


class GroupedCommands(click.Group):
    """A group whose help lists the commands by module, in the order in which each module defines them."""

    rooms: ClassVar[dict[str, str]] = {}
    """The heading for each module, by module name. `interfaces/cli/main.py` fills this table."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        limit = formatter.width - 6 - max(map(len, shown))
        for module, heading in self.rooms.items():
            here = [(n, c) for n, c in shown.items() if getattr(c.callback, "__module__", "") == module]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in here])


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from gpuwarden import __version__

        click.echo(__version__)
        ctx.exit()


@click.group(
    cls=GroupedCommands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
@JSON
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> int | None:
    """The safety layer between coding agents and metered GPUs.

    Without a command, gpuwarden shows running jobs, open approvals and billing.

    New here? `gpuwarden demo` shows a training job from start to teardown in half a minute, at no cost.
    """
    if ctx.invoked_subcommand is not None:
        return None
    found: int = ctx.invoke(cli.commands["status"], as_json=as_json, offline=False)
    return found


def emit(body: dict[str, Any]) -> None:
    """Print one JSON object in ASCII, because names may contain characters that a terminal can't show."""
    click.echo(json.dumps(redacted(body)))


def redacted(body: Any) -> Any:
    """Redact the secrets in a JSON body: those of this shell, and those passed to jobs from other shells."""
    from gpuwarden.config import load_config
    from gpuwarden.core.errors import WardenError
    from gpuwarden.core.sanitize import scrubbed, secret_values
    from gpuwarden.known_secrets import KnownSecrets

    try:
        known = KnownSecrets(load_config().home).found_in(body)
    except (WardenError, OSError):  # the settings are invalid, and the body already reports that
        known = ()
    return scrubbed(body, (*secret_values(os.environ), *known))


def without_secrets(model: M) -> M:
    """Return a reply with all secrets redacted."""
    body = model.model_dump(mode="json")
    clean = redacted(body)
    return model if clean == body else type(model).model_validate(clean)


def fail(error: WardenError, as_json: bool, code: int | None = None) -> int:
    """Print an error and return its exit code."""
    from gpuwarden.interfaces.results.base import error_reply

    shown = answer(error_reply(error), as_json, "failed")
    return shown if code is None else code


def name_values(option: str, words: Iterable[str], fix: str) -> list[tuple[str, str]]:
    """Split an option's NAME=VALUE words. Raises BadRequest with the advice `fix` for any other word."""
    from gpuwarden.core.errors import BadRequest

    found = [word.partition("=") for word in words]
    if not all(name and mark for name, mark, _ in found):
        raise BadRequest(f"{option} takes NAME=VALUE", fix)
    return [(name, value) for name, _, value in found]


def open_context(actor: str = "cli") -> Context:
    """Return a context for this user's settings and ledger. Next steps in its alerts are rendered as commands."""
    from gpuwarden.app import open_context
    from gpuwarden.interfaces.cli.wording import in_commands

    ctx = open_context(actor)
    ctx.phrase = in_commands  # alerts go to the user
    _RUN.ctx = ctx
    return ctx


@dataclass
class _Run:
    """One invocation of the CLI: its context, and whether its output lists every open approval (`named`)."""

    ctx: Context | None = None
    named: bool = False


_RUN = _Run()


def begin() -> None:
    """Reset the previous run's state, for a process that runs several commands."""
    _RUN.ctx, _RUN.named = None, False


SCREENS: Final = frozenset({"status", "jobs", "costs", "waits"})
"""Replies that the `screen` module prints."""
_SHOW_IT_ALL: Final = frozenset({"status", "waits"})
"""Replies that already list every open approval."""


def print_open_approvals() -> None:
    """Print the open approvals after a command's output at a terminal, even if the command did not open the ledger."""
    if _RUN.named or not sys.stdout.isatty():
        return
    from gpuwarden.config import load_config
    from gpuwarden.core.errors import WardenError
    from gpuwarden.interfaces.cli import console, screen
    from gpuwarden.lifecycle.monitoring.waiting import what_waits

    with contextlib.suppress(WardenError, OSError):  # the command itself has already finished
        config = load_config()
        if _RUN.ctx is None and not (config.home / "ledger.db").exists():
            return
        for text in screen.pending(what_waits(_RUN.ctx or open_context())):
            console.out.print(text, soft_wrap=True)


def warned(reply: R, ctx: Context) -> R:
    """Add warnings to a reply: problems with the policy, and a watch that is needed but not running."""
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli.wording import in_commands
    from gpuwarden.lifecycle.leases.auto_teardown import notices

    return results.warned(reply, notices(ctx), in_commands)


def runs_async(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., int]:
    """Wrap a coroutine function so that click can call it."""

    @wraps(command)
    def run_it(*args: Any, **kwargs: Any) -> int:
        import anyio

        return anyio.run(lambda: command(*args, **kwargs))

    return run_it


def answer(reply: Result, as_json: bool, show: str) -> int:
    """Print a reply with its next steps as commands, and return its exit code."""
    from gpuwarden.interfaces.cli.wording import in_commands
    from gpuwarden.interfaces.results import worded

    reply = without_secrets(worded(reply, in_commands))
    if as_json:
        emit(reply.model_dump(mode="json"))
    else:
        drawing = "screen" if show in SCREENS else "console"
        import_module("gpuwarden.interfaces.cli.console").warnings(reply)
        getattr(import_module(f"gpuwarden.interfaces.cli.{drawing}"), show)(reply)
        _RUN.named = show in _SHOW_IT_ALL
    return 0 if reply.ok else EXITS.get(reply.code, 1)
