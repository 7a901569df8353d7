"""The interpreter of a script: this one where it has what the header asks for, else an environment made by uv.

Only wheels are installed, and an environment's interpreter is never started here, so no package's code runs outside of
the sandbox. Environments stay, named by what they have, within the bounds of `kept`.
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
from gpuwarden.remote.first_step.kept import mark_ready, mark_used, prune_environments, remove
from gpuwarden.remote.host.interpreter import installed_here, unmet
from gpuwarden.static_analysis.script import Header

INSTALL_S: Final = 900.0
CUDA_ROOM: Final = 24 << 30
"""Bytes of free disk for PyTorch with CUDA's libraries and the rest: it is fetched where that of the CPU can't be."""
_TORCH_INDEX: Final = "download.pytorch.org"
_PLAIN: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029$]+")
"""A requirement that stays one: uv reads further options after a line break, and replaces `${NAME}` by a variable."""
_VERSIONS: Final = re.compile(r"(?:[<>~!]=|[<>]|==(?!=)|[\d.*, ])+")
"""What uv reads as versions: anything else could be the path of a program to it."""
_PASSED: Final = re.compile(r"UV_\w+|\w+_proxy|SSL_CERT_(FILE|DIR)|PATH|HOME|LANG|TMPDIR|XDG_CACHE_HOME", re.IGNORECASE)
_NOT_ITS_FAULT: Final = re.compile(r"(?i)wheel|\+cu|\btorch\b|build")
"""Words of a resolution that may only fail here: builds are refused, and torch is that of the CPU."""
_NETWORK: Final = re.compile(
    r"(?i)failed to fetch|dns error|error sending request|connect|timed? ?out|no such host|offline"
)


@dataclass(frozen=True)
class Environment:
    """An interpreter for a script. `own`: it has all that the header asks for. `lacking` is what it has not.

    `fault` is why no environment can ever satisfy the header; `packages` is the digest of what is installed.
    """

    python: str = sys.executable
    own: bool = False
    lacking: tuple[str, ...] = ()
    fault: str = ""
    packages: str = ""


def environment_for(header: Header | None, folder: Path, env: Mapping[str, str]) -> Environment:
    """Return the environment of a header. Without uv, or without a network, it is this interpreter."""
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
        said = _make(uv, header, made, kept)
        if _NETWORK.search(said):
            return here
        if said:
            elsewhere = header.configured or _NOT_ITS_FAULT.search(said)  # its own indexes and sources are not used
            hopeless = "No solution found" in said and not elsewhere
            return Environment(lacking=lacking, fault=said if hopeless else "", packages=here.packages)
        mark_ready(made)
        prune_environments(folder, time.time())
    listed = sorted(folder.name for folder in made.glob("lib*/python3*/site-packages/*.dist-info"))
    return Environment(str(python), own=True, packages=hashlib.sha256("\n".join(listed).encode()).hexdigest())


def _is_plain(header: Header) -> bool:
    """Return whether uv reads nothing in a header but requirements and versions."""
    versions = header.requires_python is None or _VERSIONS.fullmatch(header.requires_python)
    return bool(versions) and all(_PLAIN.fullmatch(text) for text in header.dependencies)


def _make(uv: str, header: Header, folder: Path, env: Mapping[str, str]) -> str:
    """Make an environment. Return what uv said where that failed, empty where it worked.

    Its modules are compiled by the interpreter that it was made from, without `site`, so that none of them runs: in the
    sandbox nothing can be written beside them, and each rehearsal would compile them again.
    """
    remove(str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    version = ["--python", header.requires_python] if header.requires_python else []
    made = _run([uv, "venv", "--no-config", "--no-project", "--quiet", *version, str(folder)], env, folder.parent)
    if made.returncode:
        return line(made.stderr, 1_000) or "uv venv failed"
    base = (folder / "bin/python").resolve()  # before a wheel can put another program there
    asked = folder / "requirements.txt"
    asked.write_text("\n".join(header.dependencies) + "\n", encoding="utf-8")
    install = [uv, "pip", "install", "--no-config", "--quiet", "--only-binary", ":all:", "--no-compile-bytecode"]
    install += ["--python", str(folder / "bin/python"), "-r", str(asked)]
    done = _run([*install, "--torch-backend", "cpu"], env, folder.parent)
    room = shutil.disk_usage(folder).free > CUDA_ROOM
    if done.returncode and _TORCH_INDEX in done.stderr and _NETWORK.search(done.stderr) and room:
        done = _run(install, env, folder.parent)  # a mirror of PyPI may be all that this network lets through
    if done.returncode:
        return line(done.stderr, 1_000) or "uv pip install failed"
    _run([str(base), "-I", "-S", "-m", "compileall", "-q", "-j", "2", str(folder / "lib")], env, folder.parent)
    return ""


def _run(command: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run uv in a folder of ours: below the working folder it would find programs and settings of the job's."""
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
