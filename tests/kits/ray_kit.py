"""A temporary Ray head in a separate network namespace, and a relay to its dashboard that can inject faults.

`ray start` listens on every address of the machine. Its network namespace has only loopback.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpuwarden.backends import _ray_api
from gpuwarden.core.models import JobSpec, Place
from real_parts import need
from waiting import eventually

PORT = 28265
RAYS_OWN_S = 900.0
"""Seconds that Ray's processes wait for each other. On a busy machine, operations of seconds can take minutes."""
ODD = json.dumps({"welcome": "to the cluster"}).encode()

# Runs in Ray's network namespace: forwards a Unix socket to the dashboard.
INSIDE = """
import socket, sys, threading
def pump(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
    except OSError: pass
    finally:
        for s in (a, b):
            try: s.shutdown(socket.SHUT_RDWR)
            except OSError: pass
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1]); server.listen(64)
    while True:
        near = server.accept()[0]
        try: far = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
        except OSError: near.close(); continue
        for pair in ((near, far), (far, near)): threading.Thread(target=pump, args=pair, daemon=True).start()
"""
# `ray start` with two changes that have no setting: its 30 s limit for processes, and a port that it doesn't pass on.
PATIENT = """
import sys, time
from ray._private import services
from ray.scripts.scripts import main
ask, left = services.get_node, [5 * int(sys.argv.pop(1))]
def get_node(*words):
    while True:
        try: return ask(*words)
        except RuntimeError:
            left[0] -= 1
            if left[0] < 0: raise
            time.sleep(0.2)
services.get_node = get_node
begin = services.start_ray_process
def start_ray_process(command, kind, *words, **more):
    told = ["--dashboard_agent_listen_port=20003"] if kind == "raylet" else []
    return begin([*command, *told], kind, *words, **more)
services.start_ray_process = start_ray_process
main()
"""
START = """
python="$1" socket="$2" port="$3" rays_python="$4" folder="$5" inside="$6" patient="$7" patience="$8"
"$python" -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x41))'
"$python" -c "$inside" "$socket" "$port" &
exec "$rays_python" -c "$patient" "$patience" start --head --block --node-ip-address=127.0.0.1 --port=26379 \
  --dashboard-host=127.0.0.1 --dashboard-port="$port" --ray-client-server-port=20001 --num-cpus=2 \
  --dashboard-agent-grpc-port=20002 --dashboard-agent-listen-port=20003 --runtime-env-agent-port=20004 \
  --metrics-export-port=20005 \
  --object-store-memory=100000000 --include-log-monitor=false --disable-usage-stats --temp-dir="$folder"
"""
# The raylet's last message if its agents were slow: the time that it waits for their ports has no setting
# (ray-project/ray#65983). The ports above are fixed; no other process is in the namespace.
LATE_AGENT = re.compile(r"Timed out waiting for file \S*_port|[Aa]gent\b.*\btimed out", re.DOTALL)
# Settings for the time that Ray's processes wait for each other, with their units per second.
SETTINGS = {
    "RAY_gcs_server_port_wait_time_s": 1,
    "RAY_gcs_server_request_timeout_seconds": 1,
    "RAY_gcs_rpc_server_reconnect_timeout_s": 1,
    "RAY_raylet_start_wait_time_s": 1,
    "RAY_agent_register_timeout_ms": 1000,
    "RAY_worker_register_timeout_seconds": 1,
    "RAY_health_check_initial_delay_ms": 1000,
    "RAY_health_check_timeout_ms": 1000,
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": 1,
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": 1,
    "RAY_DASHBOARD_GCS_RPC_TIMEOUT_SECONDS": 1,
    "RAY_JOB_START_TIMEOUT_SECONDS": 1,
}


class UnixConnection(http.client.HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, path: Path, wait_s: float) -> None:
        super().__init__("127.0.0.1")
        self.path, self.wait_s = path, wait_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.wait_s)
        self.sock.connect(str(self.path))


class Head:
    """One Ray head, and a relay on loopback in front of it. `mode` is the relay's fault."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "dash"
        self.mode, self.lists = "", 0
        self.network = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def start(self) -> Head:
        """Start the head, and wait until it has run a first job. Retry if its raylet did not wait for an agent."""
        why = self._start_once()
        if LATE_AGENT.search(why):
            print(f"Ray's head is started once more, because its raylet gave up:\n{why}", file=sys.stderr)
            self._end()
            shutil.rmtree(self.folder / "ray")
            self.socket.unlink(missing_ok=True)
            why = self._start_once()
        if why:
            pytest.fail(f"Ray's head did not start:\n{why}", pytrace=False)
        return self

    def _start_once(self) -> str:
        """Start the head. Return an empty string when a first job has run, else the reason for the failure."""
        self._launch()
        (why,) = eventually(self._outcome, 200, every=0.2)  # Ray starts a dozen processes, one after the other
        return why

    def _outcome(self) -> tuple[str, ...]:
        """Return an empty tuple while the start is in progress, then one text, which is empty on success."""
        if self._ready():
            return ("",)
        if died := self._last_words():  # `ray start` keeps waiting for a dead raylet
            return (died,)
        assert self.process is not None
        with suppress(OSError):
            seen, own = (os.readlink(f"/proc/{pid}/ns/net") for pid in (self.process.pid, "self"))
            self.network = seen if seen != own else self.network
        if self.process.poll() is not None:
            return ((self.folder / "log").read_text(errors="replace") or "it ended without a word",)
        return ()

    def _last_words(self) -> str:
        """Return the raylet's message if one of its checks failed, else an empty string."""
        with suppress(OSError):
            said = (self.folder / "ray" / "session_latest" / "logs" / "raylet.err").read_text(errors="replace")
            return said[-4_000:] if "Check failed" in said else ""
        return ""

    def _launch(self) -> None:
        ray = os.environ.get("GPUWARDEN_RAY") or shutil.which("ray")
        need("Ray (`pip install 'ray[default]'`, its `ray` on the PATH or in GPUWARDEN_RAY)", ray is not None)
        need("root, for a network of Ray's own", os.geteuid() == 0 and shutil.which("unshare") is not None)
        assert ray is not None
        python = Path(ray).resolve().with_name("python")
        words = [sys.executable, str(self.socket), str(PORT), str(python), str(self.folder / "ray"), INSIDE, PATIENT]
        # Ray passes its environment to every job: it gets no server variables and no proxy, which is unreachable.
        env = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(self.folder), "LANG": "C.UTF-8"}
        env |= {name: f"{RAYS_OWN_S * unit:.0f}" for name, unit in SETTINGS.items()}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", START, "sh", *words, f"{RAYS_OWN_S:.0f}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    def _ready(self) -> bool:
        """Return whether a first job has succeeded. It is submitted as soon as the dashboard accepts it."""
        with suppress(OSError, ValueError, http.client.HTTPException, KeyError):
            found = self.jobs("first")
            if not found:
                self.ask("POST", "/api/jobs/", b'{"entrypoint": "true", "submission_id": "first"}')
                return False
            assert found[0]["status"] in {"PENDING", "RUNNING", "SUCCEEDED"}, found
            return found[0]["status"] == "SUCCEEDED"
        return False

    def ask(self, method: str, path: str, body: bytes = b"", wait_s: float = RAYS_OWN_S) -> tuple[int, bytes]:
        """Send a request to the dashboard, without the relay."""
        way = UnixConnection(self.socket, wait_s)
        try:
            way.request(method, path, body or None, {"Content-Type": "application/json"} if body else {})
            reply = way.getresponse()
            return reply.status, reply.read()
        finally:
            way.close()

    def jobs(self, stem: str) -> list[dict[str, object]]:
        """Return Ray's rows of the jobs whose ids start with `stem`."""
        return [row for row in json.loads(self.ask("GET", "/api/jobs/")[1]) if row["submission_id"].startswith(stem)]

    def kill_supervisor(self, folder: str) -> None:
        """Kill a job's supervisor, and with it the job's entrypoint, as when memory runs out."""
        pid = self._runner_of(folder)
        while pid > 1 and not _words(pid).startswith("ray::JobSupervisor"):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
        os.kill(pid, signal.SIGKILL)

    def _runner_of(self, folder: str) -> int:
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return next(p for p in pids if f"allot {folder}" in (words := _words(p)) and words.startswith("python3"))

    def stop(self) -> None:
        """End the head, and every process in its network namespace."""
        self.server.shutdown()
        self.server.server_close()
        self._end()

    def _end(self) -> None:
        for path in Path("/proc").iterdir() if self.network else ():  # it has no state to save
            with suppress(OSError):
                if path.name.isdecimal() and os.readlink(path / "ns/net") == self.network:
                    os.kill(int(path.name), signal.SIGKILL)
        self.network = ""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _handler(head) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Relay(BaseHTTPRequestHandler):
            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                head.lists += (self.command, self.path) == ("GET", "/api/jobs/")
                if head.mode == "down":
                    self.close_connection = True
                    return
                status, raw = (200, ODD) if head.mode == "odd" else head.ask(self.command, self.path, body)
                if head.mode == "cut" and self.command == "POST":
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = _pass  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Relay


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


class RayEngine:
    """The head as the engine of the backend contract."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "ray/local", "command": ["sh", "-c", text], "timeout_s": 7200}
        return JobSpec.model_validate({**given, **fields})

    @contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        self.head.mode = mode
        try:
            yield
        finally:
            self.head.mode = ""

    def cut(self) -> object:
        """Lose the next reply after Ray has accepted the job."""
        return self._mode("cut")

    def down(self) -> object:
        return self._mode("down")

    def odd(self) -> object:
        return self._mode("odd")

    def questions(self) -> int:
        return self.head.lists


@pytest.fixture(name="patient_ray")
def patient_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the backend's time limit for replies, for busy machines."""
    monkeypatch.setattr(_ray_api, "REPLY_S", RAYS_OWN_S)
    monkeypatch.setattr(_ray_api, "CONNECT_S", RAYS_OWN_S)


@pytest.fixture(scope="module", name="head")
def head_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """One Ray head for a module."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gwray") as folder:  # its sockets need a short path
        head = Head(Path(folder))
        try:
            yield head.start()
        finally:
            head.stop()


def place_of(head: Head, folder: Path) -> Place:
    """Return a place on the cluster whose run folders are below `folder`."""
    return Place(platform="ray/local", host=head.address, run_root=str(folder / "runs"))
