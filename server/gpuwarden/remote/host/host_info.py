"""Probe a host's home directory, PATH and Python versions.

The probe is a fixed shell script, so it works without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpuwarden.core.errors import BadReply
from gpuwarden.remote.host.any_python import MORE_PATH, OLDEST, PLACES, no_python
from gpuwarden.remote.ssh.machine import Ssh

PROBE_S = 30.0

_SCRIPT = rf"""
printf 'home=%s\n' "$HOME"
printf 'path=%s\n' "$PATH"
{MORE_PATH}
printf 'first_path=%s\n' "$first"
PATH="$PATH:$first:$HOME/.local/bin"
for tool in uv tmux nvidia-smi; do
  found=$(command -v "$tool" 2>/dev/null) && printf 'tool=%s %s\n' "$tool" "$found"
done
for python in {PLACES}; do
  found=$(command -v "$python" 2>/dev/null) || continue
  # Several names in one folder for the same file are one Python; each virtual environment has its own folder.
  real=$(readlink -f "$found" 2>/dev/null) || real=$found
  case "$seen" in *"|${{found%/*}}:$real|"*) continue ;; esac
  seen="$seen|${{found%/*}}:$real|"
  "$found" -I -c '
import sys
try:
    from importlib.util import find_spec
    torch = int(find_spec("torch") is not None)
except Exception:
    torch = 0
print("python=%d.%d %d %s" % (sys.version_info[0], sys.version_info[1], torch, sys.executable))
' 2>/dev/null </dev/null
done
exit 0
""".strip()


@dataclass(frozen=True)
class Python:
    """An interpreter on the machine."""

    version: tuple[int, int]
    torch: bool
    path: str


@dataclass(frozen=True)
class HostInfo:
    """The facts about a machine that are needed to launch a job on it. `path` includes the PATH of process 1."""

    home: str
    path: str
    pythons: tuple[Python, ...]
    tools: dict[str, str]

    @property
    def runner_python(self) -> str:
        """Return the interpreter for gpuwarden's runner. Raises `NotSupported` if none is new enough."""
        fit = [p for p in self.pythons if p.version >= OLDEST]
        if fit:
            return fit[0].path
        raise no_python(", ".join(f"{p.version[0]}.{p.version[1]}" for p in self.pythons) or "none")

    @property
    def job_python(self) -> str:
        """Return the interpreter for scripts: the first one that has torch, or else the runner's."""
        with_torch = [p.path for p in self.pythons if p.torch and p.version >= OLDEST]
        return with_torch[0] if with_torch else self.runner_python


async def probe_host(machine: Ssh) -> HostInfo:
    """Probe a machine. Raises `BadReply` for invalid output."""
    ran = await machine.run(["/bin/sh", "-c", _SCRIPT], timeout_s=PROBE_S, limit=1 << 20)
    return parse_host_info(ran.out.decode("utf-8", "replace").splitlines())


def parse_host_info(lines: Sequence[str]) -> HostInfo:
    """Parse the probe script's output."""
    one: dict[str, str] = {}
    tools: dict[str, str] = {}
    pythons: dict[str, Python] = {}
    for key, _, value in (line.partition("=") for line in lines):
        if key == "tool":
            name, _, path = value.partition(" ")
            tools[name] = path
        elif key == "python":
            with suppress(ValueError):  # an incomplete line is skipped
                version, torch, path = value.split(" ", 2)
                major, _, minor = version.partition(".")
                if path.startswith("/"):
                    pythons.setdefault(path, Python((int(major), int(minor)), torch == "1", path))
        else:
            one.setdefault(key, value)
    if not one.get("home", "").startswith("/"):
        raise BadReply(
            f"the host reported no home directory ({one.get('home', '')[:80]!r})",
            "Check that the host runs a POSIX system.",
        )
    paths = f"{one.get('path', '')}:{one.get('first_path', '')}".split(":")
    path = ":".join(dict.fromkeys(p for p in paths if p.startswith("/")))
    return HostInfo(one["home"], path, tuple(pythons.values()), tools)
