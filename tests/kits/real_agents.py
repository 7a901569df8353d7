"""The real command lines of coding agents, without this machine's settings, keys, logins, or network.

They are looked up in the folder named by GPUWARDEN_AGENT_CLIS, where CI installs them, and then on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KEY = "sk-test-0123456789abcdef0123"
FOLDER = os.environ.get("GPUWARDEN_AGENT_CLIS", "")
PATH = os.pathsep.join(filter(None, [FOLDER, os.environ.get("PATH", "")]))


def need_agent(name: str) -> str:
    """Return the path of an agent's program. A missing program fails the test if that folder is set, else skips it."""
    path = shutil.which(name, path=PATH)
    if path is None and FOLDER:
        pytest.fail(f"{name} is not in GPUWARDEN_AGENT_CLIS={FOLDER}")
    if path is None:
        pytest.skip(f"{name} is not installed here (npm installs it; GPUWARDEN_AGENT_CLIS names its folder)")
    return path


def clean(home: Path, **more: str) -> dict[str, str]:
    """Return the complete environment for an agent's program with this home."""
    for folder in (".claude", ".codex", ".gemini", "tmp"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "GEMINI_TELEMETRY_ENABLED": "false", "NO_COLOR": "1"}
    own = {"CLAUDE_CONFIG_DIR": str(home / ".claude"), "CODEX_HOME": str(home / ".codex")}
    own |= {"TMPDIR": str(home / "tmp")}  # Codex starts no sandbox if its home is below the temporary folder
    return {"PATH": PATH, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", **quiet, **own, **more}


def said(
    words: list[str], env: dict[str, str], cwd: Path, *, stdin: str = "", rc: int | None = 0, timeout: float = 180
) -> str:
    """Return a program's output from both streams. Its exit code must be `rc`, unless that is None."""
    done = subprocess.run(
        [need_agent(words[0]), *words[1:]], env=env, cwd=cwd, input=stdin, capture_output=True, text=True,
        timeout=timeout, check=False, start_new_session=True,
    )  # fmt: skip
    assert rc is None or done.returncode == rc, (words, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr
