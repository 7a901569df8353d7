"""Add the server and the guard to clients, and remove them again.

Setup only adds entries: an existing entry named gpuwarden and an installed guard stay unchanged. An agent that runs
setup can therefore only add the guard. Only the user at a terminal can undo the setup or replace an older guard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field

from gpuwarden import __version__
from gpuwarden.config import Config
from gpuwarden.core.errors import BadRequest, WardenError
from gpuwarden.core.models import JobSpec
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.hooks.install import CLIENTS as HOOKED
from gpuwarden.interfaces.hooks.install import NOT_TRUSTED, TRUST, by_plugin, hook_lines, hooks, replace_text
from gpuwarden.interfaces.launch import Run, entry, from_folder, in_cache, own_command
from gpuwarden.interfaces.results import Result
from gpuwarden.interfaces.setup.changes import (
    Change,
    SetupRecord,
    WrittenChange,
    lines_of,
    planned,
    read_note,
    undone,
    write_note,
)
from gpuwarden.interfaces.setup.clients import ClientFile, client_files, plugin_folder
from gpuwarden.interfaces.variables import variables

HAS_HOOKS = {client.name for client in HOOKED}


class ChangeReply(BaseModel):
    """The lines to insert into a file after the line `after_line`; the rest of the file stays unchanged."""

    client: str
    file: str
    after_line: int
    added: list[str]


class SetupReply(Result):
    """The state of each client's server, and of its guard if it supports one.

    `paste` contains lines to add by hand, `policy` contains the outcome of the questions about the policy, and `tried`
    contains the outcome of each rehearsal.
    """

    clients: dict[str, str] = Field(default_factory=dict)
    guards: dict[str, str] = Field(default_factory=dict)
    changes: list[ChangeReply] = Field(default_factory=list)
    paste: dict[str, str] = Field(default_factory=dict)
    policy: str = ""
    tried: dict[str, str] = Field(default_factory=dict)


@dataclass
class Plan:
    """Changes to write, and the reply that shows them."""

    changes: list[Change] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    plugins: dict[str, Path] = field(default_factory=dict)
    reply: SetupReply = field(default_factory=SetupReply)

    @property
    def empty(self) -> bool:
        """Return whether the plan has no changes to write."""
        return not (self.changes or self.guards)


def make_plan(names: Iterable[str], config: Config, env: Mapping[str, str], *, person: bool) -> Plan:
    """Plan the changes for the named clients, or for all installed clients. `person` is true if the user decides at a
    terminal.
    """
    plan = Plan()
    passed = [v.name for v in variables(config.policy.secrets.allowed)]
    for client in client_files(env).values():
        if not (client.name in names if names else client.installed):
            continue
        if folder := plugin_folder(client):
            plan.plugins[client.name] = folder
            plan.reply.clients[client.name] = "started by the plugin"
        else:
            _plan_server(plan, client, entry(client.name, own_command(client.name, __version__), passed))
        if brought := by_plugin(client.name, env):
            plan.reply.guards[client.name] = brought
        elif client.name in HAS_HOOKS:
            _plan_guard(plan, client.name, config, env, person=person)
    if not plan.reply.clients:
        plan.reply.message = "No supported client was found on this machine."
    return plan


def _plan_server(plan: Plan, client: ClientFile, wanted: Run) -> None:
    """Plan the change that adds the server to one client, or record why it can't be added."""
    states = plan.reply.clients
    try:
        change = planned(client, wanted)
    except (OSError, ValueError, RecursionError, IndexError) as error:
        present = _has_entry(client)
        if present == wanted:
            states[client.name] = "is set up"
            return
        why = "another entry has this name" if present is not None else line(str(error), 200)
        states[client.name] = f"left unchanged: {why}"
        _failed(plan.reply)
        plan.reply.paste[str(client.file)] = lines_of(client, wanted)
        return
    states[client.name] = "to be added"
    plan.changes.append(change)
    plan.reply.changes.append(_shown(client.name, client.file, change.line, change.text))


def _plan_guard(plan: Plan, name: str, config: Config, env: Mapping[str, str], *, person: bool) -> None:
    """Plan to add a client's guard if it is missing. Only the user may replace another installation's guard."""
    states = plan.reply.guards
    if in_cache():
        states[name] = "left out, because this installation is temporary; `uv tool install` creates a permanent one"
        return
    if any(notice.question for notice in config.notices):
        states[name] = (
            "left out, because this shell uses a different ledger or policy than the recorded one; see gpuwarden doctor"
        )
        return
    try:
        states[name] = hooks("status", (name,), config, env).clients[name]
    except (WardenError, OSError) as error:
        states[name] = f"left unchanged: {line(str(error), 200)}"
        _failed(plan.reply)
        return
    if states[name] == "absent" or (states[name] == "stale" and person):
        states[name] = "to be added"
        plan.guards.append(name)
        file, text = hook_lines(name, config, env)
        plan.reply.changes.append(_shown(name, file, 0, text))


def carry_out(plan: Plan, config: Config, env: Mapping[str, str]) -> SetupReply:
    """Write the planned changes, and record them for `--undo`.

    Each change is recorded before it is written, so that an interrupted change can be undone. If a client's file can't
    be written, the other clients are still changed.
    """
    reply = plan.reply.model_copy(deep=True)
    for change in plan.changes:
        reply.clients[change.client.name] = state = enter(change)
        if state != "added":
            reply.paste[str(change.client.file)] = change.lines
            _failed(reply)
    for name in plan.guards:
        note = read_note()
        kept = note.clients.get(name, WrittenChange())
        write_note(SetupRecord(clients={**note.clients, name: kept.model_copy(update={"guard": True})}))
        try:
            reply.guards[name] = hooks("install", (name,), config, env).clients[name]
        except (WardenError, OSError) as error:
            write_note(note)
            reply.guards[name] = f"left unchanged: {line(str(error), 200)}"
            _failed(reply)
    if NOT_TRUSTED & set(reply.guards.values()):
        reply.hint = f"{reply.hint} {TRUST}".lstrip()
    return reply


def enter(change: Change) -> str:
    """Record and write one change, and return the resulting state."""
    before, name = read_note(), change.client.name
    kept = before.clients.get(name, WrittenChange())
    write_note(SetupRecord(clients={**before.clients, name: change.written.model_copy(update={"guard": kept.guard})}))
    try:
        change.write()
    except (WardenError, OSError, ValueError) as error:
        write_note(before)
        return f"left unchanged: {line(str(error), 200)}"
    return "added"


def take_back(names: Iterable[str], config: Config, env: Mapping[str, str]) -> SetupReply:
    """Undo the changes for the named clients, or for all clients. Keep and report entries that were changed later."""
    note, reply = read_note(), SetupReply()
    for client in client_files(env).values():
        written = note.clients.get(client.name)
        if written is None or (names and client.name not in names):
            continue
        if written.guard:
            try:
                reply.guards[client.name] = hooks("uninstall", (client.name,), config, env).clients[client.name]
                written = written.model_copy(update={"guard": False})
            except (WardenError, OSError) as error:
                reply.guards[client.name] = f"left unchanged: {line(str(error), 200)}"
                _failed(reply)
        if written.file:
            gone, reply.clients[client.name] = _take_out(client, written)
            if not gone:
                _failed(reply)
            written = WrittenChange(guard=written.guard) if gone else written
        rest = {n: w for n, w in note.clients.items() if n != client.name}
        note = SetupRecord(clients={**rest, client.name: written} if written != WrittenChange() else rest)
        write_note(note)
    if not (reply.clients or reply.guards):
        reply.message = "Nothing to undo: gpuwarden setup has made no changes."
    return reply


def _take_out(client: ClientFile, written: WrittenChange) -> tuple[bool, str]:
    """Remove one entry from a client's file. Return whether the entry is gone, and the state to show."""
    if written.file != str(client.file):
        return False, f"left unchanged: it was added to {line(written.file, 200)}"
    try:
        before = undone(client, written)
        if before is None:
            client.file.resolve().unlink()  # the file may be a link into the user's other files
            if written.folder_made:
                with contextlib.suppress(OSError):  # a client may use the folder by now
                    client.file.parent.rmdir()
        else:
            replace_text(client.file, before)
    except KeyError:
        return True, "already removed"
    except (OSError, ValueError, RecursionError, IndexError) as error:
        return False, f"left unchanged: {line(str(error), 200)}"
    return True, "removed"


def _failed(reply: SetupReply) -> None:
    """Record in the reply that a client could not be changed."""
    reply.ok, reply.code, reply.message = False, "failed", "At least one client was not changed."
    reply.hint = "Fix the problem with that client, or edit its file yourself. Then run the command again."


def _has_entry(client: ClientFile) -> object:
    try:
        return client.parsed(client.file.read_text("utf-8")).get(client.key, {}).get("gpuwarden")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _shown(client: str, file: Path, after_line: int, text: str) -> ChangeReply:
    return ChangeReply(client=client, file=str(file), after_line=after_line, added=text.strip("\n").splitlines())


# --------------------------------------------------------------------------------------------------------- rehearsal


async def try_out(
    plan: Plan, reply: SetupReply, spec: JobSpec, env: Mapping[str, str], show: Callable[[str], None]
) -> None:
    """Rehearse a job through each planned client's entry, and add the results to the reply."""
    from gpuwarden.interfaces.mcp import trial

    problems: list[BadRequest] = []
    for client in (c for c in client_files(env).values() if c.name in plan.reply.clients):
        run = _has_entry(client)
        if client.name in plan.plugins:
            run = from_folder(client.name, str(plan.plugins[client.name]))
        elif reply.clients[client.name] not in {"added", "is set up"}:
            reply.tried[client.name] = "not rehearsed, because this entry is not from gpuwarden setup"
            continue
        if not (isinstance(run, dict) and isinstance(run.get("command"), str) and isinstance(run.get("args"), list)):
            reply.tried[client.name] = "not rehearsed, because the entry was changed in the meantime"
            continue
        try:
            show(f"{client.title}: rehearsal through its entry")
            await trial.rehearse(client.title, run, spec, env, lambda text: show(f"  {text}"))
            reply.tried[client.name] = "proven"
        except BadRequest as error:
            reply.tried[client.name] = "failed"
            problems.append(error)
    if problems:
        reply.ok, reply.code, reply.next, reply.hint = False, "failed", problems[0].next_steps, ""
        reasons = " ".join(f"{error.message[:1].upper()}{error.message[1:]}." for error in problems)
        reply.message = f"{reply.message} {reasons}".strip()
    elif "proven" in reply.tried.values():
        done = "The rehearsal is complete: every copy is proven, and nothing was rented."
        reply.message = f"{reply.message} {done}".strip()
