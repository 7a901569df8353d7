"""Programs that run another program, and the position of that program in their arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN

MOST_ITEMS: Final = 200
SHELLS: Final = frozenset(
    {"sh", "bash", "zsh", "dash", "ksh", "mksh", "fish", "ash", "rbash", "csh", "tcsh", "yash", "posh", "elvish"}
)
SOURCED: Final = frozenset({"source", "."})
TEXT_RUNNERS: Final = frozenset({"eval", "su", "script", "runuser", "machinectl"})
"""Other programs that run shell text from their arguments."""
CODE: Final = {"python": "-c", "pypy": "-c", "node": "-e", "bun": "-e", "perl": "-e", "ruby": "-e", "php": "-r",
               "deno": "eval", "ipython": "-c", "tsx": "-e", "rscript": "-e", "julia": "-e"}  # fmt: skip
"""For each interpreter, the option that is followed by code."""
KEYWORDS: Final = frozenset({"!", "{", "}", "if", "then", "else", "elif", "fi", "while", "until", "do", "done", "time",
                             "coproc", "noglob", "nocorrect"})  # fmt: skip
WRAPPERS: Final[dict[str, str]] = {
    "sudo": "ugpCDhrtTR", "doas": "uC", "env": "uCSa", "command": "", "builtin": "", "exec": "a", "nohup": "",
    "nice": "n", "ionice": "cnp", "chrt": "TPD", "taskset": "", "timeout": "ks", "gtimeout": "ks", "stdbuf": "ioe",
    "setsid": "", "xargs": "InPLdEsa", "watch": "n", "uvx": "cp", "npx": "p", "bunx": "", "chroot": "",
    "caffeinate": "t", "unbuffer": "", "parallel": "jNSna", "busybox": "", "flock": "wE", "strace": "eopEs",
    "ltrace": "eo", "sshpass": "pf", "systemd-run": "pEuMH", "systemd-inhibit": "", "proxychains4": "f", "torify": "",
    "firejail": "", "unshare": "", "dbus-run-session": "", "tsp": "L", "time": "fo", "gtime": "fo",
    "rlwrap": "bCDfgHlMOPqsSt", "faketime": "", "reptyr": "", "dtach": "Ac", "empty": "f", "wsl": "du",
    "numactl": "NCmip", "prlimit": "po", "nsenter": "tSG", "setarch": "", "x86_64": "", "i386": "", "i686": "",
    "linux32": "", "linux64": "", "aarch64": "", "pkexec": "", "run0": "ugDM", "perf": "eorCptIDGFMcmxN",
    "eatmydata": "", "fakeroot": "lisb", "chronic": "", "ifne": "", "entr": "", "sg": "", "newgrp": "",
    "cpulimit": "lpeP", "valgrind": "", "catchsegv": "", "choom": "np", "retry": "td", "setpriv": "", "cgexec": "g",
    "gosu": "", "su-exec": "", "envdir": "", "tini": "peg", "dumb-init": "", "xvfb-run": "efnpsw", "torsocks": "",
    "proxychains": "f", "nsys": "oteswx", "compute-sanitizer": "",
}  # fmt: skip
"""For each wrapper, the one-letter options that are followed by a value."""
RUNNERS: Final = frozenset({"uv", "pipx", "poetry", "pdm", "hatch", "rye", "pixi", "conda", "mamba", "micromamba",
                            "docker", "podman", "nerdctl", "docker-compose", "op", "doppler", "infisical", "chamber",
                            "mise", "direnv", "aws-vault", "dotenv", "pnpm", "yarn", "npm", "bun", "nix", "nix-shell",
                            "apptainer", "singularity", "srun", "mpirun", "torchrun", "accelerate", "ssh-agent",
                            "socat", "screen", "tox", "nox", "make", "just", "minikube",
                            "microk8s", "k3s", "tmux", "xterm", "urxvt", "gnome-terminal", "konsole", "kitty",
                            "alacritty", "foot", "wezterm", "ghostty", "tilix", "terminator", "xfce4-terminal",
                            "zellij", "ttyd", "gotty", "winpty", "wt", "abduco", "asciinema", "script",
                            "faketty"})  # fmt: skip
"""Programs with subcommands and options that run another program, named anywhere in their arguments."""
DOERS: Final = frozenset({"awk", "gawk", "mawk", "make", "gmake", "expect", "osascript", "lua", "tclsh", "socat", "m4",
                          "screen", "parallel", "sqlite3", "psql", "mysql", "gdb", "vim", "vi", "nvim", "ex", "ed",
                          "emacs", "dc", "gnuplot", "r", "octave", "irb", "guile", "tmux", "kitty", "wezterm", "zellij",
                          "asciinema", "xdotool", "ydotool", "wtype", "dotool"})  # fmt: skip
"""Programs that run text in a language other than shell, or that type text into a terminal."""
LATER: Final = frozenset({"at", "batch", "crontab"})
"""Programs that read shell commands from standard input and run them later."""
VALUED: Final = frozenset({"--user", "--group", "--from", "--with", "--python", "--unset", "--chdir", "--signal",
                           "--kill-after", "--adjustment", "--max-args", "--max-procs", "--arg-file", "--delimiter",
                           "--package", "--project", "--property", "--unit", "--max-lines", "--replace", "--interval",
                           "--with-requirements", "--index-url", "--directory", "--env-file", "--spec",
                           "--membind", "--interleave", "--cpunodebind", "--physcpubind", "--preferred", "--machine",
                           "--setenv", "--slice", "--description", "--joblog", "--results", "--tmpdir", "--workdir",
                           "--event", "--output", "--argv0"})  # fmt: skip
RUN_FROM: Final = {"BASH_ENV": ". {}", "ENV": ". {}", "PS1": ': "{}"', "PS4": ': "{}"', "PROMPT_COMMAND": "{}",
                   "GIT_SSH_COMMAND": "{}", "GIT_EDITOR": "{}", "EDITOR": "{}", "PAGER": "{}"}  # fmt: skip
"""Variables whose value a program runs, and the shell text that has the same effect."""
RUN_APART: Final = frozenset({"GIT_SSH_COMMAND", "GIT_EDITOR", "EDITOR", "PAGER"})
"""Variables in RUN_FROM whose value runs in a separate process, which can't change the shell's state."""
FOUND_RUNS: Final = frozenset({"-exec", "-execdir", "-ok", "-okdir", "-x", "-X", "--exec", "--exec-batch"})
"""Options of `find` and `fd` that are followed by a program."""
BETWEEN: Final = "\x1f"
"""Separator between a function's arguments."""
FLEETS: Final = frozenset({"pdsh", "clush", "dsh", "pssh", "parallel-ssh", "ansible", "salt", "salt-ssh", "fab", "aws"})
"""Programs that run a command on other machines; the command can be at any position in their arguments."""
ENDING: Final = frozenset({"rm", "rmdir", "shred", "unlink", "truncate", "find", "rsync", "shutdown", "poweroff",
                           "halt", "systemctl", "sudo"})  # fmt: skip
REMOVERS: Final = frozenset({"rm", "rm -rf", "rm -r", "rm -fr", "rm -f", "rmdir", "unlink", "shred"})
"""Removal commands without a path, as in code that appends the path at run time."""
WINDOWS: Final = frozenset({"powershell", "pwsh", "cmd"})
SSH_VALUED: Final = "bcDEeFIiJLlmOopQRSWw"
LEADING: Final = frozenset({"timeout", "gtimeout", "flock", "chroot", "taskset", "chrt", "faketime", "dtach", "sg",
                            "newgrp", "perf", "gosu", "su-exec", "envdir", "nsys"})  # fmt: skip
"""Wrappers with one argument, such as a duration or a subcommand, before the command."""
_NUMBER: Final = re.compile(r"\+?\d[\d,:%-]*(?:\.\d+)?[smhdKMG]?")
"""The value of a long option, such as 2 in `--jobs 2`. No program's name matches this pattern."""
ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=[\s\S]*")


def inside(words: Sequence[str], valued: str, name: str) -> list[str]:
    """Return the words that follow a wrapper's options, the options' values, and a leading duration or setting."""
    i, leading = 0, name in LEADING
    while i < len(words):
        word = words[i]
        if word == "--":
            return list(words[i + 1 :])
        if word.startswith("-"):
            number = not leading and word[1:2] == "-" and _NUMBER.fullmatch("".join(words[i + 1 : i + 2]))
            i += 2 if number or word in VALUED or (len(word) == 2 and word[1] in valued) else 1
        elif ASSIGNMENT.fullmatch(word):
            i += 1
        elif leading and i < len(words) - 1:
            i, leading = i + 1, False
        else:
            break
    return list(words[i:])


def split_string(options: Sequence[str]) -> list[str]:
    """Return the words into which `env -S` splits its value; empty without that option."""
    for option, value in pairwise([*options, ""]):
        if found := re.fullmatch(r"(?:-[iv0]*S|--s[a-z-]*(?:=|$))([\s\S]*)", option):
            text = (found[1] or value).replace("\\_", " ")
            try:
                return shlex.split(text)
            except ValueError:  # unclosed quotes
                return text.split()
    return []


def positional(args: Sequence[str]) -> Sequence[str] | None:
    """Return the positional parameters that `set` sets; None if it sets only options."""
    for i, word in enumerate(args):
        if word == "--":
            return args[i + 1 :]
        if word[:1] not in {"-", "+"} and not (i and re.fullmatch(r"[-+]\w*o", args[i - 1])):
            return args[i:]
    return None


def after_c(args: Sequence[str]) -> list[str]:
    """Return the text after a shell's `-c` or `-lc`, with `$@` replaced by the words that follow."""
    flag = next((i for i, a in enumerate(args) if re.fullmatch(r"-\w*c\w*|--command", a)), None)
    if flag is None or not (rest := args[flag + 1 :]):
        glued = (re.fullmatch(r"(?:--command=|-[a-z]*?c(?=[\s\S]*\s))([\s\S]+)", a) for a in args)
        return [found[1] for found in glued if found]
    given = " ".join("'" + word.replace("'", "'\\''") + "'" for word in rest[2:])
    text = re.sub(r'"?\$[@*]"?', lambda _: given, rest[0])
    return [re.sub(r"\$(\d)", lambda m: dict(enumerate(rest[1:])).get(int(m[1]), m[0]), text)]


def for_each(name: str, words: Sequence[str], stdin: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands that `xargs` or `parallel` runs for the items in its input or after `:::`."""
    rest = inside(words[1:], WRAPPERS[name], name)
    flags = list(words[1 : len(words) - len(rest)])
    command = rest[: rest.index(":::")] if ":::" in rest else rest
    marks = [b for a, b in pairwise([*flags, ""]) if a in {"-I", "-J"}]
    marks += [found[1] for f in flags if (found := re.fullmatch(r"(?:-I|--replace=)(.+)", f))]
    marks += ["{}"] if name == "parallel" or {"-i", "--replace"} & set(flags) else []
    lines = rest[len(command) + 1 :] if ":::" in rest else "\n".join(stdin).splitlines()
    elsewhere = any(re.fullmatch(r"-a.*|--arg-file.*", f) for f in flags)
    items = [line for line in lines if line.strip()][:MOST_ITEMS] if not elsewhere else []
    quoted = name == "parallel" and " " in "".join(command[:1])  # shell text
    items = [shlex.quote(item) if quoted else item for item in items] or [f"{UNKNOWN}$items"]
    mark = next((m for m in marks if m and any(m in word for word in command)), "")
    if mark:
        yield from ([word.replace(mark, item) for word in command] for item in items)
    elif command or name == "xargs":
        yield [*command, *(word for item in items for word in item.split())]
    else:
        yield from (item.split() for item in items)


def for_fleets(args: Sequence[str]) -> Iterator[str]:
    """Yield possible commands for other machines: a word with spaces, or all words from a program's name onwards."""
    for i, word in enumerate(args[:80]):
        text = re.sub(r"^-{0,2}[\w-]{1,40}=\[?", "", word).strip("[]\"'")
        if " " in text:
            yield text
        elif text in ENDING:
            yield " ".join(args[i:])


def after_command(args: Sequence[str]) -> list[str]:
    """Return the command text that PowerShell or cmd runs."""
    flag = next((i for i, a in enumerate(args) if re.fullmatch(r"(?i)-c(?:o\w*)?|/[ck]", a)), None)
    return [] if flag is None else [" ".join(args[flag + 1 :])]


def candidates(args: Sequence[str], known: Callable[[str], bool]) -> Iterator[list[str]]:
    """Yield the first five suffixes of `args` that begin with a known program."""
    found = 0
    for i, word in enumerate(args[:80]):
        if known(word):
            yield list(args[i:])
            found += 1
        if found == 5:
            return


def language(name: str) -> str:
    """Return an interpreter's name without its version."""
    return re.sub(r"[\d.]+$", "", name)


def script_of(args: Sequence[str]) -> str:
    """Return the file that an interpreter or a shell runs; empty if none is given."""
    return next((a for a in args if not a.startswith("-")), "")


def other_docker(args: list[str]) -> bool:
    """Return whether options direct Docker to another machine."""
    for option, value in pairwise([*args, ""]):
        name, _, given = option.partition("=")
        if name in {"-H", "--host", "-c", "--context"}:
            return (given or value) not in {"default", "desktop-linux"} and not (given or value).startswith("unix:")
        if not option.startswith("-"):
            return False
    return False
