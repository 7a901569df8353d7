"""A hook for coding agents: stop shell commands that go around gpuwarden. Standard library only; it is copied and run.

Usage: `guard.py CLIENT CONFIG` with the hook's JSON on standard input; CLIENT is claude, codex or cursor, CONFIG a JSON
file with `home`, `files` and `settings`. It reads a command as a shell would and looks at every simple command in it.

It can't stop what it can't read: a script file that is run, an encoded or computed command, a program of one's own,
another tool than the shell, a person. The account's key decides what is possible; this stops the usual slips.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

NAME = "guard.py"
MAX_COMMAND = 200_000
MAX_DEPTH = 12
HINT = "Ask with gpuwarden's teardown_request: it proves that nothing is lost, and a person approves."

# Program -> sequences of words that end or hide something metered; alternatives are separated by |.
ENDS: dict[str, tuple[str, ...]] = {
    "runpodctl": ("remove", "delete", "stop", "pod|pods remove|delete|stop|terminate|reset", "serverless|sls delete",
                  "network-volume|nv delete"),
    "vastai": ("destroy", "stop", "delete", "recycle"),
    "sky": ("down", "stop", "cancel", "autostop", "jobs cancel", "serve down"),
    "scancel": ("",), "qdel": ("",), "bkill": ("",),
    "kubectl": ("delete", "drain"), "oc": ("delete",), "helm": ("uninstall|delete",),
    "lambda": ("terminate", "instances|instance terminate", "stop"),
    "prime": ("pods|pod terminate|delete|stop",),
    "hf": ("jobs cancel", "jobs scheduled delete|suspend"),
    "ray": ("down", "stop", "job stop|delete"),
    "pspace": ("machine|machines|notebook|deployment delete|stop",),
    "gpuwarden": ("approve", "hooks uninstall", "policy use"),
}  # fmt: skip
ALIASES = {"vast": "vastai", "vast.py": "vastai", "lambda-cli": "lambda", "lambda-cloud": "lambda", "k": "kubectl",
           "huggingface-cli": "hf", "skypilot": "sky", "paperspace": "pspace", "gradient": "pspace"}  # fmt: skip
SHELLS = {"sh", "bash", "zsh", "dash", "ksh", "fish", "ash"}
CODE = {"python": "-c", "python3": "-c", "node": "-e", "perl": "-e", "ruby": "-e", "php": "-r", "deno": "eval"}
SOURCED = {"source", "."}
# Programs that run text that is not shell code, or run it later.
DOERS = {"awk", "gawk", "mawk", "make", "gmake", "at", "batch", "crontab", "expect", "docker", "podman", "alias",
         "trap", "osascript", "lua", "tclsh", "script"}  # fmt: skip
KEYWORDS = {"!", "{", "}", "if", "then", "else", "elif", "fi", "while", "until", "do", "done", "time", "coproc"}
# Programs that run another one, with those of their options that take a value.
WRAPPERS: dict[str, str] = {
    "sudo": "ugpCDhrtTR", "doas": "uC", "env": "uCS", "command": "", "builtin": "", "exec": "a", "nohup": "",
    "nice": "n", "ionice": "cnp", "timeout": "ks", "stdbuf": "ioe", "setsid": "", "xargs": "InPLdEsa", "watch": "n",
    "uvx": "", "npx": "p", "chroot": "", "caffeinate": "t", "unbuffer": "", "parallel": "jN", "busybox": "",
    "flock": "wE", "strace": "eopEs", "screen": "Sc",
}  # fmt: skip
VALUED = {"--user", "--group", "--from", "--with", "--python", "--unset", "--chdir", "--signal",
          "--kill-after", "--adjustment", "--max-args", "--max-procs", "--arg-file", "--delimiter", "--package",
          "--project"}  # fmt: skip
QUOTES = {"echo", "printf", "git", "grep", "rg", "gh"}
"""Programs whose words are mostly sentences."""
DELETES = {"rm", "rmdir", "unlink", "shred", "mv", "trash", "trash-put", "truncate"}
COPIES = {"cp", "rsync", "scp", "mv", "install", "ln"}
WRITES = {
    "tee",
    "dd",
    "install",
    "chmod",
    "chown",
    "vi",
    "vim",
    "nano",
    "emacs",
    "ed",
    "patch",
    "ln",
    "touch",
    "sqlite3",
}
HOSTS = re.compile(
    r"(?i)runpod\.(?:io|ai)|vast\.ai|lambda(?:labs)?\.(?:ai|com)|paperspace\.(?:com|io)|autodl\.com|primeintellect\.ai"
    r"|huggingface\.co/api/jobs"
)
ENDING = re.compile(
    r"(?i)\bDELETE\b|terminate|destroy|pod(?:Stop|Reset)|/stop\b|/cancel\b|power_?off|release|\"?state\"?\s*[:=]\s*\"?stopped"
)
SDK = re.compile(
    r"\brunpod\.(?:terminate|stop)_pod|\bdestroy_instances?\b|\bstop_instance\b|\bsky\.(?:down|stop)\s*\(|\bcancel_job\s*\("
)


# What a person decides, as variables: where the ledger and the policy are, and every value of the policy.
DECIDES = re.compile(
    r"GPUWARDEN_(?:HOME|POLICY|REHEARSAL_CAPS_\w+|CAPS_\w+|PLATFORMS|APPROVAL_\w+|SECRETS_\w+|WATCH_\w+|RECEIPT_\w+)\+?="
)


class Unreadable(Exception):
    """The text is not a complete shell command."""


@dataclass
class Simple:
    """One simple command: its words, and the files that its output goes to. `fed` reads from a pipe or a file."""

    words: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    piped: bool = False
    fed: bool = False


@dataclass
class Rules:
    """Protected paths: `home` and live run folders against removal, `files` against any change.

    `settings` are the clients' files that name this guard: it stays in there, the rest is theirs. `typing`: the client
    can type into a program that runs, and asks no hook before it does.
    """

    home: str = ""
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    typing: bool = False


# ------------------------------------------------------------------------------------------------- reading a shell


class Reader:
    """Reads shell text into simple commands. Variables that it sets itself are put in; `inner` are substitutions."""

    def __init__(self, text: str, values: dict[str, str]) -> None:
        self.text, self.at, self.values = text.replace("\\\r\n", "").replace("\\\n", ""), 0, values
        self.inner: list[str] = []
        self.heredocs: list[tuple[Simple, str, bool]] = []

    def commands(self) -> Iterator[Simple]:
        """Yield the simple commands, in order."""
        now, text = Simple(), self.text
        while self.at < len(text):
            c = text[self.at]
            if c in " \t\r":
                self.at += 1
            elif c == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif c in "\n;|&()":
                if c == "&" and text[self.at + 1 : self.at + 2] == ">":
                    self.at += 1
                    continue
                self.at += 1
                now.piped = c == "|" and text[self.at : self.at + 1] != "|"
                yield from self._whole(now)
                if c == "\n":
                    self._bodies()
                now = Simple()
            elif c in "<>":
                self._redirect(now)
            else:
                now.words += self._word()
        yield from self._whole(now)
        self._bodies()

    def _whole(self, command: Simple) -> Iterator[Simple]:
        """Yield a command, unless it only sets variables."""
        words = command.words
        if words and all(re.fullmatch(r"[A-Za-z_]\w*=[\s\S]*", w) for w in words):
            self.values.update((name, value) for name, _, value in (w.partition("=") for w in words))
        elif words or command.targets:
            yield command

    def _redirect(self, command: Simple) -> None:
        operator = re.compile(r"<<<|<<-?|>>|>\||>&|<&|<>|[<>]").match(self.text, self.at)
        assert operator is not None
        self.at = operator.end()
        kind = operator[0]
        if self.text[self.at : self.at + 1] == "(" and kind in "<>":  # process substitution
            self.at += 1
            self.inner.append(self._until_close())
            return
        while self.text[self.at : self.at + 1] in {" ", "\t"}:
            self.at += 1
        start = self.at
        words = self._word() if self.at < len(self.text) and self.text[self.at] not in "\n;|&<>()" else []
        if kind in {"<<", "<<-"} and words:
            self.heredocs.append((command, words[0], self.text[start] in "'\"\\"))
        elif kind == "<<<":
            command.stdin += words
        elif ">" in kind:
            command.targets += words
        command.fed |= kind.startswith("<")

    def _bodies(self) -> None:
        """Read the here-documents that begin at this line."""
        for command, mark, quoted in self.heredocs:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                row = self.text[self.at : end if end >= 0 else None]
                self.at = end + 1 if end >= 0 else len(self.text)
                if row.strip() == mark:
                    break
                lines.append(row)
            body = "\n".join(lines)
            command.stdin.append(body)
            if not quoted:
                self.inner += substitutions(body)
        self.heredocs = []

    def _word(self) -> list[str]:
        """Return the next word; several, when an unquoted variable expands to several."""
        parts, split = "", [""]
        text = self.text
        while self.at < len(text) and text[self.at] not in " \t\r\n;|&<>()":
            c = text[self.at]
            self.at += 1
            if c == "'":
                parts = self._until("'")
            elif c == '"':
                parts = self._double()
            elif c == "\\":
                parts = text[self.at : self.at + 1]
                self.at += 1
            elif c == "$" and text[self.at : self.at + 1] == "'":
                self.at += 1
                parts = self._ansi()
            elif c == "$" and text[self.at : self.at + 1] == '"':
                continue
            elif c == "`":
                self.inner.append(self._until("`"))
                parts = "`"
            elif c == "$":
                first, *rest = re.split(r"[ \t\n]+", self._dollar())
                split[-1] += first
                split += rest
                continue
            else:
                parts = c
            split[-1] += parts
        return [w for w in split if w] or ([""] if len(split) == 1 else [])

    def _until(self, mark: str) -> str:
        end = self.text.find(mark, self.at)
        if end < 0:
            raise Unreadable
        found, self.at = self.text[self.at : end], end + 1
        return found

    def _ansi(self) -> str:
        found = re.compile(r"((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise Unreadable
        self.at = found.end()
        return re.sub(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", _escape, found[1], flags=re.DOTALL)

    def _double(self) -> str:
        found = ""
        while self.at < len(self.text):
            c = self.text[self.at]
            self.at += 1
            if c == '"':
                return found
            if c == "\\" and self.text[self.at : self.at + 1] in {'"', "\\", "$", "`"}:
                found += self.text[self.at]
                self.at += 1
            elif c == "`":
                self.inner.append(self._until("`"))
                found += "`"
            else:
                found += self._dollar() if c == "$" else c
        raise Unreadable

    def _dollar(self) -> str:
        """Read what follows a dollar sign: a substitution, kept aside, or a variable."""
        if self.text[self.at : self.at + 1] == "(":
            self.at += 1
            self.inner.append(self._until_close())
            return "$()"
        name = re.compile(r"\{([A-Za-z_]\w*)(?::?[-=]([\w./-]*))?\}|([A-Za-z_]\w*)").match(self.text, self.at)
        if name is None:
            return "$"
        self.at = name.end()
        return self.values.get(name[1] or name[3], name[2] or f"${name[1] or name[3]}")

    def _until_close(self) -> str:
        """Return the text up to the parenthesis that closes this one."""
        start, depth = self.at, 1
        while self.at < len(self.text):
            c = self.text[self.at]
            self.at += 1
            if c == "'":
                self._until("'")
            elif c == '"':
                kept, self.inner = self.inner, []
                self._double()
                self.inner = kept  # the whole text is read again
            elif c == "\\":
                self.at += 1
            elif c in "()":
                depth += 1 if c == "(" else -1
                if depth == 0:
                    return self.text[start : self.at - 1]
        raise Unreadable


def _escape(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(int(code, 8) & 255) if code[0] in "01234567" else {"n": "\n", "t": "\t", "r": "\r"}.get(code, code)


def substitutions(text: str) -> list[str]:
    """Return the commands inside `$(...)` and backquotes of a here-document."""
    reader = Reader('"' + text.replace('"', '\\"') + '"', {})
    try:
        list(reader.commands())
    except Unreadable:
        return [text]
    return reader.inner


# ------------------------------------------------------------------------------------------------------- judging


class Guard:
    """Judges shell text and file edits."""

    def __init__(self, rules: Rules, cwd: str) -> None:
        self.rules, self.cwd = rules, cwd
        self.values = {"HOME": str(Path.home()), **({"GPUWARDEN_HOME": rules.home} if rules.home else {})}

    def shell(self, text: str, depth: int = 0, *, far: bool = False) -> str | None:
        """Why a command is stopped; None lets it pass."""
        if depth > MAX_DEPTH:
            return "the command is nested too deep to be read"
        if len(text) > MAX_COMMAND:
            return spoken(text)
        reader = Reader(text, self.values)
        try:
            commands = list(reader.commands())
        except Unreadable:
            return spoken(text)
        for before, after in pairwise(commands):
            after.fed |= before.piped
            if before.piped and _name(before.words) in {"echo", "printf"}:
                after.stdin.append(" ".join(before.words[1:]))
        found = (self._simple(c, depth, far) for c in commands)
        inner = (self.shell(t, depth + 1, far=far) for t in reader.inner)
        return next((why for why in (*found, *inner, *_put_in(commands, reader.inner)) if why), None)

    def _simple(self, command: Simple, depth: int, far: bool) -> str | None:
        words = list(command.words)
        for target in command.targets:
            if why := self._change(target):
                return why
        while words:
            name = _name(words)
            if why := _decided(words if name in {"env", "export", "declare", "typeset"} else words[:1]):
                return why
            if re.fullmatch(r"[A-Za-z_]\w*\+?=[\s\S]*", words[0]) or words[0] in KEYWORDS:
                words = words[1:]
            elif name == "function":
                words = words[2:]
            elif name in WRAPPERS:
                text = next((b for a, b in pairwise(words) if a in {"-S", "--split-string"}), "")
                if name == "env" and text:
                    return self.shell(text, depth + 1, far=far)
                words = _inside(words[1:], WRAPPERS[name], name)
            elif name in {"uv", "pipx", "poetry", "pdm", "hatch", "conda", "mamba"} and "run" in words[1:3]:
                words = _inside(words[words.index("run") + 1 :], "npw", name)
            elif name.startswith("python") and words[1:2] == ["-m"]:
                words = words[2:]
            else:
                return self._program(name, words[1:], command, depth, far)
        return None

    def _program(self, name: str, args: list[str], command: Simple, depth: int, far: bool) -> str | None:
        name = ALIASES.get(name, name)
        if self.rules.typing and name in SHELLS and not command.fed and all(a.startswith("-") for a in args):
            return f"nobody reads what is typed into a waiting `{name}`; give it the commands, with -c"
        if name in DOERS and (why := spoken(" ".join([*args, *command.stdin]))):
            return why
        if name in {"pkill", "killall"} and any("gpuwarden" in a for a in args):
            return f"`{name}` ends the watch over what bills"
        if name in SHELLS | SOURCED or name in {"eval", "su", "script"}:
            texts = [" ".join(args)] if name == "eval" else [*_after_c(args), *command.stdin]
            return next((why for t in texts if (why := self.shell(t, depth + 1, far=far))), None)
        if name == "ssh":
            rest = _inside(_inside(args, "bcDEeFIiJLlmOopQRSWw", name)[1:], "", name)
            return next(
                (w for t in [" ".join(rest), *command.stdin] if (w := self.shell(t, depth + 1, far=True))), None
            )
        if name == "tmux":
            return next((why for t in args if (why := self.shell(t, depth + 1, far=far))), None)
        if name in {"cd", "pushd"}:
            self.cwd = self._path(args[0] if args else "~")
            return None
        if name in ENDS:
            return _ended(name, args)
        if far and name in {"shutdown", "poweroff", "halt"}:
            return f"`{name}` on a rented machine takes it away, and some platforms bill on"
        language = re.sub(r"[\d.]+$", "", name)
        if language in CODE or name in CODE:
            flag = CODE.get(language) or CODE[name]
            code = [b for a, b in pairwise(args) if a == flag]
            return next((why for t in [*code, *command.stdin] if (why := spoken(t))), None)
        if name in {"curl", "wget", "http", "https", "xh", "curlie"}:
            return _called(name, [*args, *command.stdin])
        return self._files(name, args, depth, far)

    # ------------------------------------------------------------------------------------------------------- files

    def _files(self, name: str, args: list[str], depth: int, far: bool) -> str | None:
        plain = [a for a in args if not a.startswith("-")]
        if name in COPIES and plain and (why := self._copy(plain)):
            return why
        if name == "rsync" and plain and any(a.startswith(("--del", "--remove-s")) for a in args):
            return next((why for a in plain if (why := self._removal(a))), None)
        if name in DELETES:
            return next((why for a in plain if (why := self._removal(a) or self._change(a))), None)
        if name == "find":
            runs = [i for i, a in enumerate(args) if a in {"-exec", "-execdir", "-ok"}]
            if "-delete" in args or any(_name(args[i + 1 : i + 2]) in DELETES for i in runs):
                return next((w for a in plain if (w := self._removal(a))), None)
            parts = [args[i + 1 :] for i in runs]
            return next((w for p in parts if (w := self._simple(Simple(p), depth + 1, far))), None)
        if name == "sqlite3" and "-readonly" in args:
            return None
        in_place = name in {"sed", "perl"} and any(re.match(r"-\w*i|--in-place", a) for a in args)
        if name in WRITES or in_place:
            return next((why for a in args if (why := self._change(a.removeprefix("of=")))), None)
        return None

    def _copy(self, plain: list[str]) -> str | None:
        """Why a copy is stopped: by the name that it is given, or that it keeps in the folder it goes into."""
        *sources, last = plain
        return self._change(last) or next((w for s in sources if (w := self._change(f"{last}/{_name([s])}"))), None)

    def _path(self, text: str) -> str:
        """Return an absolute path; a pattern counts as the folder that it searches."""
        text = re.split(r"[*?\[{]", text)[0]
        text = text if text != "~" and not text.startswith("~/") else str(Path.home()) + text[1:]
        return os.path.normpath(os.path.join(self.cwd, text))  # noqa: PTH118 - a link must not be followed

    def _removal(self, text: str) -> str | None:
        path = self._path(text)
        for run in self.rules.runs:
            if _touches(path, run):
                return f"{path} has the run of a job that is not over"
        if self.rules.home and _touches(path, self.rules.home):
            return f"{path} has gpuwarden's ledger and the copies of your checkpoints"
        return None

    def _change(self, text: str) -> str | None:
        path = self._path(text)
        for file in self.rules.files:
            if path == file or path.startswith((file + "-", file + os.sep)):
                return f"{path} is what gpuwarden decides by; a person changes it"
        return f"{path} names this guard; a person changes it" if path in self.rules.settings else None

    def edit(self, path: str, parts: tuple[str, ...] = (), whole: str | None = None) -> str | None:
        """Why an edit of a file is stopped: `parts` are what goes out of it, `whole` is all that will be in it."""
        stays = NAME in whole if whole is not None else bool(parts) and not any(NAME in part for part in parts)
        return None if stays and self._path(path) in self.rules.settings else self._change(path)


def _put_in(commands: list[Simple], inner: list[str]) -> Iterator[str | None]:
    """Return the commands with substitutions that plainly print a text put in, or read as a shell's input."""
    said = [
        re.sub(r"^\s*(?:echo|printf|which|type -p|command -v|cat\s+<<<)\s+", "", text).strip("\"' ") for text in inner
    ]
    for command in commands:
        text = " ".join(command.words)
        if _name(command.words) in SHELLS | SOURCED:
            yield from map(spoken, inner)
        elif said and ("$()" in text or "`" in text) and _name(command.words) not in QUOTES:
            for word in said:
                text = re.sub(r"\$\(\)|`", lambda _, word=word: word, text, count=1)  # type: ignore[misc]
            yield spoken(text)


def _decided(words: list[str]) -> str | None:
    found = next((match[0] for word in words if (match := DECIDES.match(word))), None)
    return f"{found[:-1]} is the user's decision; a person sets it" if found else None


def _touches(path: str, kept: str) -> bool:
    return path == kept or path == os.sep or kept.startswith(path + os.sep) or path.startswith(kept + os.sep)


def _name(words: list[str]) -> str:
    return re.split(r"[\\/]", words[0])[-1].lower().removesuffix(".exe") if words else ""


def _inside(words: list[str], valued: str, name: str) -> list[str]:
    """Return the command that a wrapper runs: what follows its options, their values, a duration or a setting."""
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return words[i + 1 :]
        if word.startswith("-") and len(word) > 1:
            i += 2 if word in VALUED or (len(word) == 2 and word[1] in valued) else 1
        elif re.fullmatch(r"[A-Za-z_]\w*=[\s\S]*", word) or (name in {"timeout", "flock"} and i < len(words) - 1):
            i += 1
            name = "" if "=" not in word else name
        else:
            break
    return words[i:]


def _after_c(args: list[str]) -> list[str]:
    """Return the texts after `-c`, also where it is among other letters (`-lc`)."""
    flags = [i for i, a in enumerate(args) if re.fullmatch(r"-\w*c\w*|--command", a)]
    if not flags or not (rest := args[flags[0] + 1 :]):
        return []
    given = " ".join("'" + word.replace("'", "'\\''") + "'" for word in rest[2:])
    return [re.sub(r'"?\$[@*]"?', lambda _: given, rest[0])]


def _ended(name: str, args: list[str]) -> str | None:
    if {"--help", "-h", "--version"} & set(args) or any(
        a.startswith("--dry-run") and a != "--dry-run=none" for a in args
    ):
        return None
    if name == "kubectl" and "scale" in args and any(re.fullmatch(r"(--replicas=)?0", a) for a in args):
        return "`kubectl scale` to 0 ends running jobs"
    for start in _starts(args):
        positional = [a for a in args[start:] if not a.startswith("-")]
        for sequence in ENDS[name]:
            steps = sequence.split()
            if all(a.lower() in s.split("|") for a, s in zip(positional, steps, strict=False)) and len(
                positional
            ) >= len(steps):
                return f"`{' '.join([name, *positional[: len(steps)]])}` ends or hides what gpuwarden guards"
    return None


def _starts(args: list[str]) -> Iterator[int]:
    """Return where the subcommand may begin: after options, each of which may have taken one value."""
    for i, _ in enumerate([*args, ""]):
        yield i
        if i < len(args) and not args[i].startswith("-") and not (i and args[i - 1].startswith("-")):
            return


def _called(name: str, args: list[str]) -> str | None:
    text = " ".join(args)
    if HOSTS.search(text) and ENDING.search(re.sub(r"-X(?=[A-Z])", "-X ", text)):
        return f"this `{name}` asks a platform to end a machine"
    return None


_SPOKEN = re.compile(
    "|".join(
        rf"\b{re.escape(program)}\b" + "".join(rf"\W{{1,12}}(?:{step})\b" for step in sequence.split())
        for program, sequences in ENDS.items()
        for sequence in sequences
        if program not in {"lambda", "prime", "ray", "oc", "hf", "sky"} or " " in sequence
    )
)


def spoken(text: str) -> str | None:
    """Return why code of another language or incomplete text is stopped: it names what ends a machine."""
    found = _SPOKEN.search(text) or SDK.search(text)
    if found is None and HOSTS.search(text):
        found = ENDING.search(text)
    return f"the code speaks of `{found[0]}`" if found else None


# --------------------------------------------------------------------------------------------------------- the hook


def live_runs(home: str) -> tuple[str, ...]:
    """Return the run folders of jobs that are not over, read from the ledger; none when it can't be read."""
    query = (
        "SELECT e.body FROM events e JOIN current c ON c.subject = e.subject "
        "WHERE e.kind = 'job.submitted' AND c.state NOT IN ('succeeded', 'failed', 'canceled', 'refused')"
    )
    try:
        uri = (Path(home) / "ledger.db").resolve().as_uri() + "?mode=ro"
        with sqlite3.connect(uri, uri=True, timeout=2) as db:
            rows = db.execute(query).fetchall()
        db.close()
        return tuple({os.path.normpath(json.loads(row[0])["handle"]["run_dir"]) for row in rows})
    except (sqlite3.Error, OSError, ValueError, LookupError, TypeError):
        return ()


def judge(event: dict[str, Any], rules: Rules) -> str | None:
    """Return why a hook stops a call."""
    given = event.get("tool_input")
    given = given if isinstance(given, dict) else event
    guard = Guard(rules, str(event.get("cwd") or given.get("workdir") or Path.cwd()))
    command = given.get("command")
    if isinstance(command, list):
        command = " ".join("'" + str(word).replace("'", "'\\''") + "'" for word in command)
    if isinstance(command, str) and event.get("tool_name") == "apply_patch":
        edited = re.findall(r"^\*\*\* (?:Update|Add|Delete) File: (.+)$", command, re.MULTILINE)
    else:
        edited = [p for p in (given.get("file_path"), given.get("notebook_path")) if isinstance(p, str)]
        if isinstance(command, str) and (why := guard.shell(command)):
            return why
    whole = given.get("content")
    parts = [given, *(e for e in given.get("edits") or () if isinstance(e, dict))]
    out = tuple(p["old_string"] for p in parts if isinstance(p.get("old_string"), str))
    whole = whole if isinstance(whole, str) else None
    return next((why for path in edited if (why := guard.edit(path.strip(), out, whole))), None)


def main(argv: list[str]) -> int:
    """Answer one hook call in the client's form. What can't be understood passes: no other hook may suffer."""
    client, config = argv[1], json.loads(Path(argv[2]).read_text("utf-8"))
    event = json.load(sys.stdin)
    home, files = config["home"], tuple(config["files"])
    rules = Rules(home, files, live_runs(home), tuple(config.get("settings", ())), typing=client == "codex")
    why = judge(event, rules) if isinstance(event, dict) else None
    said = f"gpuwarden: {why}. {HINT}" if why else ""
    if client == "cursor":
        print(json.dumps({"permission": "deny", "user_message": said, "agent_message": said} if why else {}))
        return 0
    if why:
        print(said, file=sys.stderr)
    return 2 if why else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
