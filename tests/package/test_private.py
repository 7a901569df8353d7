"""Only the owner can read the state, whichever command comes first."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.interfaces.cli.main import cli
from gpuwarden.private import private_file, private_folder, write_private
from warm import warm

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
THEIRS = ("/work/", "/fs/", "/volumes/", "/home/.local/")
"""Files that jobs and pretend machines write can have any mode; they are in closed folders."""
FIRST: dict[str, tuple[str, ...]] = {
    "submit": ("submit", "--platform", "local", "--", sys.executable, "-c", "print(1)"),
    "check": ("check", "j0"),
    "cancel": ("cancel", "j0"),
    "pause": ("pause", "j0"),
    "resume": ("resume", "j0"),
    "audit": ("audit", "export", "events.jsonl"),
    "pull": ("pull", "j0"),
    "verify": ("verify", "nothing-here"),
    "teardown": ("teardown", "j0"),
    "approve": ("approve", "t0"),
    "hold": ("hold", "j0"),
    "status": ("status",),
    "jobs": ("jobs",),
    "costs": ("costs",),
    "wait": ("wait", "j0", "--until", "state", "--timeout", "1"),
    "instances": ("instances",),
    "offers": ("offers", "--gpu", "H100"),
    "watch": ("watch", "--once"),
    "history": ("history",),
    "search": ("search", "oom"),
    "diagnose": ("diagnose", "train.log"),
    "rules": ("rules",),
    "profiles": ("profiles",),
    "knowledge": ("knowledge", "check"),
    "fan-out": ("fan-out",),
    "nodes": ("nodes", "check", "local", "nobody.invalid", "--size", "0"),
    "notes": ("notes", "set", "tracker.name", "trackio"),
    "template": ("template", "list"),
    "doctor": ("doctor",),
    "setup": ("setup",),
    "hooks": ("hooks", "install"),
    "mcp": ("mcp",),
    "serve": ("serve", "--host", "0.0.0.0"),
    "dashboard": ("dashboard", "--no-browser"),
    "token": ("token", "list"),
    "passkey": ("passkey", "list"),
    "metrics": ("metrics", "j0"),
    "estimate": ("estimate", "nothing-here", "--gpu", "t4"),
    "demo": ("demo", "--help"),
    "rehearse": ("rehearse", "nothing-here.py"),
    "rehearse-hub": ("rehearse-hub", "--help"),
    "policy": ("policy", "show"),
}
MORE: dict[str, tuple[str, ...]] = {
    "rehearsal": ("submit", "--platform", "rehearsal/runpod", "--timeout", "60", "--max-cost", "1", "--", "true"),
    "pin": ("approve", "--set-pin"),
    "hooks status": ("hooks", "status"),
    "setup of one": ("setup", "zed", "--yes"),
    "json": ("instances", "--json"),
}


def loose(home: Path) -> list[str]:
    """Return everything below a home that others can read or write, with its mode."""
    found = []
    for path in sorted(home.rglob("*")):
        info = path.lstat()
        mine = not any(part in f"{path.relative_to(home).as_posix()}/" for part in THEIRS)
        if mine and not stat.S_ISLNK(info.st_mode) and info.st_mode & 0o077:
            found.append(f"{info.st_mode & 0o777:04o} {path.relative_to(home)}")
    return found


def run_first(home: Path, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run one command in an empty home, with the umask that most systems use."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [*warm(), "-m", "gpuwarden", *words],
        env={**kept, "HOME": str(home)},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
        timeout=300,
    )


def test_every_command_is_covered() -> None:
    assert set(FIRST) == {name for name, command in cli.commands.items() if not command.hidden}


def commands() -> list[object]:
    """Return every command; a command that creates no new kind of state is marked as a slow proof."""
    makers = {"submit", "instances", "watch", "notes", "hooks", "mcp", "rehearsal"}
    return [
        pytest.param(words, id=name, marks=() if name in makers else pytest.mark.prove)
        for name, words in (FIRST | MORE).items()
    ]


@pytest.mark.prove
@pytest.mark.attack("secrets", "reads state that the first command left open to others")
@pytest.mark.parametrize("words", commands())
def test_state_is_private_whichever_command_runs_first(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_first(tmp_path, words)
    assert "Traceback" not in done.stderr and "no such option" not in done.stderr.lower(), done.stderr
    assert not loose(tmp_path), done.stdout + done.stderr


def test_an_open_state_folder_from_an_older_version_is_made_private(tmp_path: Path) -> None:
    home = tmp_path / "gpuwarden"
    home.mkdir(mode=0o755)
    (home / "ledger.db").touch(0o644)
    private_folder(home), private_file(home / "ledger.db")
    assert not loose(tmp_path)


def test_an_existing_shared_folder_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    private_folder(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    private_folder(shared / "a" / "b")
    assert [stat.S_IMODE((shared / p).stat().st_mode) for p in ("a", "a/b")] == [0o700, 0o700]


def test_a_private_file_is_written_whole_and_only_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o644)
    write_private(file, "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "d", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "f"], "no draft is left"
