"""Determine which modules are missing from a command's Python, in a sandbox that is as strict as the job's.

The caller chooses the program and its variables, and an earlier job may have created the program. Therefore even this
check runs only inside the sandbox, without write or network access.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from gpuwarden.private import private_folder
from gpuwarden.remote.host.start_agent import CALL_S, FIND, missing_modules, missing_of
from gpuwarden.remote.sandbox import boxes
from gpuwarden.remote.sandbox.start import start
from gpuwarden.remote.sandbox.words import Kind, Sandbox, sandbox_arguments

_ANSWER: Final = 1 << 20


def modules_not_found(
    found: Sandbox,
    allowed: boxes.Allowed,
    run_root: Path,
    python: str,
    names: Sequence[str],
    env: Mapping[str, str],
    given: Mapping[str, str],
) -> list[str]:
    """Return the modules that a Python interpreter can't find in the sandbox. Raises OSError if it does not respond.

    `env` is the environment shared by all jobs on this machine; `given` contains the variables that this job adds.
    """
    if found.kind is Kind.NONE:  # the policy allows jobs without a sandbox
        return missing_modules(python, list(names), {**env, **given})
    private_folder(run_root)
    with tempfile.TemporaryDirectory(prefix="look-", dir=run_root) as made:
        box = boxes.box_for(os.path.realpath(made), env, allowed, [python])
        box = replace(box, read=(*box.read, *box.write), write=(), devices=(), network=False)
        boxes.prepare(box)
        init, content = boxes.init_source()
        Path(box.run_dir, init).write_bytes(content)
        prefix = sandbox_arguments(found, box, boxes.system(), f"{box.run_dir}/{init}", 1.0)
        inside = {**env, **boxes.environment(found, box), **given}
        with start(
            prefix, [python, "-c", FIND, *names], inside, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                output = _read(process.stdout, time.monotonic() + CALL_S)
            finally:
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    process.wait(1.0)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            return missing_of(python, process.wait(), output)


def _read(pipe: IO[bytes], until: float) -> str:
    """Read a pipe until `_ANSWER` bytes have been read or the time `until` is reached."""
    output = bytearray()
    while len(output) < _ANSWER and select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(pipe.fileno(), 1 << 16)
        if not piece:
            break
        output += piece
    return output.decode("utf-8", "replace")
