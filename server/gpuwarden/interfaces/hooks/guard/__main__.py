"""`python -m gpuwarden.interfaces.hooks.guard CLIENT [CONFIG]`: answer one hook call in the client's format.

A plugin's hook passes no CONFIG: the guard reads its file next to the ledger, and writes the file first if it is
missing. With `--place` instead of CONFIG, the guard only rewrites that file.

Any error here blocks the call. Claude Code, Codex and Cursor block a call on exit code 2; on any other code, such as 1
after a crash, they allow it. Cursor also reads a verdict from standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

REFUSED = 2
MOST_BYTES = 8_000_000
MOST_CPU_S = 5
MOST_S = 20
MOST_FIRST_S = 30
"""Time limit in seconds for writing the guard's file on the first call.

The sum of this limit and MOST_S is below every client's timeout.
"""
MOST_MEMORY = 2 << 30
ASKS_IN = frozenset({"default", "acceptEdits", "plan"})
"""Claude Code modes in which a hook's question reaches the user; in other modes the client itself answers it.
"""
ASK_HINT = "Use a literal path, or let the user decide."
HINT = "Use gpuwarden's teardown_request: it verifies that nothing is lost, then asks the user to approve."


def ended_after(seconds: int) -> None:
    """Let the system kill this process after `seconds`. The hook blocks the call if the process is killed."""
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)


def bounded() -> None:
    """Let the system kill this process if it exceeds its time, CPU or memory limits."""
    ended_after(MOST_S)
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def placed() -> str:
    """Return the guard's file next to this environment's ledger. If it is missing, write it, which takes a second."""
    import platformdirs

    home = os.environ.get("GPUWARDEN_HOME") or platformdirs.user_data_dir("gpuwarden", appauthor=False)
    file = Path(home).expanduser() / "hooks" / "guard.json"
    if not file.exists():
        from gpuwarden.interfaces.hooks.install import place_guard

        place_guard(os.environ)
    return str(file)


def verdict(client: str, config: str) -> tuple[str | None, str, bool]:
    """Read a call from standard input. Return the reason to block it (None to allow it), a hint, and whether the client
    asks the user.

    Codex and Gemini treat a question as permission, and Cursor asks only about shell commands and calls to MCP servers.
    Any exception propagates.
    """
    text = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        return f"the call is longer than {MOST_BYTES} bytes and can't be checked", HINT, False
    event: Any = json.loads(text.decode("utf-8", "replace"))
    if not isinstance(event, dict):
        return "the call has an unknown format", HINT, False
    from gpuwarden.interfaces.hooks.guard.calls import Question, judged
    from gpuwarden.interfaces.hooks.guard.protected import rules_from

    why = judged(event, rules_from(config, client))
    asks = {
        "claude": event.get("permission_mode", "default") in ASKS_IN,
        "cursor": event.get("hook_event_name") in {"beforeShellExecution", "beforeMCPExecution"},
    }
    question = isinstance(why, Question)
    return why, ASK_HINT if question else HINT, question and asks.get(client, False)


def answer(client: str, why: str | None, hint: str, *, ask: bool = False) -> int:
    """Print the verdict in the client's format. Return the exit code."""
    message = f"gpuwarden: {why}. {hint}" if why else ""
    if client == "cursor":
        verb = "ask" if ask else "deny"
        print(json.dumps({"permission": verb, "user_message": message, "agent_message": message} if why else {}))
        return 0
    if ask:
        decision = {"permissionDecision": "ask", "permissionDecisionReason": message}
        print(json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", **decision}}))
        return 0
    if why:
        print(message, file=sys.stderr)
    return REFUSED if why else 0


def main(argv: list[str]) -> int:
    """Answer one hook call, or only write the guard's file for `--place`. Return the exit code."""
    client, config = (*argv[1:], "", "")[:2]
    try:
        if not client:
            raise ValueError("no client is named")
        if config == "--place":
            from gpuwarden.interfaces.hooks.install import place_guard

            place_guard(os.environ)
            return 0
        if not config:
            ended_after(MOST_FIRST_S)
        file = config or placed()
        bounded()
        why, hint, ask = verdict(client, file)
        return answer(client, why, hint, ask=ask)
    except BaseException as error:
        reason = f"the guard failed ({type(error).__name__}: {str(error)[:200]}), so every call is blocked"
        answer(client, reason, "Ask the user to run: gpuwarden hooks install")
        return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv))
