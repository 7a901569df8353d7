"""The sandbox's command line: no path becomes an option, and Landlock gets the same paths as bubblewrap."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.remote.sandbox import boxes, detect
from gpuwarden.remote.sandbox.words import Box, Kind, Sandbox, System, bubblewrap, landlock, seatbelt
from real_parts import need

KEY = "rpa_ThisIsTheKeyOfAnAccount0123456789"
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30).map(
    lambda text: "/" + text.strip("/")
).filter(lambda path: ".." not in path.split("/"))  # fmt: skip
MANY = st.lists(PATHS, max_size=4).map(tuple)
MACHINE = System((("usr/bin", "/bin"),), ("/usr",))
TWO = {"--symlink", "--ro-bind", "--ro-bind-try", "--bind", "--bind-try", "--dev-bind-try"}
ONE = {"--proc", "--dev", "--tmpfs", "--cap-drop", "--chdir"}


@pytest.mark.attack("boundary", "names a folder so that it becomes an option of the sandbox")
@given(run_dir=PATHS, home=PATHS, read=MANY, write=MANY, hidden=MANY, machine=MANY, network=st.booleans())
def test_a_path_never_becomes_an_option(
    run_dir: str, home: str, read: Any, write: Any, hidden: Any, machine: Any, network: bool
) -> None:
    box = Box(run_dir, home, read, write, hidden, machine, network=network)
    words = bubblewrap(Sandbox(Kind.BUBBLEWRAP, "/usr/bin/bwrap", ("--disable-userns",)), box, MACHINE)[1:]
    options = list(parsed(words))
    flags = {o for o, *rest in options if not rest}
    assert flags - {"--share-net"} == {"--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"}
    assert ("--share-net" in flags) is network
    writable = {rest[-1] for o, *rest in options if o in {"--bind", "--bind-try", "--dev-bind-try"}}
    assert writable == {home, *write, *machine, box.work, box.metrics, box.own_home}
    order = [(o, *rest) for o, *rest in options]
    last = max(i for i, (o, *rest) in enumerate(order) if rest[-1:] == [run_dir])
    assert order[last][0] == "--ro-bind" or run_dir == box.home, "the run folder itself stays as it is"


def parsed(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the options with their operands, as bwrap reads them."""
    rest = iter(words)
    for word in rest:
        assert word.startswith("--"), word
        yield (word, *(next(rest) for _ in range(2 if word in TWO else 1 if word in ONE else 0)))


@given(read=MANY, hidden=MANY)
def test_landlock_never_shows_a_folder_with_a_hidden_path(read: Any, hidden: Any) -> None:
    rules = landlock(Box("/r", "/h", read=read, write=read, hidden=hidden), MACHINE)
    shown = [*rules["read"], *rules["write"]]  # type: ignore[misc]
    tops = {p.rstrip("/") for p in shown} - {"/r", "/proc", "/usr", "/bin"}
    assert not [h for h in hidden for top in tops if (h + "/").startswith(top + "/") and top in read]


@pytest.mark.attack("boundary", "names a folder so that it ends a string of the sandbox's profile")
@given(paths=MANY)
def test_a_path_never_terminates_a_profile_string(paths: Any) -> None:
    profile, texts, i = seatbelt(Box("/r", "/h", read=paths)), [], 0
    while (i := profile.find('"', i)) >= 0:
        text, i = "", i + 1
        while profile[i] != '"':
            i += profile[i] == "\\"
            text, i = text + profile[i], i + 1
        texts.append(text)
        i += 1
    assert set(paths) <= set(texts)
    assert profile.count("(version 1)") >= 1 and profile.index("(deny default)") < 40


@pytest.mark.parametrize("path", ["relative", "", "/a/../b", "/a\0b", "--bind"])
def test_a_relative_path_is_refused(path: str) -> None:
    for box in (lambda: Box(path, "/h"), lambda: Box("/r", "/h", write=(path,))):
        with pytest.raises(ValueError, match=re.escape(repr(path))):
            box()


def test_only_a_programs_own_environment_is_shown(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("bin", "lib"):
        (project / name).mkdir(parents=True)
    (project / ".env").write_text(KEY)
    program = project / "bin" / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert boxes.interpreters(str(program)) == (str(program),)
    (project / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert boxes.interpreters(str(program)) == tuple(str(project / n) for n in ("bin", "lib", "pyvenv.cfg"))
    (tmp_path / "id_ed25519").write_text(KEY)
    assert boxes.interpreters(str(tmp_path / "id_ed25519"), "/bin/sh", str(tmp_path / "none")) == ()


def test_a_link_out_of_an_environment_is_excluded(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "share").symlink_to(tmp_path / "keys")
    (venv / "lib").mkdir()
    (venv / "lib64").symlink_to("lib")
    (venv / "pyvenv.cfg").write_text(f"home = {tmp_path}/keys/bin\n")
    (tmp_path / "keys" / "lib").mkdir()
    assert boxes.interpreters(str(venv / "bin" / "python")) == tuple(
        str(venv / n) for n in ("bin", "lib", "lib64", "pyvenv.cfg")
    ), "and a folder is a Python's only where its library is"


def test_no_private_key_of_this_machine_is_shown() -> None:
    assert not {p for p in boxes.system().read if p in {"/etc/ssl", "/etc/pki", "/etc/pki/tls"} or "private" in p}


# ---------------------------------------------------------------------------------------------------------- Landlock

TRIED = """
import json, os, socket, sys
got = []
def tries(name, do):
    try:
        do()
        got.append(name)
    except OSError:
        pass
tries("home", lambda: open(sys.argv[1]).read())
tries("write", lambda: open(sys.argv[1], "a"))
tries("signal", lambda: os.kill(int(sys.argv[2]), 0))
tries("environ", lambda: open(f"/proc/{sys.argv[2]}/environ").read())
tries("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[3]))
tries("tcp", lambda: socket.create_connection(("127.0.0.1", int(sys.argv[4])), 5))
tries("own", lambda: open("work/mine", "w"))
print(json.dumps(got))
"""


@pytest.mark.parametrize("restricted", [True, False])
def test_landlock_confines_a_user(restricted: bool, need_program: Callable[[str], str]) -> None:
    python = "/usr/bin/python3"
    need("a system Python", os.path.exists(python))
    folder = Path(tempfile.mkdtemp(prefix="gw-landlock-"))
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    uid = 65534 if user else os.getuid()
    abstract = f"gw-landlock-{os.getpid()}-{restricted}"
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as tcp:
        listener.bind("\0" + abstract)
        listener.listen()
        try:
            run = folder / "run"
            for name in ("away", "run/work", "run/home"):
                (folder / name).mkdir(parents=True)
            (folder / "away/key").write_text(KEY)
            (run / "metrics.jsonl").touch()
            (run / "first.py").write_bytes(boxes.init_source()[1])
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, uid, -1)
            rules = landlock(Box(str(run), "/nowhere"), boxes.system())
            other = subprocess.Popen(["sleep", "60"], env={"KEY": KEY}, **user)
            words = [python, "-I", "-S", "-c", TRIED, str(folder / "away/key"), str(other.pid), abstract]
            words.append(str(tcp.getsockname()[1]))
            before = [python, "-I", "-S", str(run / "first.py"), json.dumps(rules), "1"] if restricted else []
            done = boxed(before, words, run, user)
        finally:
            other.kill()
            other.wait()
            shutil.rmtree(folder)
    if restricted and b"Landlock is older" in done.stderr + done.stdout:
        need("a kernel with Landlock ABI 6", False)
    got = set(json.loads(done.stdout))
    assert got == ({"own"} if restricted else {"home", "write", "signal", "environ", "abstract", "tcp", "own"}), done


def boxed(
    before: list[str], words: list[str], folder: Path, user: dict[str, Any]
) -> subprocess.CompletedProcess[bytes]:
    """Run a command after the sandbox's words in `before`, or unconfined if there are none."""
    if not before:
        return subprocess.run(words, cwd=folder, capture_output=True, timeout=300, check=True, **user)
    env, feed = os.pipe()
    report, answers = os.pipe()
    threading.Thread(target=lambda: (os.write(feed, b"A=1\0"), os.close(feed))).start()
    try:
        given = [*before, str(env), str(answers), *words]
        return subprocess.run(
            given, cwd=folder, capture_output=True, timeout=300, check=False, pass_fds=(env, answers), **user
        )
    finally:
        for fd in (env, report, answers):
            os.close(fd)


def test_listening_unix_sockets_are_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert str(tmp_path / "s") not in detect.open_sockets(), "nobody listens yet"
        listener.listen()
        assert str(tmp_path / "s") in detect.open_sockets()
    assert str(tmp_path / "s") not in detect.open_sockets()
    assert detect.open_sockets(lambda: "") == []
