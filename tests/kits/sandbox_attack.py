"""Attempts of a malicious job to escape the sandbox; `main` writes the results. Standard library only; runs as a job.

python sandbox_attack.py '{"pid": server, "home": ..., "policy": ..., "secret_file": ..., "socket": ..., ...}'
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import signal
import socket
import sqlite3
import sys
import termios
from collections.abc import Callable
from pathlib import Path

GIVEN = json.loads(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
SEIZE = 0x4206  # affects no other process, and ends with this one
TRIES: dict[str, Callable[[], object]] = {}


def attempt(try_it: Callable[[], object]) -> Callable[[], object]:
    """Register an attempt. It returns its loot; an empty value or an error is a failure."""
    TRIES[try_it.__name__] = try_it
    return try_it


@attempt
def environment_of_every_process() -> object:
    found = []
    for pid in [p for p in os.listdir("/proc") if p.isdigit()] + [str(GIVEN["pid"])]:
        with contextlib.suppress(OSError):
            if GIVEN["mark"].encode() in Path("/proc", pid, "environ").read_bytes():
                found.append(pid)
    return found


@attempt
def the_servers_root() -> object:
    return os.listdir(f"/proc/{GIVEN['pid']}/root/")


@attempt
def memory_of_the_server() -> object:
    return Path(f"/proc/{GIVEN['pid']}/maps").read_text()[:40]


@attempt
def ptrace_the_server() -> object:
    return LIBC.ptrace(SEIZE, GIVEN["pid"], 0, 0) == 0


@attempt
def ptrace_the_parent() -> object:
    return LIBC.ptrace(SEIZE, os.getppid(), 0, 0) == 0


@attempt
def environment_of_process_1() -> object:
    return GIVEN["mark"].encode() in Path("/proc/1/environ").read_bytes()


@attempt
def signal_the_server() -> object:
    os.kill(GIVEN["pid"], 0)
    return True


@attempt
def read_the_policy() -> object:
    return Path(GIVEN["policy"]).read_text() or "empty"


@attempt
def write_the_policy() -> object:
    with open(GIVEN["policy"], "r+") as file:
        file.seek(0, os.SEEK_END)
        return file.write("# rewritten\n")


@attempt
def read_the_ledger() -> object:
    with contextlib.closing(sqlite3.connect(f"file:{GIVEN['home']}/ledger.db?mode=ro", uri=True)) as db:
        return db.execute("select count(*) from sqlite_master").fetchone()


@attempt
def list_gpuwardens_home() -> object:
    return [name for name in os.listdir(GIVEN["home"]) if name == "ledger.db"]


@attempt
def read_a_key_in_the_users_home() -> object:
    return Path(GIVEN["secret_file"]).read_text()


@attempt
def read_shadow() -> object:
    return Path("/etc/shadow").read_bytes()[:1]


@attempt
def connect_to_a_socket_with_a_path() -> object:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(GIVEN["socket"])
    return True


@attempt
def connect_to_an_abstract_socket() -> object:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\0" + GIVEN["abstract"])
    return True


@attempt
def connect_to_loopback() -> object:
    with socket.create_connection(("127.0.0.1", GIVEN["port"]), timeout=5):
        return True


@attempt
def see_sockets_of_services() -> object:
    return [p for p in ("/run/docker.sock", "/var/run/docker.sock", "/run/user", "/run/systemd") if os.path.exists(p)]


@attempt
def open_the_terminal() -> object:
    os.close(os.open("/dev/tty", os.O_RDWR))
    return True


@attempt
def terminals_among_the_descriptors() -> object:
    return [fd for fd in range(64) if os.isatty(fd)]


@attempt
def type_into_a_terminal() -> object:
    done = []
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, termios.TIOCSTI, b"x")
            done.append(fd)
    return done


@attempt
def open_descriptors_besides_three() -> object:
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
             and os.path.lexists(f"/proc/self/fd/{fd}")}  # fmt: skip
    return {fd: to for fd, to in links.items() if "/proc/" not in to}


@attempt
def change_the_kernels_settings() -> object:
    done = []
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/sys/power/state",
    ):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            done.append(path)
    return done


@attempt
def make_a_user_namespace() -> object:
    return LIBC.unshare(0x10000000) == 0


@attempt
def mount_something() -> object:
    return LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0


@attempt
def change_what_the_runner_reads() -> object:
    run, done = Path(os.environ["GPUWARDEN_RUN_DIR"]), []
    for name in [*os.listdir(run), "status.json.tmp", "stop.json"]:
        if name not in {"work", "home", "metrics.jsonl"}:
            with contextlib.suppress(OSError):
                os.close(os.open(run / name, os.O_WRONLY | os.O_CREAT))
                done.append(name)
    return done


@attempt
def approve_on_a_terminal_of_its_own() -> object:
    child = os.fork()
    if child == 0:
        os.setsid()
        pid, fd = pty.fork()
        if pid == 0:
            env = {**os.environ, "GPUWARDEN_HOME": GIVEN["home"], "GPUWARDEN_POLICY": GIVEN["policy"]}
            env["PYTHONPATH"] = GIVEN["source"]
            words = [sys.executable, "-m", "gpuwarden", "approve", GIVEN["ticket"]]
            os.execve(sys.executable, words, env)
        shown = b""
        with contextlib.suppress(OSError):
            os.write(fd, b"yes\n")
            while block := os.read(fd, 4096):
                shown += block
        Path("approve.txt").write_bytes(shown)
        os._exit(0)
    os.waitpid(child, 0)
    shown = Path("approve.txt").read_text()
    return "Type yes" in shown or GIVEN["mark"] in shown


def main() -> None:
    """Make every attempt, kill the parent if requested, and write the results."""
    got = {}
    for name, try_it in TRIES.items():
        try:
            got[name] = try_it()
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            got[name] = None
    if GIVEN["kill"]:
        os.kill(os.getppid(), signal.SIGKILL)
    Path("out").mkdir(exist_ok=True)
    Path("out/got.json").write_text(json.dumps({name: str(v) for name, v in got.items() if v}))


main()
