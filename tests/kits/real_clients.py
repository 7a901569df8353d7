"""The vendors' clients in separate processes, each from an environment below GPUWARDEN_CLIENTS.

`tools/install_clients.sh` creates that folder. A client has an empty home, a key for the emulated account, and no
other variables from this machine's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paths import KITS
from real_parts import need

FOLDER = os.environ.get("GPUWARDEN_CLIENTS", "")
PATIENCE_S = 300.0
LOOP = """
import json, sys, traceback
space = {}
for line in sys.stdin:
    space["answer"], error = None, ""
    try:
        exec(json.loads(line), space)
    except Exception:
        error = traceback.format_exc()
    print("\\nanswer", json.dumps([space["answer"], error], default=str), flush=True)
"""
SKY_FILES = ("clients_sky", "clients_sky_instances")


@dataclass
class Client:
    """An installed environment; `env` has additional variables for its processes."""

    name: str
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not FOLDER:
            pytest.skip("GPUWARDEN_CLIENTS names no folder of installed clients (tools/install_clients.sh makes one)")
        self.bin = Path(FOLDER) / self.name / "bin"
        need(f"the environment {self.name} in GPUWARDEN_CLIENTS", (self.bin / "python").exists())

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program from the environment; return the completed process, whatever its exit code."""
        env = {"PATH": os.defpath, "HOME": str(self.home), "LANG": "C.UTF-8", "NO_COLOR": "1", **self.env}
        return subprocess.run(
            [str(self.bin / program), *words], env=env, cwd=self.home, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    def python(self, script: str, *words: str) -> Any:
        """Run a script in this client's Python; return the value that it leaves in `answer`."""
        ending = "\nimport json, sys\nprint('\\n' + json.dumps(answer, default=str))\n"
        done = self.run("python", "-c", script + ending, *words)
        assert done.returncode == 0, (script[-500:], done.stdout[-2000:], done.stderr[-3000:])
        return json.loads(done.stdout.splitlines()[-1])

    @contextmanager
    def session(self) -> Iterator[Callable[[str], Any]]:
        """Run many scripts in one process of this client's Python, because imports take most of the time."""
        env = {"PATH": os.defpath, "HOME": str(self.home), "LANG": "C.UTF-8", **self.env}
        argv = [str(self.bin / "python"), "-c", LOOP]
        with subprocess.Popen(
            argv, env=env, cwd=self.home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None

            def ask(script: str) -> Any:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(script) + "\n")
                process.stdin.flush()
                line = next(line for line in process.stdout if line.startswith("answer "))
                answer, error = json.loads(line.removeprefix("answer "))
                assert not error, error
                return answer

            yield ask
            process.stdin.close()


def sky(cloud: str) -> str:
    """Return the code to run before SkyPilot's modules that start and end clusters on one cloud."""
    begin = "".join((KITS / f"{name}.py").read_text("utf-8") for name in SKY_FILES)
    return f"{begin}_folder('sky.provision.{cloud}')\n"
