"""Add the server and the guard to clients, and remove them again.

Setup only adds entries: an existing entry named gpuwarden and an installed guard stay unchanged. An agent that runs
setup can therefore only add the guard. Only the user at a terminal can undo the setup or replace an older guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from pydantic import BaseModel, Field

from gpuwarden import __version__
from gpuwarden.config import Config
from gpuwarden.core.errors import BadRequest, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.hooks.install import CLIENTS as HOOKED
from gpuwarden.interfaces.hooks.install import TRUST, by_plugin, hook_lines, hooks, replace_text
from gpuwarden.interfaces.launch import FIRST_START_S, Run, entry, from_folder, from_here, in_cache
from gpuwarden.interfaces.results import Result
from gpuwarden.interfaces.setup.changes import Change, Note, Written, lines_of, planned, read_note, undone, write_note
from gpuwarden.interfaces.setup.clients import ClientFile, client_files, plugin_folder
from gpuwarden.interfaces.variables import variables

HAS_HOOKS = {client.name for client in HOOKED}
LISTED: Final = 2
ASK = [
    {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "setup", "version": "1"}}},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": LISTED, "method": "tools/list", "params": {}},
]  # fmt: skip


class ChangeReply(BaseModel):
    """The lines to insert into a file after the line `after_line`; the rest of the file stays unchanged."""

    client: str
    file: str
    after_line: int
    added: list[str]


class SetupReply(Result):
    """The state of each client's server, and of its guard if it supports one. `paste` has lines to add by hand."""

    clients: dict[str, str] = Field(default_factory=dict)
    guards: dict[str, str] = Field(default_factory=dict)
    changes: list[ChangeReply] = Field(default_factory=list)
    paste: dict[str, str] = Field(default_factory=dict)


@dataclass
class Plan:
    """Changes to write, and the reply that shows them."""

    changes: list[Change] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    plugins: dict[str, Path] = field(default_factory=dict)
    reply: SetupReply = field(default_factory=SetupReply)

    @property
    def empty(self) -> bool:
        """Return whether the plan has no change to write."""
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
            _plan_server(plan, client, entry(client.name, from_here(client.name, __version__), passed))
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
        present = _entry_there(client)
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
    """Plan the guard of one client if it is missing. Only the user may replace the guard of another installation."""
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
    """Write the planned changes, record them for `--undo`, and start the server once.

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
        kept = note.clients.get(name, Written())
        write_note(Note(clients={**note.clients, name: kept.model_copy(update={"guard": True})}))
        try:
            reply.guards[name] = hooks("install", (name,), config, env).clients[name]
        except (WardenError, OSError) as error:
            write_note(note)
            reply.guards[name] = f"left unchanged: {line(str(error), 200)}"
            _failed(reply)
    if "untrusted" in reply.guards.values():
        reply.hint = f"{reply.hint} {TRUST}".lstrip()
    try:
        reply.message = f"{reply.message} {_started(plan)}".strip()
    except BadRequest as error:
        reply.ok, reply.code, reply.message = False, "failed", f"{error.message}."
        reply.hint, reply.next = "", error.next_steps
    return reply


def enter(change: Change) -> str:
    """Record and write one change, and return the resulting state."""
    before, name = read_note(), change.client.name
    kept = before.clients.get(name, Written())
    write_note(Note(clients={**before.clients, name: change.written.model_copy(update={"guard": kept.guard})}))
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
            written = Written(guard=written.guard) if gone else written
        rest = {n: w for n, w in note.clients.items() if n != client.name}
        note = Note(clients={**rest, client.name: written} if written != Written() else rest)
        write_note(note)
    if not (reply.clients or reply.guards):
        reply.message = "Nothing to undo: gpuwarden setup has changed nothing."
    return reply


def _take_out(client: ClientFile, written: Written) -> tuple[bool, str]:
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


def _entry_there(client: ClientFile) -> object:
    try:
        return client.parsed(client.file.read_text("utf-8")).get(client.key, {}).get("gpuwarden")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _shown(client: str, file: Path, after_line: int, text: str) -> ChangeReply:
    return ChangeReply(client=client, file=str(file), after_line=after_line, added=text.strip("\n").splitlines())


# ------------------------------------------------------------------------------------------------------- first start


def _started(plan: Plan) -> str:
    """Start the server once, in the same way as the clients, so that no client has to wait for downloads."""
    lines = []
    if any(state in {"to be added", "is set up"} for state in plan.reply.clients.values()):
        count = tools_of(from_here("setup", __version__))
        lines.append(f"The server starts and has {count} tools.")
    for name, folder in plan.plugins.items():
        count = tools_of(from_folder(name, str(folder)))
        lines.append(f"The {name} plugin starts and has {count} tools.")
    return " ".join(lines)


def tools_of(run: Run) -> int:
    """Start a server and return the number of its tools. Raises BadRequest if it does not start."""
    argv = [run["command"], *run["args"]]
    with tempfile.TemporaryFile() as errors:
        try:
            answer = _ask(argv, os.environ | run.get("env", {}), errors)
        except OSError as error:
            raise BadRequest(
                f"{argv[0]} can't be started: {type(error).__name__}", "Install uv, then run gpuwarden setup again."
            ) from error
        with contextlib.suppress(LookupError, TypeError):
            return len(answer["result"]["tools"])
        errors.seek(0)
        why = (errors.read().decode("utf-8", "replace").strip().splitlines() or ["no answer"])[-1]
    raise BadRequest(f"the server does not start: {line(why, 300)}", "Run gpuwarden doctor to find the cause.")


def _ask(argv: list[str], env: Mapping[str, str], errors: IO[bytes]) -> dict[str, Any]:
    """Start a server, send it `ASK`, and return its list of tools, or an empty dict if it sends none.

    The server is killed after FIRST_START_S seconds.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, cwd=Path.home(), env=env) as server:
        limit = threading.Timer(FIRST_START_S, server.kill)
        limit.start()
        assert server.stdin is not None and server.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the server has ended; its standard error contains the reason
                os.write(server.stdin.fileno(), "".join(json.dumps(message) + "\n" for message in ASK).encode())
            # Keep the input open until the response arrives, because a server cancels its calls when its input ends.
            answer = next((message for message in map(_parsed, server.stdout) if message.get("id") == LISTED), {})
            server.stdin.close()
            server.wait()
            return answer
        finally:
            limit.cancel()


def _parsed(row: bytes) -> dict[str, Any]:
    try:
        message = json.loads(row)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
