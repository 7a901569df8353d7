"""Judge what a command does to files: the ones that gpuwarden decides by, live runs, and outputs on rented machines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.interfaces.hooks.guard.shell import name_of

DELETES: Final = frozenset({"rm", "rmdir", "unlink", "shred", "mv", "trash", "trash-put", "truncate", "srm", "gio",
                            "remove-item", "ri", "del", "erase", "move-item"})  # fmt: skip
COPIES: Final = frozenset({"cp", "rsync", "scp", "mv", "install", "ln"})
WRITES: Final = frozenset({"tee", "dd", "install", "chmod", "chown", "vi", "vim", "nano", "emacs", "ed", "patch", "ln",
                           "touch", "sqlite3", "sponge", "chattr", "set-content", "add-content", "clear-content",
                           "out-file"})  # fmt: skip
SCRATCH: Final = re.compile(
    r"(?:^|/)(?:tmp|\.cache|__pycache__|node_modules|\.?venv|build|dist|\.git|\.(?:pytest|mypy|ruff)_cache"
    r"|\.ipynb_checkpoints|\.Trash\S*|pip-\S*)(?:/|$)|\.(?:pyc|pyo|lock|pid|tmp|log|egg-info|sock|swp)$"
)
"""Paths on a rented machine that nobody misses."""
WEIGHTS: Final = re.compile(r"\.(?:pt|pth|safetensors|ckpt|bin|gguf|npz|npy|h5|onnx|parquet|tar|tgz|gz|zip)$|\*")
OUTPUTS: Final = re.compile(
    r"(?i)(?:^|/)(?:out(?:put)?s?|checkpoints?|ckpts?|runs?|results?|weights|adapters?|models?|artifacts?|saved?"
    r"|exp(?:eriment)?s?|logs|wandb|tensorboard|lightning_logs|mlruns)(?:[-_][\w.-]*)?/*$"
)
BROAD: Final = re.compile(r"^(?:~|/|\.|/root|/home/[^/]+|/workspace|/mnt(?:/[^/]+)?|/data|/scratch(?:/[^/]+)?)?/*\*?$")
_RSYNC_VALUED: Final = frozenset({"-e", "--rsh", "--exclude", "--include", "--filter", "-f", "--exclude-from",
                                  "--include-from", "--files-from", "--rsync-path", "--bwlimit", "--port",
                                  "--password-file", "--log-file", "--timeout"})  # fmt: skip
REMOTE: Final = re.compile(r"^(?:[\w.-]+@)?[\w.\[\]-]{2,}:(?!//)|^rsync://")


@dataclass
class Files:
    """Judge what happens to files, seen from a folder.

    `home` and `runs` are protected against removal, `files` against any change; `settings` are the clients' files that
    name this guard.
    """

    home: str = ""
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    cwd: str = "/"
    user: str = ""

    def path(self, text: str) -> str:
        """Return an absolute path; a pattern is the folder that it looks in."""
        text = re.split(r"[*?\[{]", text)[0]
        home = self.user or str(Path.home())
        text = home + text[1:] if text == "~" or text.startswith("~/") else text
        return os.path.normpath(os.path.join(self.cwd, text))  # noqa: PTH118 - a link must not be followed

    def removal(self, text: str) -> str | None:
        """Return why the removal of a path is stopped."""
        path = self.path(text)
        for run in self.runs:
            if _touches(path, run):
                return f"{path} has the run of a job that is not over"
        if self.home and _touches(path, self.home):
            return f"{path} has gpuwarden's ledger and the copies of your checkpoints"
        if any(file.startswith(path.rstrip(os.sep) + os.sep) for file in (*self.files, *self.settings)):
            return f"{path} has files that gpuwarden decides by, or that name this guard; a person removes it"
        return None

    def change(self, text: str) -> str | None:
        """Return why a change of a file is stopped."""
        path = self.path(text)
        for file in self.files:
            if path == file or path.startswith((file + "-", file + os.sep)):
                return f"{path} is what gpuwarden decides by; a person changes it"
        return f"{path} names this guard; a person changes it" if path in self.settings else None

    # ---------------------------------------------------------------------------------------------------- programs

    def judged(self, name: str, args: Sequence[str], *, far: bool) -> str | None:
        """Return why a program that works on files is stopped."""
        plain = [a for a in args if not a.startswith("-")]
        if name == "rsync":
            return self._rsync(args) or self._copied(plain)
        if name in DELETES and (why := self._deleted(name, args, plain, far)):
            return why
        if name in COPIES:
            emptied = "/dev/null" in plain[:-1] and (far or REMOTE.match(plain[-1]))
            return _lost(plain[-1]) if emptied else self._copied(plain)
        if far and name == "dd":
            written = (a.removeprefix("of=") for a in args if a.startswith("of="))
            return next((_lost(a) for a in written if a.startswith("/dev/") or WEIGHTS.search(a)), None)
        if name == "find":
            return self._found(args, far)
        if name in {"sed", "perl", "ruby"} and any(re.match(r"-\w*i|--in-place", a) for a in args):
            return next((why for a in plain if (why := self.change(a))), None)
        if name in WRITES and not (name == "sqlite3" and "-readonly" in args):
            return next((why for a in args if (why := self.change(a.removeprefix("of=")))), None)
        return None

    def _deleted(self, name: str, args: Sequence[str], plain: list[str], far: bool) -> str | None:
        """Return why a deletion is stopped: here by what gpuwarden keeps, on a rented machine by what looks lost."""
        if not far:
            gone = plain[:-1] if name == "mv" else plain
            return next((w for a in gone if (w := self.removal(a) or self.change(a))), None)
        deep = any(re.fullmatch(r"-\w*[rR]\w*|--recursive", a) for a in args)
        lost = [] if name == "mv" else [w for p in plain if (w := self.lost(p, deep=deep))]
        return lost[0] if lost else next((w for a in plain if (w := self.removal(a))), None)

    @staticmethod
    def lost(path: str, *, deep: bool) -> str | None:
        """Return why the removal of a path on a rented machine is stopped; `deep`: of a folder with all in it."""
        return _lost(path) if not SCRATCH.search(path) and (deep or WEIGHTS.search(path)) else None

    def _copied(self, plain: list[str]) -> str | None:
        """Return why a copy is stopped: by the name that it gets, or that it keeps in the folder it goes into."""
        if not plain:
            return None
        *sources, last = plain
        return self.change(last) or next((w for s in sources if (w := self.change(f"{last}/{name_of(s)}"))), None)

    def _rsync(self, args: Sequence[str]) -> str | None:
        """Return why rsync is stopped: `--delete` over outputs on one side, or the removal of what it sent."""
        ends, skip = [], False  # the sources and the destination, without options and their values
        for word in args:
            if not skip and not word.startswith("-"):
                ends.append(word)
            skip = not skip and word in _RSYNC_VALUED
        far = [end for end in ends if REMOTE.match(end)]
        if any(a.startswith("--remove-s") for a in args) and far and ends[-1] not in far:
            return f"{far[0]} would be removed on the machine, and nobody has verified the copy"
        if any(re.match(r"--del(?:ete(?!d-))?", a) for a in args) and ends:
            paths = [REMOTE.sub("", end) for end in ends]
            if far and (BROAD.match(paths[-1]) or any(OUTPUTS.search(path) for path in paths)):
                return _lost(ends[-1])
            return self.removal(ends[-1])
        return None

    def _found(self, args: Sequence[str], far: bool) -> str | None:
        """Return why `find` is stopped that deletes what it finds. What else it runs is judged elsewhere."""
        runs = [i for i, a in enumerate(args) if a in {"-exec", "-execdir", "-ok", "-okdir"}]
        if "-delete" not in args and not any(name_of(a) in DELETES for i in runs for a in args[i + 1 : i + 2]):
            return None
        names = [args[i + 1] for i, a in enumerate(args[:-1]) if a in {"-name", "-iname", "-path"}]
        roots = [a for a in args if not a.startswith("-")]
        if names and all(SCRATCH.search(n) for n in names):
            return None
        if far:
            lost = [r for r in roots[:1] if not SCRATCH.search(r)]
            return _lost(lost[0]) if lost else None
        return next((w for a in roots if (w := self.removal(a))), None)


def _lost(path: str) -> str:
    return f"{path[:80]} on the machine may be the only copy of an output"


def _touches(path: str, kept: str) -> bool:
    return path == kept or path == os.sep or kept.startswith(path + os.sep) or path.startswith(kept + os.sep)
