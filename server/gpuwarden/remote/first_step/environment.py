"""Choose the interpreter for a script: the current interpreter if it meets the header's requirements, otherwise the
interpreter of an environment created by uv.

Only wheels are installed, and an environment's interpreter is never started here, so package code never runs outside
the sandbox. Environments are stored by a digest of their requirements, within the limits set in `pruning`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.core.sanitize import line
from gpuwarden.remote.first_step.pruning import mark_ready, mark_used, prune_environments, remove
from gpuwarden.remote.host.interpreter import installed_here, unmet
from gpuwarden.static_analysis.script import Header

INSTALL_S: Final = 900.0
CUDA_ROOM: Final = 24 << 30
"""Free disk space in bytes required to install PyTorch with CUDA, the fallback if the CPU build can't be downloaded."""
_TORCH_INDEX: Final = "download.pytorch.org"
_PLAIN: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029$]+")
"""Matches a plain requirement. uv would read text after a line break as options, and expand `${NAME}`."""
_VERSIONS: Final = re.compile(r"(?:[<>~!]=|[<>]|==(?!=)|[\d.*, ])+")
"""Matches text that uv reads as versions. uv could interpret other text as a path to a program."""
_PASSED: Final = re.compile(r"UV_\w+|\w+_proxy|SSL_CERT_(FILE|DIR)|PATH|HOME|LANG|TMPDIR|XDG_CACHE_HOME", re.IGNORECASE)
_NOT_ITS_FAULT: Final = re.compile(r"(?i)wheel|\+cu|\btorch\b|build")
"""Matches errors that may not occur in the job: a rehearsal builds no packages and installs torch for the CPU."""
_NETWORK: Final = re.compile(
    r"(?i)failed to fetch|dns error|error sending request|connect|timed? ?out|no such host|offline"
)


@dataclass(frozen=True)
class Environment:
    """An interpreter for a script. `own` is true if it meets all requirements in the header; `lacking` lists the unmet
    requirements.

    `fault` is the reason why no environment can satisfy the header; `packages` is a digest of the installed packages.
    """

    python: str = sys.executable
    own: bool = False
    lacking: tuple[str, ...] = ()
    fault: str = ""
    packages: str = ""


def environment_for(header: Header | None, folder: Path, env: Mapping[str, str]) -> Environment:
    """Return the environment for a header. Without uv or a network, this is the current interpreter."""
    lacking = tuple(unmet(header, installed_here(header))) if header else ()
    names = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    packages = hashlib.sha256("\n".join(names).encode()).hexdigest()
    here = Environment(own=header is not None and not lacking, lacking=lacking, packages=packages)
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    if header is None or not lacking or uv is None or not _is_plain(header):
        return here
    wanted = json.dumps([header.requires_python, sorted(header.dependencies)])
    made = folder / hashlib.sha256(wanted.encode()).hexdigest()[:24]
    python = made / "bin/python"
    kept = {name: value for name, value in env.items() if _PASSED.fullmatch(name)}
    if not mark_used(made):
        message = _make(uv, header, made, kept)
        if _NETWORK.search(message):
            return here
        if message:
            elsewhere = header.configured or _NOT_ITS_FAULT.search(
                message
            )  # the header's indexes and sources are ignored
            hopeless = "No solution found" in message and not elsewhere
            return Environment(lacking=lacking, fault=message if hopeless else "", packages=here.packages)
        mark_ready(made)
        prune_environments(folder, time.time())
    listed = sorted(folder.name for folder in made.glob("lib*/python3*/site-packages/*.dist-info"))
    return Environment(str(python), own=True, packages=hashlib.sha256("\n".join(listed).encode()).hexdigest())


def _is_plain(header: Header) -> bool:
    """Return whether uv would read all text in a header as requirements and versions."""
    versions = header.requires_python is None or _VERSIONS.fullmatch(header.requires_python)
    return bool(versions) and all(_PLAIN.fullmatch(text) for text in header.dependencies)


def _make(uv: str, header: Header, folder: Path, env: Mapping[str, str]) -> str:
    """Create an environment. Return uv's error message; empty on success.

    The base interpreter compiles the environment's modules without `site`, so that no module is executed. If they were
    not compiled here, each rehearsal would compile them again, because the folder is read-only in the sandbox.
    """
    remove(str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    version = ["--python", header.requires_python] if header.requires_python else []
    made = _run([uv, "venv", "--no-config", "--no-project", "--quiet", *version, str(folder)], env, folder.parent)
    if made.returncode:
        return line(made.stderr, 1_000) or "uv venv failed"
    base = (folder / "bin/python").resolve()  # resolved before an installed wheel can replace the link
    asked = folder / "requirements.txt"
    asked.write_text("\n".join(header.dependencies) + "\n", encoding="utf-8")
    install = [uv, "pip", "install", "--no-config", "--quiet", "--only-binary", ":all:", "--no-compile-bytecode"]
    install += ["--python", str(folder / "bin/python"), "-r", str(asked)]
    done = _run([*install, "--torch-backend", "cpu"], env, folder.parent)
    room = shutil.disk_usage(folder).free > CUDA_ROOM
    if done.returncode and _TORCH_INDEX in done.stderr and _NETWORK.search(done.stderr) and room:
        done = _run(install, env, folder.parent)  # this network may allow access only to a PyPI mirror
    if done.returncode:
        return line(done.stderr, 1_000) or "uv pip install failed"
    _run([str(base), "-I", "-S", "-m", "compileall", "-q", "-j", "2", str(folder / "lib")], env, folder.parent)
    return ""


def _run(command: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run uv in gpuwarden's folder. In the working folder, uv would use the job's programs and settings."""
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=dict(env),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"timed out or not started: {error}")
