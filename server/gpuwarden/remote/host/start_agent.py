"""Check a machine for the packages, programs, files and GPUs that a job needs to start.

    python -I - '{"names": ["torch"], "program": "torchrun"}'  < start_agent.py       one JSON object on stdout

Python >= 3.8, standard library only. Writes no files and imports none of the packages.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any, Dict

CALL_S = 15
Json = Dict[str, Any]
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
FIND = """
import sys
from importlib.util import find_spec
def there(name):
    try:
        return find_spec(name) is not None
    except Exception:
        return False
print("missing:" + " ".join(name for name in sys.argv[1:] if not there(name)))
"""


def markers() -> Json:
    """Return the environment marker variables (PEP 508)."""
    version = sys.implementation.version
    return {
        "implementation_name": sys.implementation.name,
        "implementation_version": "%d.%d.%d" % (version.major, version.minor, version.micro),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }


def packages(names: list[str]) -> Json:
    """Return the version and requirements of each installed package, and the versions of its extras' requirements."""
    found: Json = {}
    for name in names:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        required = list(package.requires or [])
        found[name] = {"version": package.version, "requires": required}
        for text in required:
            match = NAME.match(text)
            if match is None or "extra" not in text or match.group(0) in found:
                continue
            try:
                found[match.group(0)] = {"version": metadata.version(match.group(0)), "requires": []}
            except metadata.PackageNotFoundError:
                continue
    return found


def gpus(path: str) -> Json:
    """Return the names of the GPUs as `list`. If GPUs may exist but can't be listed, return the reason as `why`
    instead.
    """
    tool = shutil.which("nvidia-smi", path=path)
    if tool is None:
        signs = [d for d in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg") if os.path.exists(d)]
        if signs or not sys.platform.startswith("linux"):
            return {"why": "nvidia-smi was not found, but a GPU may exist (%s)" % (signs[0] if signs else sys.platform)}
        return {"list": []}
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=CALL_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"why": "nvidia-smi: %s" % type(error).__name__}
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode != 0:
        if any("No devices were found" in line for line in lines):
            return {"list": []}
        return {"why": "nvidia-smi: exit code %d" % done.returncode}
    return {"list": lines}


def missing_modules(python: str, names: list[str], env: dict[str, str]) -> list[str]:
    """Return the modules that an interpreter can't find. Raises OSError if the interpreter does not answer."""
    asked = [python, "-c", FIND, *names]
    try:
        done = subprocess.run(
            asked, capture_output=True, timeout=CALL_S, stdin=subprocess.DEVNULL, env=env, cwd="/", check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError("%s did not answer within %d s" % (python, CALL_S)) from None
    return missing_of(python, done.returncode, done.stdout.decode("utf-8", "replace"))


def missing_of(python: str, code: int, output: str) -> list[str]:
    """Parse the list of modules that `FIND` printed. Raises OSError if `FIND` did not complete."""
    _, mark, rest = output.rpartition("missing:")
    if code != 0 or not mark:
        raise OSError("%s: exit code %d" % (python, code))
    return rest.split()


def look(request: Json) -> Json:
    """Return the state of the requested packages, program, files, modules and GPUs.

    `env` is the job's environment; its PATH is used to find the job's program. All other programs are looked up on
    `path`, which jobs can't change.
    """
    env = dict(os.environ, **request.get("env", {}))
    own = request.get("path") or os.environ.get("PATH", os.defpath)
    found: Json = {"ok": True, "python": platform.python_version(), "markers": markers()}
    found["packages"] = packages(list(request.get("names") or []))
    found["uv"] = shutil.which("uv", path=own) is not None
    if request.get("gpu"):
        found["gpus"] = gpus(own)
    program = request.get("program") or ""
    there = shutil.which(program, path=env.get("PATH", os.defpath)) if program else None
    found["program"] = there is not None or not program
    found["files"] = [name for name in request.get("files") or [] if not os.path.exists(name)]
    if there and request.get("modules"):
        try:
            found["modules"] = missing_modules(there, list(request["modules"]), env)
        except OSError as error:
            found["modules_why"] = str(error)[:300]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(json.loads(sys.argv[1]))) + "\n")
