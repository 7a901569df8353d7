"""Choose how a script is started on an SSH machine: with the machine's Python, or with uv, which is uploaded if
necessary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from anyio import to_thread

from gpuwarden.backends._runner import parse
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.core.readiness import Needs, Readiness, Uv
from gpuwarden.remote.host.host_info import HostInfo
from gpuwarden.remote.host.interpreter import needs_of, readiness, request_of, uv_run
from gpuwarden.remote.host.uv_wheel import WHEELS, name_of, uv_program
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.transfer.small_file import PUT_S
from gpuwarden.remote.transfer.upload import push
from gpuwarden.static_analysis.script import read_header, start_header

TOOLS: Final = ".gpuwarden"
"""The folder for gpuwarden's own programs, inside the run root."""
LOOK_S: Final = 55.0
MAX_ANSWER: Final = 8 << 20


@dataclass(frozen=True)
class SshStart:
    """Chooses the interpreter for one job. `tools` is the local folder with uv, or None if the policy forbids the
    upload.
    """

    ssh: Ssh
    host: HostInfo
    place: Place
    run_root: str
    tools: Path | None

    async def look(self, needs: Needs) -> tuple[Readiness, str]:
        """Return the machine's readiness and its architecture. Raises BadReply for an invalid reply."""
        env = {"PATH": self.host.path, **self.place.env, **needs.env}
        request = {**request_of(needs), "env": env, "path": self.host.path}
        argv = [self.host.job_python, "-I", "-", json.dumps(request)]
        ran = await self.ssh.run(argv, stdin=_agent(), timeout_s=LOOK_S, limit=MAX_ANSWER)
        answer = parse(ran.out.strip().rpartition(b"\n")[2] or ran.err[:200])
        kind = answer.get("markers")
        linux = isinstance(kind, dict) and kind.get("sys_platform") == "linux"
        arch = str(kind.get("platform_machine")) if isinstance(kind, dict) and linux else ""
        brought = Uv.BROUGHT if self.tools is not None and arch in WHEELS else Uv.MISSING
        return readiness(needs, answer, Uv.THERE if "uv" in self.host.tools else brought), arch

    async def interpreter(self, spec: JobSpec) -> Sequence[str]:
        """Return the interpreter's argument list. For a header with requirements, the interpreter is uv if it is
        installed, or if it may be uploaded and the machine's Python does not meet them. Otherwise, it is the machine's
        Python.

        Raises BadRequest if the machine's Python does not meet the requirements, and uv is neither installed nor
        allowed.
        """
        if spec.script is None:
            return ()
        uv = (self.host.tools["uv"], *uv_run(spec.script)) if "uv" in self.host.tools else None
        if uv and needs_of(read_header(spec.script)).asks_header:
            return uv
        needs = needs_of(start_header(spec.script))
        if not needs.asks_header:
            return (self.host.job_python,)
        found, arch = await self.look(needs)
        if not found.unmet and not found.trouble:
            return (self.host.job_python,)
        if uv:
            return uv
        if found.uv is Uv.BROUGHT and not found.trouble:
            return (await self._bring_uv(arch), *uv_run(spec.script))
        missing = f"the script's header requires packages or a Python version that {self.host.job_python} lacks: "
        raise BadRequest(
            found.trouble or missing + ", ".join(found.unmet),
            "Install uv or these packages, or ask the user to set bring_uv = true under [hosts] in the policy.",
        )

    async def _bring_uv(self, arch: str) -> str:
        """Upload uv to the machine, which verifies the digest. Return uv's path there."""
        assert self.tools is not None
        program = await to_thread.run_sync(uv_program, arch, self.tools)
        folder = f"{self.run_root}/{TOOLS}/{name_of(arch)}"
        await push(self.ssh, {"uv": program}, folder, python=self.host.runner_python)
        await self.ssh.run(["chmod", "700", f"{folder}/uv"], timeout_s=PUT_S)
        return f"{folder}/uv"


@cache
def _agent() -> bytes:
    return files("gpuwarden.remote.host").joinpath("start_agent.py").read_bytes()
