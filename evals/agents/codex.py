"""Run Codex as `codex exec --json` with a separate home folder. The server under test is its only MCP server.

The home folder contains a link to the user's login, but none of the user's settings, instructions or skills. Codex's
own shell runs in its read-only sandbox, and its command lines appear in the stream. Sub-agents are disabled, because
the stream does not contain their calls. With `--url`, the model is served by another endpoint that implements OpenAI's
Responses API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from evals.harness.proxy import Door
from evals.harness.recorder import Recorder
from evals.harness.runner import Play
from evals.harness.setup import Setup, any_of
from evals.harness.subprocess_agent import drive, place
from evals.scoring.cases import Case

PROGRAM: Final = "codex"
_KEYS: Final = ("CODEX_API_KEY", "OPENAI_API_KEY")
_TOOL_TIMEOUT_S: Final = 600
_START_TIMEOUT_S: Final = 60
_ENDS: Final = ("turn.completed", "turn.failed")
"""A line of type `error` does not end the session, because Codex also writes one for each attempt to reconnect."""


def make(setup: Setup) -> Play:
    """Return the agent. Raises EvalError if the program or its API key is missing."""
    program, env = setup.program(PROGRAM), setup.environment("CODEX_", "OPENAI_")
    home = Path(setup.env.get("CODEX_HOME") or Path(setup.env.get("HOME", "~")).expanduser() / ".codex")
    login = home / "auth.json"
    if _elsewhere(setup):
        env |= {name: value for name, value in setup.env.items() if name == _key(setup)}
        if _key(setup):
            any_of(env, (_key(setup),), (), PROGRAM)
    else:
        any_of(env, _KEYS, (login,), PROGRAM)
        if env.get("OPENAI_API_KEY"):  # `codex exec` itself ignores this variable
            env.setdefault("CODEX_API_KEY", env["OPENAI_API_KEY"])

    def play(case: Case, recorder: Recorder) -> None:
        with place() as here, (door := Door(recorder, here.own, bare=setup.pack.bare)) as server:
            setup.pack.install(here.work / ".agents" / "skills")
            own = here.own / "codex"
            own.mkdir(mode=0o700)
            temporary = here.own / "tmp"  # Codex won't start a sandbox if its home is in the system's temporary folder
            temporary.mkdir()
            if login.is_file():
                (own / "auth.json").symlink_to(login)
            url = setup.url if _elsewhere(setup) else ""
            (own / "config.toml").write_text(config(server, setup.pack.forced, here.work, url, _key(setup)), "utf-8")
            command = [program, "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"]
            command += ["--cd", str(here.work), *(["--model", setup.model] if setup.model else []), "-"]
            places = {"CODEX_HOME": str(own), "HOME": str(here.own), "TMPDIR": str(temporary)}
            drive(command, recorder, setup, env | places, here.work, _ENDS)
        door.was_used()

    return play


def _elsewhere(setup: Setup) -> bool:
    return setup.url != Setup.url


def _key(setup: Setup) -> str:
    """Return the name of the variable with the endpoint's key; "" if there is no other endpoint or no key is needed."""
    return setup.key_env if _elsewhere(setup) else ""


def config(server: list[str], forced: str, work: Path, url: str = "", key: str = "") -> str:
    """Return the text of Codex's configuration file.

    Without `approve`, every call is cancelled, because `exec` can't ask a user. Without `required`, the first turn
    may begin before the server is connected. In a folder that is not trusted, Codex does not search for skills.
    """
    rows = [f"developer_instructions = {_toml(forced)}"] if forced else []
    rows += ['model_provider = "given"'] if url else []
    rows += ["[analytics]", "enabled = false", "[features]", "multi_agent = false", "multi_agent_v2 = false"]
    rows += [f"[projects.{_toml(str(work))}]", 'trust_level = "trusted"']
    rows += ["[mcp_servers.gpuwarden]", f"command = {_toml(server[0])}", f"args = {_toml(server[1:])}"]
    rows += ['default_tools_approval_mode = "approve"', "required = true"]
    rows += [f"startup_timeout_sec = {_START_TIMEOUT_S}", f"tool_timeout_sec = {_TOOL_TIMEOUT_S}"]
    if url:
        rows += ["[model_providers.given]", 'name = "given"', f"base_url = {_toml(url)}", 'wire_api = "responses"']
        rows += [f"env_key = {_toml(key)}"] if key else []
    return "\n".join(rows) + "\n"


def _toml(value: str | list[str]) -> str:
    """Return a string or a list of strings as TOML. Its syntax for them is that of JSON without unnecessary escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
