"""Ask Codex which hooks the user has trusted. Codex runs no other hooks.

A hook loses this trust if its text changes or, for a plugin's hook, if any file in the plugin changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 20.0
QUESTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"id": 0, "method": "initialize", "params": {"clientInfo": {"name": "gpuwarden", "version": "1"}}},
    {"method": "initialized"},
    {"id": 1, "method": "hooks/list", "params": {"cwds": [str(Path.home())]}},
)


def state_of(env: Mapping[str, str], ours: Callable[[Mapping[str, Any]], bool]) -> str:
    """Return the state of this guard's pre-tool-call hooks, which the function `ours` recognizes.

    It is `installed` if Codex runs all of them, `untrusted` if not, and `unconfirmed` if Codex can't be asked.
    """
    try:
        found = [hook for hook in _listed(env) if hook.get("eventName") == "preToolUse" and ours(hook)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "unconfirmed"
    runs = [hook.get("trustStatus") in {"trusted", "managed"} and hook.get("enabled") is True for hook in found]
    return "installed" if runs and all(runs) else "untrusted"


def _listed(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the hooks that Codex lists for the user. Raises OSError or ValueError if Codex does not answer."""
    program = shutil.which("codex", path=env.get("PATH"))
    if program is None:
        raise FileNotFoundError("codex")
    with subprocess.Popen(
        [program, "app-server"], env=dict(env), cwd=Path.home(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, encoding="utf-8", start_new_session=True,
    ) as app:  # fmt: skip
        assert app.stdin is not None and app.stdout is not None
        late = threading.Timer(PATIENCE_S, _kill, [app.pid])
        late.start()
        try:
            app.stdin.write("".join(f"{json.dumps(question)}\n" for question in QUESTIONS))
            app.stdin.flush()  # not closed yet, because Codex exits without an answer at the end of its input
            for line in app.stdout:
                reply = json.loads(line)
                if reply.get("id") == 1:
                    return list(reply["result"]["data"][0]["hooks"])
        finally:
            with contextlib.suppress(OSError):
                app.stdin.close()
            app.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                app.wait(5)
            _kill(app.pid)
            late.cancel()
    raise ValueError("Codex did not answer")


def _kill(session: int) -> None:
    """Kill Codex and its children: npm's `codex` starts the real program, which would keep the pipe open."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
