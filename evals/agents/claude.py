"""Run Claude Code as `claude -p` with stream-json output and with the server under test as its only MCP server.

The user's own settings, memory, skills and servers are left out (`--setting-sources project`, `--strict-mcp-config`).
Of Claude's built-in tools, only Skill is allowed. Calls to other tools that need permission are denied and recorded in
the stream.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from evals.harness.proxy import Door
from evals.harness.recorder import Recorder
from evals.harness.runner import Play
from evals.harness.setup import Setup, any_of
from evals.harness.subprocess_agent import drive, place
from evals.scoring.cases import Case

PROGRAM: Final = "claude"
_KEYS: Final = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
WAITS: Final = {
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_CONNECT_TIMEOUT_MS": "60000",
    "MCP_TIMEOUT": "60000",
}
"""Without these variables, the first turn begins after at most five seconds, even if the server is not connected
yet."""
_QUIET: Final = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
"""Disables updates during a run, and telemetry."""
_OPTIONS: Final = (
    *("-p", "--output-format", "stream-json", "--verbose", "--no-session-persistence"),
    *("--setting-sources", "project", "--strict-mcp-config", "--allowedTools", "mcp__gpuwarden,Skill"),
)
_TURNS_PER_CALL: Final = 2
"""Maximum number of turns for each allowed call. It is more than one, because some turns contain no call."""


def make(setup: Setup) -> Play:
    """Return the agent. Raises EvalError if the program or its key is missing."""
    program, env = setup.program(PROGRAM), {**setup.environment("ANTHROPIC_", "CLAUDE_"), **WAITS, **_QUIET}
    home = Path(setup.env.get("CLAUDE_CONFIG_DIR") or Path(setup.env.get("HOME", "~")).expanduser() / ".claude")
    if sys.platform != "darwin":  # on macOS the login is in the keychain, which only the program can read
        any_of(env, _KEYS, (home / ".credentials.json",), PROGRAM)

    def play(case: Case, recorder: Recorder) -> None:
        with place() as here, (door := Door(recorder, here.own, bare=setup.pack.bare)) as server:
            setup.pack.install(here.work / ".claude" / "skills")
            config = here.own / "mcp.json"
            entry = {"type": "stdio", "command": server[0], "args": server[1:]}
            config.write_text(json.dumps({"mcpServers": {"gpuwarden": entry}}), "utf-8")
            turns = _TURNS_PER_CALL * int(case.limits.get("tool_calls") or 60)
            options = [*_OPTIONS, "--max-turns", str(turns), "--mcp-config", str(config)]
            if setup.model:
                options += ["--model", setup.model]
            if case.limits.get("agent_usd"):
                options += ["--max-budget-usd", str(case.limits["agent_usd"])]
            if setup.pack.forced:  # in a file, because program arguments have a length limit
                forced = here.own / "forced.md"
                forced.write_text(setup.pack.forced, "utf-8")
                options += ["--append-system-prompt-file", str(forced)]
            drive([program, *options], recorder, setup, env, here.work, ("result",))
        door.was_used()

    return play
