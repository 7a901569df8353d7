"""Examine one node of a multi-node job, and its network paths to other nodes. This file is sent to each node.

    python -I -S -c LOADER    reads the agent's source as one line of base64, then one JSON request per line;
                              prints one JSON line per request, until stdin ends
    python -c SOURCE reduce   runs one rank of an all-reduce with the Python that has PyTorch; prints one line per stage

Runs on Linux with Python >= 3.8 and only the standard library. The agent writes no files. A fact that can't be read is
None, never a guess. The caller interprets the facts. The verbs are:

    facts    report identity, interfaces, InfiniBand, fabric manager, PyTorch, and NCCL, Gloo and similar variables
    clock    report this node's time
    listen   answer other nodes over TCP and UDP at one address, until `unlisten`
    reach    connect to another node's listener from one address
    path     find the largest packet that reaches another node without fragmentation, with ping or UDP
    unlisten free the TCP port, so that the ranks or the job can use it
    reduce   run one rank
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

SOURCE = ""
"""The agent's source code, set by its loader. Ranks are started from this code."""
LIFE_S = 900
CALL_S = 10.0
ANSWER_S = 2.0
MAX_TEXT = 300
HEADER = 28
"""The size in bytes of an IPv4 header plus an ICMP or UDP header."""
SIZES = (9000, 4096, 1500, 1450, 1400, 1280, 576)
VARIABLES = re.compile(r"(NCCL|GLOO|TORCH_NCCL|TORCH_DIST|TORCHELASTIC|HOROVOD|FI|UCX)_[A-Z0-9_]{1,60}")
BRIDGES = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxd|podman|kube|dummy|ifb)")
TUNNELS = re.compile(r"(tun|tap|wg|tailscale|zt|ppp)")
VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")
PLACES = (
    "python3", "python", "/opt/conda/bin/python", "~/miniconda3/bin/python", "/venv/main/bin/python",
    "/usr/local/bin/python3", "/usr/bin/python3",
)  # fmt: skip
Json = Dict[str, Any]


def text_of(path: str) -> Optional[str]:
    """Return a small file's text, or None if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65_536).strip()
    except OSError:
        return None


def run(argv: List[str], timeout_s: float = CALL_S) -> Tuple[Optional[int], str]:
    """Run a command and return its exit code and output.

    The code is None if the command could not be run or timed out.
    """
    env = dict(os.environ, LC_ALL="C")
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return done.returncode, done.stdout[: 1 << 20].decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------------------------- facts


def facts(request: Json) -> Json:
    """Return this node's identity, network interfaces, fabric and PyTorch installation."""
    return {
        "boot": text_of("/proc/sys/kernel/random/boot_id"),
        "network": link_of("/proc/self/ns/net"),
        "hostname": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME"),
        "interfaces": interfaces(),
        "infiniband": infiniband(),
        "fabric": fabric(),
        "torch": find_torch(request.get("python") or ""),
        "env": variables(),
        "now": time.time(),
    }


def link_of(path: str) -> Optional[str]:
    """Return a symbolic link's target, or None if it can't be read."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def interfaces() -> Optional[List[Json]]:
    """Return the network interfaces, with the facts that determine whether ranks can use them."""
    try:
        import fcntl

        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names = [name for _, name in socket.if_nameindex()]
    except (ImportError, OSError):
        return None

    def asked(name: str, number: int) -> Optional[bytes]:
        try:
            return fcntl.ioctl(probe.fileno(), number, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None

    default = default_interface()
    found = []
    with probe:
        for name in names:
            flags, mtu, address, mask = (asked(name, number) for number in (0x8913, 0x8921, 0x8915, 0x891B))
            bits = struct.unpack_from("H", flags, 16)[0] if flags else 0
            kind = "loopback" if bits & 0x8 else kind_of(name)
            found.append(
                {
                    "name": name,
                    "kind": kind,
                    "up": bool(bits & 0x1 and bits & 0x40) if flags else None,
                    "mtu": struct.unpack_from("i", mtu, 16)[0] if mtu else None,
                    "address": socket.inet_ntoa(address[20:24]) if address else None,
                    "prefix": bin(struct.unpack_from("!I", mask, 20)[0]).count("1") if mask else None,
                    "mbit": speed_of(name),
                    "default": name == default,
                }
            )
    return found


def kind_of(name: str) -> str:
    """Return an interface's kind: `bridge` (containers), `tunnel`, or "" for an interface that ranks can use."""
    if BRIDGES.match(name) or os.path.isdir("/sys/class/net/{}/bridge".format(name)):
        return "bridge"
    return "tunnel" if TUNNELS.match(name) else ""


def speed_of(name: str) -> Optional[int]:
    """Return an interface's speed in Mbit/s, or None if the driver does not report it."""
    speed = text_of("/sys/class/net/{}/speed".format(name)) or ""
    return int(speed) if speed.isdigit() and 0 < int(speed) < 10_000_000 else None


def default_interface() -> Optional[str]:
    """Return the default route's interface."""
    rows = [row.split() for row in (text_of("/proc/net/route") or "").splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), None)


def infiniband() -> List[Json]:
    """Return the ports of InfiniBand and RoCE adapters."""
    found = []
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        rate = re.match(r"(\d+(?:\.\d+)?) Gb", text_of(port + "/rate") or "")
        state = text_of(port + "/state") or ""
        found.append(
            {
                "name": port.split("/")[4],
                "active": state.endswith("ACTIVE") if state else None,
                "mbit": int(float(rate.group(1)) * 1000) if rate else None,
            }
        )
    return found


def fabric() -> Json:
    """Return facts about the NVSwitch fabric. `switches` is None if the PCI devices can't be read."""
    devices = glob.glob("/sys/bus/pci/devices/*")
    ids = [(text_of(d + "/vendor"), text_of(d + "/class")) for d in devices]
    found: Json = {"switches": ids.count(("0x10de", "0x068000")) if devices else None}
    driver = text_of("/sys/module/nvidia/version")
    if driver is None and shutil.which("nvidia-smi"):
        code, out = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        driver = out.split("\n")[0].strip() if code == 0 else None
    found["driver"] = driver
    code, out = run(["systemctl", "is-active", "nvidia-fabricmanager"])
    word = out.strip().split("\n")[0]
    known = {"active", "inactive", "failed", "activating", "deactivating", "unknown"}
    found["service"] = word if code is not None and word in known else None
    if found["service"] is None and process_runs("nv-fabricmanager"):
        found["service"] = "active"
    code, out = run(["nv-fabricmanager", "--version"])
    version = VERSION.search(out) if code == 0 else None
    found["version"] = version.group(0) if version else None
    states = None
    if driver is not None and shutil.which("nvidia-smi"):
        code, out = run(["nvidia-smi", "-q"])
        states = re.findall(r"^\s+Fabric\n\s+State\s+: (.+)$", out, re.M) if code == 0 else None
    found["gpus"] = len(glob.glob("/proc/driver/nvidia/gpus/*"))
    found["states"] = None if states is None else [s.strip()[:40] for s in states]
    return found


def process_runs(name: str) -> bool:
    """Return whether a process with this name is running."""
    return any(text_of(path) == name[:15] for path in glob.glob("/proc/[0-9]*/comm"))


_TORCH = r"""
import json, sys
from importlib import metadata
from importlib.util import find_spec
versions = {"python": sys.executable, "torch": None, "nccl": None}
if find_spec("torch") is not None:
    for key, names in (("torch", ["torch"]), ("nccl", ["nvidia-nccl-cu" + n for n in ("13", "12", "11")])):
        for name in names:
            try:
                versions[key] = versions[key] or metadata.version(name)
            except metadata.PackageNotFoundError:
                pass
    versions["torch"] = versions["torch"] or "unknown"
print(json.dumps(versions))
"""


def find_torch(python: str) -> Json:
    """Return the first Python that has PyTorch, and the versions from its package metadata. No package is imported."""
    for place in [python] if python else PLACES:
        path = shutil.which(os.path.expanduser(place))
        code, out = run([path, "-c", "import sys; sys.path.pop(0)\n" + _TORCH]) if path else (None, "")
        versions = parsed(out) if code == 0 else None
        if versions and versions.get("torch"):
            return versions
    return {"python": None, "torch": None, "nccl": None}


def variables() -> Json:
    """Return the variables that configure communication. The environment overrides NCCL's configuration files."""
    found: Json = {}
    for path in ("/etc/nccl.conf", os.path.expanduser("~/.nccl.conf")):
        for row in (text_of(path) or "").splitlines():
            name, equals, value = row.partition("=")
            if equals and not row.lstrip().startswith("#"):
                found[name.strip()] = value.strip()
    found.update(os.environ)
    return {k: str(v)[:MAX_TEXT] for k, v in found.items() if VARIABLES.fullmatch(k)}


# ------------------------------------------------------------------------------------------------------- the network


class Listener:
    """Answer other nodes at one address.

    TCP replies contain the token and the caller's address; UDP replies contain only the token.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self.token = token.encode()
        self.tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.tcp.bind((address, port))
        self.tcp.listen(128)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind((address, 0))
        for loop in (self.accept, self.echo):
            threading.Thread(target=loop, daemon=True).start()

    def accept(self) -> None:
        """Answer callers that send the token."""
        while True:
            try:
                peer, address = self.tcp.accept()
                with peer:
                    peer.settimeout(ANSWER_S)
                    if peer.recv(len(self.token)) == self.token:
                        peer.sendall(self.token + address[0].encode())
            except OSError:
                if self.tcp.fileno() < 0:
                    return

    def echo(self) -> None:
        """Answer a packet of any size with the token that it contains."""
        while True:
            try:
                packet, address = self.udp.recvfrom(65_535)
                if packet.startswith(self.token):
                    self.udp.sendto(self.token, address)
            except OSError:
                if self.udp.fileno() < 0:
                    return


LISTENERS: List[Listener] = []


def listen(request: Json) -> Json:
    """Listen on an address and return the ports. If that fails, `error` is the name of the errno."""
    try:
        listener = Listener(request["address"], int(request["port"]), request["token"])
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, "EIO")}
    LISTENERS.append(listener)
    return {"tcp": listener.tcp.getsockname()[1], "udp": listener.udp.getsockname()[1]}


def unlisten(request: Json) -> Json:
    """Close the TCP listeners."""
    for listener in LISTENERS:
        with_shutdown(listener.tcp)
    return {}


def with_shutdown(sock: socket.socket) -> None:
    """Close a listening socket so that the thread waiting on it ends."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


def reach(request: Json) -> Json:
    """Connect to another node's listener. `seen` is this node's address, as the listener sees it."""
    token = request["token"].encode()
    start = time.monotonic()
    try:
        source = (request["source"], 0)
        with socket.create_connection((request["to"], request["port"]), ANSWER_S * 2, source) as peer:
            peer.settimeout(ANSWER_S)
            peer.sendall(token)
            answer = b""
            while len(answer) < 200:
                piece = peer.recv(200)
                if not piece:
                    break
                answer += piece
    except TimeoutError:
        return {"reached": False, "error": "ETIMEDOUT"}
    except OSError as error:
        return {"reached": False, "error": errno.errorcode.get(error.errno or 0, "EIO")}
    took = time.monotonic() - start
    if not answer.startswith(token):
        return {"reached": False, "error": "OTHER_SERVICE"}
    return {"reached": True, "seen": answer[len(token) :].decode("ascii", "replace"), "seconds": took}


def path(request: Json) -> Json:
    """Find the largest packet that reaches another node unfragmented, with ping or, if ping fails, over UDP.

    `small` is true if a small packet was answered. `limit` is the size limit that a router reported; TCP respects it.
    """
    mtu = int(request["mtu"])
    for way in (pinged, sent) if request.get("ping", True) else (sent,):
        limits: List[int] = []
        small, _ = way(request, 100)
        if not small:
            continue
        for size in [mtu] + [size for size in SIZES if size < mtu]:
            if limits and size > limits[0]:
                continue
            arrived, limit = way(request, size)
            limits += [limit] if limit else []
            if arrived:
                return {"small": True, "passes": size, "limit": limits[0] if limits else None, "by": way.__name__}
        return {"small": True, "passes": 100, "limit": limits[0] if limits else None, "by": way.__name__}
    return {"small": None, "passes": None, "limit": None, "by": None}


def pinged(request: Json, size: int) -> Tuple[bool, Optional[int]]:
    """Ping with an unfragmented packet of this size.

    Return whether the packet arrived, and the reported limit.
    """
    argv = ["ping", "-n", "-M", "do", "-c", "2", "-i", "0.2", "-W", "1", "-I", request["source"]]
    code, out = run([*argv, "-s", str(size - HEADER), request["to"]])
    limit = re.search(r"mtu\s*=\s*(\d+)", out)
    return code == 0, int(limit.group(1)) if limit else None


def sent(request: Json, size: int) -> Tuple[bool, Optional[int]]:
    """Send an unfragmented UDP packet of this size, at most twice.

    Return whether a small reply arrived, and the reported limit.
    """
    token = request["token"].encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((request["source"], 0))
            sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
            sock.connect((request["to"], request["udp"]))
        except OSError:
            return False, None
        sock.settimeout(1.0)
        for _ in range(2):
            try:
                sock.send(token + bytes(size - HEADER - len(token)))
                if sock.recv(100) == token:
                    return True, None
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return False, sock.getsockopt(socket.IPPROTO_IP, 14)  # IP_MTU
    return False, None


# ------------------------------------------------------------------------------------------------------ the all-reduce


def reduce(request: Json) -> Json:
    """Run one rank of the all-reduce and return its report. Kill the rank when its time limit is reached."""
    limit = float(request["within_s"]) + 20
    env = dict(os.environ, **{str(k): str(v) for k, v in request["env"].items()})
    rank = subprocess.Popen(
        [request["python"], "-c", SOURCE, "reduce"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=env, cwd="/",
    )  # fmt: skip
    try:
        out, err = rank.communicate(json.dumps(request).encode(), limit)
    except subprocess.TimeoutExpired:
        rank.kill()
        out, err = rank.communicate()
    report: Json = {"stage": "start", "code": rank.returncode}
    for row in out.decode("utf-8", "replace").splitlines():
        report.update(parsed(row) or {})
    if report["stage"] != "done":
        report["error"] = report.get("error") or err[-MAX_TEXT:].decode("utf-8", "replace")
    return report


def rank_main() -> None:
    """Join the other ranks, run the all-reduce several times, and print its median duration."""
    asked = json.load(sys.stdin)

    def tell(stage: str, **more: Any) -> None:
        print(json.dumps({"stage": stage, **more}), flush=True)

    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        nccl = asked["backend"] == "nccl"
        library: Any = torch.cuda.nccl
        numbers = library.version() if nccl else ()
        tell("joining", torch=torch.__version__, nccl=".".join(map(str, numbers)) or None)
        device = torch.device("cuda:0" if nccl else "cpu")
        dist.init_process_group(
            asked["backend"],
            init_method="tcp://{}:{}".format(asked["to"], asked["port"]),
            rank=asked["rank"],
            world_size=asked["world"],
            timeout=timedelta(seconds=float(asked["within_s"])),
        )
        tell("met")
        times, right = [], True
        for _ in range(asked["rounds"]):
            tensor = torch.ones(int(asked["bytes"]) // 4, device=device)
            dist.barrier()
            start = time.monotonic()
            dist.all_reduce(tensor)
            if nccl:
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
            right = bool((tensor == asked["world"]).all().item()) and right
        tell("done", seconds=sorted(times)[len(times) // 2], right=right)
        dist.barrier()
    except Exception as error:
        print(json.dumps({"error": "{}: {}".format(type(error).__name__, error)[:MAX_TEXT]}), flush=True)
        sys.exit(1)


# ---------------------------------------------------------------------------------------------------------- requests


def parsed(text: str) -> Optional[Json]:
    """Parse a line as a JSON object. Return None if the line is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def clock(request: Json) -> Json:
    """Return this node's time."""
    return {"now": time.time()}


VERBS: Dict[str, Callable[[Json], Json]] = {
    "facts": facts, "clock": clock, "listen": listen, "unlisten": unlisten, "reach": reach, "path": path,
    "reduce": reduce,
}  # fmt: skip


def main() -> None:
    """Answer one request per line. Exit after at most `LIFE_S` seconds, even if the connection was lost."""
    if sys.argv[1:] == ["reduce"]:
        rank_main()
        return
    signal.alarm(LIFE_S)
    for row in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(row)
        try:
            reply = {"ok": True, **VERBS[request["verb"]](request)}
        except Exception as error:
            reply = {"ok": False, "error": "{}: {}".format(type(error).__name__, error)[:MAX_TEXT]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
