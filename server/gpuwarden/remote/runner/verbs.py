"""Run the verb given on the command line. Read one JSON object from stdin, and print JSON lines."""

from __future__ import annotations

import json
import os
import sys
from typing import Callable, NoReturn

from gpuwarden.remote.runner.allotted import allot
from gpuwarden.remote.runner.crash import report_crash
from gpuwarden.remote.runner.examine import examine
from gpuwarden.remote.runner.inventory import disclose
from gpuwarden.remote.runner.log import logs
from gpuwarden.remote.runner.look import command_outputs
from gpuwarden.remote.runner.manifest import fetch, list_files
from gpuwarden.remote.runner.observe import poll
from gpuwarden.remote.runner.output_json import reply
from gpuwarden.remote.runner.path_mapping import printable
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.relay import relay
from gpuwarden.remote.runner.self_stop import hold, record_request, self_stop, self_stopper
from gpuwarden.remote.runner.spool import spool
from gpuwarden.remote.runner.start import start, supervise
from gpuwarden.remote.runner.stop import stop
from gpuwarden.remote.runner.stream import bundle, read
from gpuwarden.remote.runner.uploader import upload

MAX_INPUT = 16 << 20


def serve() -> None:
    """Run one poll per line of stdin until stdin closes. This avoids starting Python for each poll."""
    for line in sys.stdin:
        try:
            reply(poll("", json.loads(line)))
        except (ValueError, RecursionError, AttributeError, TypeError, OSError) as error:
            reply({"ok": False, "code": "bad_request", "error": f"{type(error).__name__}: {error}"})


def start_and_self_stop(folder: str, order: Json) -> Json:
    """Launch or adopt an attempt, and start the self-stop process if the order requests one."""
    reply = start(folder, order)
    if reply.get("ok"):
        self_stop(folder, {"self_stop": order["spec"].get("self_stop"), "attempt": order["attempt"]})
    return reply


VERBS: dict[str, Callable[[str, Json], Json | None]] = {
    "start": start_and_self_stop,
    "allot": allot,
    "supervise": supervise,
    "poll": poll,
    "logs": logs,
    "stop": stop,
    "list": lambda folder, request: list_files(folder, request, digests=False),
    "manifest": lambda folder, request: list_files(folder, request, digests=True),
    "fetch": fetch,
    "read": read,
    "bundle": bundle,
    "disclose": disclose,
    "examine": examine,
    "self_stop": self_stop,
    "self_stopper": self_stopper,
    "hold": hold,
    "look": command_outputs,
    "spool": spool,
}
FOR_SOMEBODY = ("logs", "stop", "manifest", "fetch", "read", "bundle", "examine", "self_stop", "hold")
"""Verbs that act on behalf of the user, and therefore delay a self-stop."""


def answer(argv: list[str]) -> Json | None:
    """Run one verb and return its reply; None if the verb has printed its output itself."""
    if argv == ["serve"]:
        serve()
        return None
    if argv[:1] == ["keep"] and len(argv) == 4:
        upload(*argv[1:])
        return None
    if argv[:1] == ["relay"] and len(argv) == 3:
        relay(argv[1], int(argv[2]))
        return None
    verb = VERBS.get(argv[0]) if argv else None
    if verb is None or (argv[0] != "poll" and len(argv) != 2):
        raise Problem("bad_request", "usage: runner.py {} [DIR]".format("|".join(VERBS)))
    folder = os.path.realpath(argv[1]) if len(argv) > 1 else ""
    try:
        request = json.loads(sys.stdin.buffer.read(MAX_INPUT) or b"{}")
    except (ValueError, RecursionError):
        raise Problem("bad_request", "stdin contains no JSON object") from None
    if not isinstance(request, dict):
        raise Problem("bad_request", "stdin contains no JSON object")
    if argv[0] in FOR_SOMEBODY and os.path.isdir(folder):
        record_request(folder)
    return verb(folder, request)


def main(argv: list[str]) -> NoReturn:
    """Run a verb. If it fails, print one JSON object and exit with code 1."""
    sys.excepthook = report_crash
    try:
        found = answer(argv)
    except Problem as problem:
        fail(argv, problem.code, str(problem))
    except OSError as error:
        code = "not_found" if isinstance(error, FileNotFoundError) else "io_error"
        fail(argv, code, f"{error.strerror}: {printable(str(error.filename))}")
    if found is not None:
        reply(found)
    if argv[0] in ("fetch", "bundle"):
        os._exit(0)  # exit at once: all output is written, and freeing a long list would delay the caller
    sys.exit(0)


def fail(argv: list[str], code: str, error: str) -> NoReturn:
    """Print an error for the caller and exit with code 1.

    The error goes to stderr if stdout is used for file contents.
    """
    line = {"ok": False, "code": code, "error": error}
    if argv[:1] in (["read"], ["bundle"], ["fetch"]):
        sys.stderr.write(json.dumps(line) + "\n")
    else:
        reply(line)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
