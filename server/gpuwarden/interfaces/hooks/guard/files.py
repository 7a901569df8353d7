"""Check a command's effect on files: gpuwarden's state and policy, live runs, and outputs on rented machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpuwarden.interfaces.hooks.guard.limits import Budget
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, name_of, roots
from gpuwarden.interfaces.hooks.guard.reach import MatchCertainty, around, is_in, is_pattern, spellings, touches
from gpuwarden.interfaces.hooks.guard.run_by_options import MESSAGES
from gpuwarden.interfaces.hooks.guard.wrappers import CODE, DOERS, RUNNERS, SHELLS, TEXT_RUNNERS, language
from gpuwarden.interfaces.hooks.guard.writes import COPIES

DELETES: Final = frozenset({"rm", "rmdir", "unlink", "shred", "mv", "trash", "trash-put", "truncate", "srm", "gio",
                            "remove-item", "ri", "del", "erase", "move-item", "rimraf"})  # fmt: skip
READS: Final = frozenset({
    ".", ":", "[", "ag", "awk", "b2sum", "base64", "basename", "bash", "bat", "batcat", "cat", "cd", "cksum",
    "claude", "cmp", "codex", "column", "comm", "cp", "curl", "cursor", "cut", "declare", "df", "diff", "dirname",
    "docker", "du", "echo", "egrep", "exit", "export", "false", "fd", "fgrep", "file", "find", "gawk", "gemini", "gh",
    "git", "gpuwarden", "grep", "head", "hexdump", "jq", "json.tool", "less", "local", "ls", "mawk", "md5sum", "mkdir",
    "more", "nl", "od", "open", "paste", "perl", "podman", "printf", "pushd", "read", "readlink", "readonly",
    "realpath", "return", "rg", "rsync", "ruby", "scp", "sed", "set", "sh", "sha1sum", "sha256sum", "sha512sum",
    "shasum", "sort", "source", "sqlite3", "ssh", "stat", "strings", "tac", "tail", "tar", "test", "tr", "tree",
    "true", "type", "ugrep", "uniq", "view", "wc", "wget", "which", "xdg-open", "xxd", "yq", "zip", "zsh",
})  # fmt: skip
"""Programs that don't change the files in their arguments, except those that `writes.written_by` yields."""
SCRATCH: Final = re.compile(
    r"(?:^|/)(?:tmp|\.cache|__pycache__|node_modules|\.?venv|build|dist|\.git|\.(?:pytest|mypy|ruff)_cache"
    r"|\.ipynb_checkpoints|\.Trash\S*|pip-\S*)(?:/|$)|\.(?:pyc|pyo|lock|pid|tmp|log|egg-info|sock|swp)$"
)
"""Disposable paths on a rented machine."""
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
    """Check the removal and modification of files. Paths are relative to the folder `cwd`.

    `home` and `runs` are protected against removal, and `files` against any change. `settings` are the clients'
    settings files, which configure this guard.
    """

    home: str = ""
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    cwd: str = "/"
    user: str = ""
    budget: Budget = field(default_factory=Budget)
    question: str = ""
    """The reason to ask the user; used only if no check blocks the call."""
    blind: str = ""
    """A path that a command writes to and that may be a protected file."""

    def path(self, text: str) -> str:
        """Return an absolute path. For a pattern, return the folder in which the pattern is expanded."""
        return os.path.normpath(os.path.join(self.cwd, re.split(r"[*?\[{]", self._at_home(text))[0]))  # noqa: PTH118 - a link must not be followed

    def place(self, text: str) -> str:
        """Return an absolute path or pattern. The text after an unknown part is not normalized."""
        text = self._at_home(text)
        if not text.startswith(("/", UNKNOWN)):
            text = f"{self.cwd}/{text}"
        known, mark, rest = text.partition(UNKNOWN)
        folder, slash, name = known.rpartition("/") if mark else (known, "", "")
        return (os.path.normpath(folder) if folder else "") + slash + name + mark + rest

    def _at_home(self, text: str) -> str:
        found = re.match(r"~(\+|[\w.-]*)(?=/|$)", text)
        if found is None:
            return text
        home = self.user or str(Path.home())
        other = os.path.dirname(home) + "/" + found[1]  # noqa: PTH120 - text only
        return (self.cwd if found[1] == "+" else other if found[1] else home) + text[found.end() :]

    def ask(self, why: str) -> None:
        """Record the reason to ask the user. Only the first reason is kept."""
        self.question = self.question or why

    def removal(self, text: str) -> str | None:
        """Return the reason to block the removal of a path. If the path is unclear and a job is live, ask the user."""
        for spelling, known in spellings(text):
            place = self.place(spelling)
            self.budget.spend(10 if is_pattern(place) else 1)
            found = {kept: min(known, touches(place, kept)) for kept in (*self.runs, self.home) if kept}
            for kept, reach in found.items():
                if reach is MatchCertainty.SURELY and kept in self.runs:
                    return f"{place} overlaps the run folder of a job that has not ended"
                if reach is MatchCertainty.SURELY:
                    return f"{place} overlaps gpuwarden's folder, with its ledger and the copies of your checkpoints"
            if known is MatchCertainty.SURELY and any(around(place, f) for f in (*self.files, *self.settings)):
                return f"{place} contains gpuwarden's state or policy, or guard settings; only the user may remove it"
            if self.runs and any(found.values()):  # ask, unless the path ends in a disposable name
                _, unknown, rest = place.rpartition(UNKNOWN)
                if not SCRATCH.search("/" + (rest.partition("/")[2] if unknown else name_of(place))):
                    self.ask(
                        "the path to remove is unknown until the command runs, and may contain a live job's run folder"
                    )
        return None

    def change(self, text: str, *, written: bool = True) -> str | None:
        """Return the reason to block a change to a file."""
        for spelling, known in spellings(text):
            place = self.place(spelling)
            self.budget.spend(10 if is_pattern(place) else 1)
            for file in (*self.files, *self.settings):
                reach = min(known, is_in(place, file))
                if reach is MatchCertainty.SURELY and file in self.files:
                    return f"{place} is a gpuwarden state or policy file; only the user may change it"
                if reach is MatchCertainty.SURELY:
                    return f"{place} configures this guard; only the user may change it"
                if reach and written:
                    self.blind = self.blind or text
        return None

    def unpacked(self, folder: str) -> None:
        """Ask the user before files with unknown names are written to a folder that contains protected files."""
        place = self.place(folder)
        if any(around(place, file) for file in (*self.files, *self.settings)):
            self.ask(f"the command writes unknown files to {place}, which contains gpuwarden's state, policy or guard")

    # ---------------------------------------------------------------------------------------------------- programs

    def judged(self, name: str, args: Sequence[str], *, far: bool) -> str | None:
        """Return the reason to block a program that changes or deletes files."""
        plain = [a for a in args if not a.startswith("-")]
        if name == "rsync":
            return self._rsync(args)
        if name in DELETES and (why := self._deleted(name, args, plain, far)):
            return why
        if name in COPIES and "/dev/null" in plain[:-1] and (far or REMOTE.match(plain[-1])):
            return _lost(plain[-1])
        if far and name == "dd":
            written = (a.removeprefix("of=") for a in args if a.startswith("of="))
            return next((_lost(a) for a in written if a.startswith("/dev/") or WEIGHTS.search(a)), None)
        if name == "find":
            return self._found(args, far)
        if name in {"docker", "podman"} and not far and "run" in args and any(name_of(a) in DELETES for a in args):
            mounts = (
                re.sub(r"^.*?(?:source|src)=|[:,].*$", "", a)
                for a in args
                if re.match(r"[^:]*/[^:]*:/|.*src=|.*source=", a)
            )
            return next((why for mount in mounts if (why := self.removal(mount))), None)
        if name == "git" and not far:
            return self._git(args)
        if name not in READS and not far and any(self.change(a, written=False) for a in self._named(name, args)):
            self.ask(f"`{name}` may change gpuwarden's state or policy, or a file that configures this guard")
        return None

    def _named(self, name: str, args: Sequence[str]) -> Iterator[str]:
        """Yield the arguments, and the parts of each argument that contains a protected file's name.

        Sentences are not split, and neither are code and shell text, because `Judge` checks those.
        """
        read = name in MESSAGES | (SHELLS | TEXT_RUNNERS | RUNNERS) - DOERS or language(name) in CODE
        protected = set() if read else {name_of(file) for file in (*self.files, *self.settings)}
        for word in args:
            yield word.rpartition("=")[2]
            if any(file in word for file in protected):
                yield from re.split(r"[\s\"'`<>=,:;()|]+", word)

    def _git(self, args: Sequence[str]) -> str | None:
        """Return the reason to block a git command that removes untracked files or a folder."""
        words, folder = list(args), "."
        while words and words[0].startswith("-"):
            folder = words[1] if words[0] == "-C" and len(words) > 1 else folder
            words = words[2 if words[0] in {"-C", "-c", "--git-dir", "--work-tree"} else 1 :]
        command, rest = (words[0], words[1:]) if words else ("", [])
        flags = "".join(a[1:] for a in rest if re.fullmatch(r"-[a-zA-Z]+", a))
        named = [a for a, before in zip(rest, ["", *rest], strict=False) if before not in {"-e", "--exclude"}]
        named = [a for a in named if not a.startswith("-")]
        paths = [a if a.startswith(("/", "~", UNKNOWN)) else f"{folder}/{a}" for a in named]
        if command == "clean" and "n" not in flags and "--dry-run" not in rest and ("d" in flags or paths):
            return next((why for p in paths or [folder] if (why := self.removal(p))), None)
        if command == "worktree" and rest[:1] == ["remove"]:
            return next((why for p in paths[1:] if (why := self.removal(p))), None)
        if command == "rm" and "--cached" not in rest:
            return next((why for p in paths if (why := self.removal(p))), None)
        if command in {"checkout", "restore", "apply", "am", "reset"} and folder != ".":
            self.unpacked(folder)
        return None

    def _deleted(self, name: str, args: Sequence[str], plain: list[str], far: bool) -> str | None:
        """Return the reason to block a deletion of protected files here, or of likely outputs on a rented machine."""
        if not far:
            gone = plain[:-1] if name in {"mv", "move-item"} and not {"-t"} & set(args) else plain
            return next((w for a in gone if (w := self.removal(a) or self.change(a, written=False))), None)
        deep = any(re.fullmatch(r"-\w*[rR]\w*|--recursive", a) for a in args)
        lost = [] if name == "mv" else [w for p in plain if (w := self.lost(p, deep=deep))]
        return lost[0] if lost else next((w for a in plain if (w := self.removal(a))), None)

    @staticmethod
    def lost(path: str, *, deep: bool) -> str | None:
        """Return the reason to block the removal of a path on a rented machine. `deep` means recursive."""
        return _lost(path) if not SCRATCH.search(path) and (deep or WEIGHTS.search(path)) else None

    def _rsync(self, args: Sequence[str]) -> str | None:
        """Return the reason to block rsync if it deletes outputs (`--delete`) or removes its source files."""
        ends, skip = [], False  # the sources and the destination; options and their values are omitted
        for word in args:
            if not skip and not word.startswith("-"):
                ends.append(word)
            skip = not skip and word in _RSYNC_VALUED
        far = [end for end in ends if REMOTE.match(end)]
        if any(a.startswith("--remove-s") for a in args) and far and ends[-1] not in far:
            return f"{far[0]} would be removed on the machine before its copy is verified"
        if any(re.match(r"--del(?:ete(?!d-))?", a) for a in args) and ends:
            paths = [REMOTE.sub("", end) for end in ends]
            if far and (BROAD.match(paths[-1]) or any(OUTPUTS.search(path) for path in paths)):
                return _lost(ends[-1])
            return self.removal(ends[-1])
        return None

    def _found(self, args: Sequence[str], far: bool) -> str | None:
        """Return the reason to block a `find` that deletes the files it finds. `Judge` checks its `-exec` commands."""
        runs = [i for i, a in enumerate(args) if a in {"-exec", "-execdir", "-ok", "-okdir"}]
        if "-delete" not in args and not any(name_of(a) in DELETES for i in runs for a in args[i + 1 : i + 2]):
            return None
        names = [args[i + 1] for i, a in enumerate(args[:-1]) if a in {"-name", "-iname", "-path"}]
        if names and all(SCRATCH.search(n) for n in names):
            return None
        if far:
            lost = [r for r in roots(args)[:1] if not SCRATCH.search(r)]
            return _lost(lost[0]) if lost else None
        return next((w for a in roots(args) if (w := self.removal(a))), None)


def _lost(path: str) -> str:
    return f"{path[:80]} on the machine may be the only copy of an output"
