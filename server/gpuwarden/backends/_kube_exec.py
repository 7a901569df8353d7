"""Run commands in a pod with the interface of `remote.ssh.link`, so that file access and the runner work as over SSH.

Each command uses one WebSocket to the API server. Frames are read one at a time, so a large file is never fully loaded
into memory.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from gpuwarden.backends import _kube_manifests as manifests
from gpuwarden.backends._kube_api import KubeApi, part_of, rows_in
from gpuwarden.core.errors import Conflict, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.ssh.mux import TICK_S

STDIN, STDOUT, STDERR, STATUS, CLOSED = 0, 1, 2, 3, 255
PIECE: Final = 1 << 16
SEND_S: Final = 60.0
START_S: Final = 180.0
LOOK_S: Final = 0.2
MOST_IN_URL: Final = 2_000
"""Maximum size in bytes of a command that is sent in the URL, because proxies limit URLs to 8 KiB.

A longer command is sent over stdin.
"""
MOST_LEAVING: Final = 6
"""File access pods have numbers below this value.

Several are needed because pods on a lost node keep terminating until the node is deleted.
"""


class PodChannel:
    """The connection to one command that runs in a pod."""

    def __init__(self, opened: Any) -> None:
        self._opened, self._socket = opened, opened.sock
        self._out, self._err = bytearray(), bytearray()
        self._status: dict[str, Any] | None = None
        self._ended = self._over = False

    def send(self, data: memoryview) -> int:
        """Send at most `PIECE` bytes to stdin. Return the number of bytes sent."""
        if self._status is not None:
            raise BrokenPipeError("the command has ended")
        piece = bytes(data[:PIECE])
        self._socket.settimeout(SEND_S)
        self._write(lambda: self._opened.write_channel(STDIN, piece))
        return len(piece)

    def end_input(self) -> None:
        """Close stdin."""
        self._write(lambda: self._opened.close_channel(STDIN))

    def receive_into(self, buffer: memoryview, wait_s: float = TICK_S) -> int:
        """Read available bytes of stdout into `buffer`. Return the number of bytes, which is 0 at the end of stdout."""
        while not self._out:
            if self._ended or self._status is not None:
                return 0
            if self._over:
                raise ConnectionError("the cluster closed the connection before the command ended")
            self._frame(wait_s)
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        del self._out[:count]
        return count

    def errors(self) -> bytes:
        """Return the bytes that were written to stderr since the last call."""
        errors, self._err = bytes(self._err), bytearray()
        return errors

    def exited(self) -> bool:
        """Return whether the command has ended or its connection is closed."""
        return self._status is not None or self._over

    def code(self) -> int | None:
        """Wait until the command ends, and return its exit code. Raises ConnectionError if the connection is lost."""
        while self._status is None:
            if self._over:
                raise ConnectionError("the cluster closed the connection before the command ended")
            self._frame(TICK_S)
        if self._status.get("status") == "Success":
            return 0
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            for cause in self._status["details"]["causes"]:
                if cause.get("reason") == "ExitCode":
                    return int(cause["message"])
        raise ConnectionError(f"the pod did not run the command: {line(self._status.get('message'), 300)}")

    def close(self) -> None:
        """Close the connection to the command."""
        with suppress(Exception):
            self._socket.shutdown()

    def _frame(self, wait_s: float) -> None:
        """Read one frame. Raises TimeoutError if no frame arrives within `wait_s` seconds."""
        from websocket import ABNF, WebSocketException, WebSocketTimeoutException

        self._socket.settimeout(max(wait_s, 0.001))
        try:
            opcode, frame = self._socket.recv_data_frame(True)
        except WebSocketTimeoutException as late:
            raise TimeoutError from late
        except (WebSocketException, OSError):
            self._over = True
            return
        if opcode == ABNF.OPCODE_CLOSE:
            self._over = True
            return
        if opcode not in {ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT} or not frame.data:
            return
        channel, data = frame.data[0], bytes(frame.data[1:])
        if channel == STDOUT:
            self._out += data
        elif channel == STDERR:
            self._err += data
        elif channel == CLOSED and data[:1] == bytes([STDOUT]):
            self._ended = True
        elif channel == STATUS:
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                found = None
            self._status = found if isinstance(found, dict) else {"message": "the status is not JSON"}

    def _write(self, send: Any) -> None:
        """Call `send`. Raises ConnectionError if the WebSocket connection is lost."""
        from websocket import WebSocketException

        try:
            send()
        except (WebSocketException, OSError) as lost:
            raise ConnectionError(f"the cluster did not accept input: {line(lost, 200)}") from lost


def claim_key(claim: dict[str, Any]) -> HostKey:
    """Return a volume claim's uid in the form of a host key. Unlike the claim's name, the uid is never reused."""
    uid = base64.b64encode(str(claim["metadata"]["uid"]).encode()).decode()
    return HostKey(f"kubernetes-claim {uid}", first_contact=True)


def claim_uid(pin: str | None) -> str:
    """Return the uid of the claim that `pin` identifies, or "" if `pin` is empty."""
    return base64.b64decode(pin.partition(" ")[2]).decode() if pin else ""


class PodConnection:
    """A connection to the pod that gives access to a claim's files. The pod is created if necessary."""

    def __init__(self, api: KubeApi, mount: str, pin: str | None) -> None:
        claim = api.claim(claim_uid(pin))
        self._api, self._pod = api, _ready(api, claim, mount)
        self.key = claim_key(claim)
        self.alive = True

    def open_channel(self, command: bytes) -> PodChannel:
        """Run a command line in the pod's shell, and return its channel."""
        line, rest = command, b""
        if len(command) > MOST_IN_URL:  # dd reads exactly this many bytes of stdin
            line, rest = b'eval "$(dd bs=1 count=%d 2>/dev/null)"' % len(command), command
        try:
            words = ["/bin/sh", "-c", line.decode("utf-8", "surrogateescape")]
            channel = PodChannel(self._api.exec(self._pod, manifests.MAIN, words))
            while rest:
                rest = rest[channel.send(memoryview(rest)) :]
            return channel
        except OSError:
            self.alive = False  # the pod may have been deleted; the next connection creates a new one
            raise

    def close(self) -> None:
        """Close the connection; the pod exits on its own."""
        self.alive = False


def _ready(api: KubeApi, claim: dict[str, Any], mount: str) -> str:
    """Return the name of the file access pod once the pod is running.

    A terminating pod is skipped, because its node may be lost.
    """
    wanted = manifests.files_manifest(claim, mount)
    first, end = str(wanted["metadata"]["name"]), time.monotonic() + START_S
    names, why = [first, *(f"{first}-{n}" for n in range(2, MOST_LEAVING))], "all pods with that name are terminating"
    while time.monotonic() < end:
        pods = ((name, api.pod(name)) for name in names)
        name, pod = next(
            ((name, pod) for name, pod in pods if pod is None or not pod["metadata"].get("deletionTimestamp")),
            ("", None),
        )
        if pod is None:
            with suppress(Conflict):
                if name:
                    api.create({**wanted, "metadata": {**wanted["metadata"], "name": name}})
            time.sleep(LOOK_S)
            continue
        about, status = pod["metadata"], part_of(pod, "status")
        if part_of(about, "annotations").get(manifests.RUN_DIR) != mount:
            raise Conflict(f"the pod {name} does not mount {mount}", "Delete it, then try again.")
        if status.get("phase") == "Running":
            return name
        if str(status.get("phase")) in {"Succeeded", "Failed"}:
            api.delete_pod(name, about["uid"])
        why = waits_for(pod) or str(status.get("phase"))
        time.sleep(LOOK_S)
    raise Unreachable(
        f"the pod {first}, which gives access to the files, does not start: {why}", "Check the pod's events."
    )


def waits_for(pod: Mapping[str, Any]) -> str:
    """Return the reason that the cluster gives for a waiting pod, or "" if the pod is not waiting."""
    status = part_of(pod, "status")
    for container in rows_in(status, "containerStatuses"):
        waiting = part_of(part_of(container, "state"), "waiting")
        if waiting:
            return line(f"{waiting.get('reason')} {waiting.get('message') or ''}", 200)
    for condition in rows_in(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return line(condition.get("message") or condition.get("reason"), 200)
    return ""
