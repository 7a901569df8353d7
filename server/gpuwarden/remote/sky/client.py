"""Call SkyPilot's SDK. The SDK runs in a separate process, in the interpreter in which SkyPilot is installed.

The first request starts the process, which is kept because importing the SDK takes seconds. Errors are reported as
class names. A request without a reply may have been carried out.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from anyio import to_thread
from pydantic import TypeAdapter, ValidationError

from gpuwarden.core.errors import (
    AuthFailed,
    BadReply,
    BadRequest,
    Conflict,
    NoCapacity,
    NotFound,
    NotSupported,
    Unreachable,
    WardenError,
)
from gpuwarden.core.sanitize import line

T = TypeVar("T")
PYTHON: Final = "GPUWARDEN_SKY_PYTHON"
ANSWER_S: Final = 150.0
VERSION: Final = "0.14.1"
INSTALL: Final = f"Run `uv tool install skypilot=={VERSION}`, or set {PYTHON} to SkyPilot's interpreter."
_MEANINGS: Final[dict[str, tuple[type[WardenError], str]]] = {
    "ClusterDoesNotExist": (NotFound, ""),
    "ControllerStopped": (Unreachable, "`sky jobs queue --refresh` restarts the controller, which is then billed."),
    "ClusterNotUpError": (Conflict, "The cluster must be up."),
    "ApiServerAuthenticationError": (AuthFailed, "Log in: sky api login."),
    "PermissionDeniedError": (AuthFailed, "Ask the API server's administrator for access."),
    "NoCloudAccessError": (AuthFailed, "Run `sky check` on the machine that runs the API server."),
    "ResourcesUnavailableError": (NoCapacity, "Request another GPU, or choose another infrastructure."),
    "NotSupportedError": (NotSupported, ""),
    "APINotSupportedError": (NotSupported, f"The API server requires SkyPilot {VERSION} or newer."),
    "APIVersionMismatchError": (NotSupported, f"Install SkyPilot {VERSION} on the client and the server."),
    "ResourcesMismatchError": (BadRequest, ""),
    "InvalidClusterNameError": (BadRequest, ""),
    "InvalidSkyPilotConfigError": (BadRequest, "Correct ~/.sky/config.yaml."),
    "CloudError": (Unreachable, "SkyPilot's catalog or a cloud is not responding; try again."),
    "ApiServerConnectionError": (Unreachable, "Check that the API server is up. `sky api start` starts a local one."),
    "RequestException": (Unreachable, "Check with `sky api info` that SkyPilot's API server is up."),
    "ValidationError": (BadReply, f"Check that SkyPilot {VERSION} is installed."),
    "BadTask": (BadRequest, "`sky gpus list` lists GPUs; `sky check` lists clouds."),
}


def sky_python(env: Mapping[str, str]) -> str:
    """Return the interpreter in which SkyPilot is installed. Raises NotSupported if none is found."""
    if named := env.get(PYTHON, "").strip():
        return str(Path(named).expanduser())
    program = shutil.which("sky", path=env.get("PATH"))
    beside = Path(program).resolve().with_name("python") if program else None
    if beside is None or not beside.exists():
        raise NotSupported("SkyPilot is not installed on this machine", INSTALL)
    return str(beside)


class _Helper:
    """The process that runs the SDK. It handles one request at a time."""

    def __init__(self, python: str, env: Mapping[str, str]) -> None:
        self.lock = threading.Lock()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        source = files("gpuwarden.remote.sky").joinpath("sdk_helper.py").read_text("utf-8")
        try:
            self.process = subprocess.Popen(
                [python, "-c", source], env=dict(env), text=True, encoding="utf-8", start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            )  # fmt: skip
        except OSError as error:
            self.errors.close()
            raise NotSupported(f"SkyPilot's interpreter can't be started: {error}", INSTALL) from error
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for text in lines:
                self.answers.put(text)
        self.answers.put("")

    def end(self) -> str:
        """Kill the process, and return the last line that it wrote to stderr."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.process.stdin.close()
        with self.errors as message:
            message.seek(0)
            return message.read()[-2_000:].decode("utf-8", "replace").strip().rpartition("\n")[2]

    def ask(self, request: str, timeout_s: float) -> str:
        """Return the reply to one request.

        If there is no reply in time, the process is killed, so that a late reply is not mistaken for the reply to the
        next request.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=timeout_s)
        except (OSError, ValueError):
            answer = ""
        except queue.Empty:
            self.end()
            raise Unreachable(
                f"SkyPilot did not answer within {timeout_s:g} s", "The request may have been carried out; check again."
            ) from None
        if not answer:
            last = self.end()
            missing = "No module named 'sky'" in last
            raise (NotSupported if missing else Unreachable)(f"SkyPilot's SDK can't be used: {line(last)}", INSTALL)
        return answer


_HELPERS: dict[tuple[str, ...], _Helper] = {}
_STARTING = threading.Lock()


class SkyClient:
    """A client for SkyPilot's API server that uses this machine's SkyPilot login."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env = os.environ if env is None else env

    async def ask(self, shape: type[T], ask: str, *, timeout_s: float | None = None, **request: Any) -> T:
        """Return the reply to one request. An error from SkyPilot is raised as the matching gpuwarden error."""
        body = json.dumps({"ask": ask, **request})
        raw = await to_thread.run_sync(self._talk, body, timeout_s or ANSWER_S, abandon_on_cancel=True)
        try:
            reply = json.loads(raw)
            if reply["ok"] is True:
                return TypeAdapter(shape).validate_python(reply["value"])
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise BadReply(
                "SkyPilot's reply can't be parsed", f"Check that SkyPilot {VERSION} is installed."
            ) from error
        names, message = reply.get("error"), line(reply.get("message") or "no reason given", 600)
        for name in names if isinstance(names, list) else ():
            if name in _MEANINGS:
                kind, hint = _MEANINGS[name]
                raise kind(f"SkyPilot: {message}", hint)
        # An unknown error is inconclusive about the state of jobs and clusters.
        raise BadReply(
            f"SkyPilot returned an unexpected error: {message}", "`sky api status` lists its current requests."
        )

    def _talk(self, body: str, timeout_s: float) -> str:
        python = sky_python(self.env)
        known = (python, *(f"{k}={v}" for k, v in sorted(self.env.items()) if k == "HOME" or k.startswith("SKYPILOT_")))
        with _STARTING:
            helper = _HELPERS.get(known)
            if helper is None or helper.process.returncode is not None:
                helper = _HELPERS[known] = _Helper(python, self.env)
        with helper.lock:
            return helper.ask(body, timeout_s)
