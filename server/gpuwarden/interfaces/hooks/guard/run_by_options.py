"""Find the commands that a program runs because of its options, settings or variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise, takewhile
from typing import Final

from gpuwarden.interfaces.hooks.guard.programs import HTTP
from gpuwarden.interfaces.hooks.guard.settings import SENTENCES
from gpuwarden.interfaces.hooks.guard.wrappers import (
    CODE,
    DOERS,
    FLEETS,
    LATER,
    RUNNERS,
    SHELLS,
    TEXT_RUNNERS,
    WINDOWS,
    language,
)

MESSAGES: Final = frozenset({"bd", "glab", "gt", "hg", "jira", "jj", "linear", "llm", "logger", "mail", "notify-send",
                             "ntfy", "say", "svn", "terminal-notifier", "wall"})  # fmt: skip
"""Programs whose arguments are often sentences."""
PASSIVE: Final = MESSAGES | SENTENCES | {
    ":", "[[", "ack", "aider", "alias", "apropos", "basename", "bat", "cd", "chmod", "chown", "claude", "cmp", "code",
    "comm", "cp", "cursor", "cursor-agent", "cut", "declare", "df", "diff", "dirname", "dpkg", "du", "export",
    "false", "fd", "fdfind", "file", "find", "gawk", "gemini", "hash", "help", "hyperfine", "info", "journalctl",
    "kill", "killall", "less", "let", "ln", "local", "ls", "man", "mawk", "mkdir", "more", "mv", "open", "opencode",
    "pgrep", "pkill", "ps", "pushd", "read", "readlink", "readonly", "realpath", "rm", "rmdir", "rsync", "scp", "set",
    "shellcheck", "sort", "stat", "tar", "tee", "tldr", "touch", "trap", "tree", "true", "type", "typeset", "uniq",
    "unset", "wc", "whatis", "whereis", "which", "xdg-open", "yq", "zcat", "zgrep", "zip",
}  # fmt: skip
"""Programs that run none of their arguments, apart from those that `run_by_options` yields."""
_CHECKED: Final = SHELLS | TEXT_RUNNERS | RUNNERS | FLEETS | DOERS | LATER | WINDOWS | HTTP | {
    "autossh", "mosh", "plink", "sftp", "ssh", "sshfs",
}  # fmt: skip
"""Programs whose arguments `Judge` checks in other ways."""
RUN_FROM_NAME: Final = re.compile(r"\w*(?:COMMAND|CMD|PAGER|EDITOR|OPEN|5DB|ASKPASS|BROWSER|_RSH|_SSH|_DIFF)")
"""Names of variables whose value a program runs."""
_OPTIONS: Final = {
    name: re.compile(pattern, re.DOTALL)
    for names, pattern in (
        ("tar bsdtar", r"(?:--checkpoint-action=exec|-[IF]|--use-compress-program|--\w+-(?:command|script))=(.+)"),
        ("rsync", r"(?:-e|--rsh)=(.+)"),
        ("ssh scp sftp sshfs autossh", r"(?:-S|-o=(?i:(?:proxy|local|knownhosts|ssh_)command))[=\s];?\s*(.+)"),
        ("hg", r"--config=alias\.\w+=!(.+)"),
        ("split", r"--filter=(.+)"),
        ("sort", r"--compress-program=(.+)"),
        ("man", r"-[HP]=(.+)"),
        ("fd fdfind rg", r"--pre=(.+)"),
        ("ag", r"--pager=(.+)"),
        ("zip", r"-TT=(.+)"),
        ("pip pip3", r"--editor=(.+)"),
        ("mail mailx", r"(?:-[EX]|--exec)=(?:!|sh(?:ell)?\s)\s*(.+)"),
    )
    for name in names.split()
}  # fmt: skip
"""For each program, its options whose value is a command, as `OPTION=COMMAND`."""
_GIT: Final = re.compile(
    r"(?:alias\.[^=\s]+=!|(?:\w+\.(?:[^=\s]+\.)?\w*(?i:command|editor|pager|helper|cmd|external|filter|driver|textconv"
    r"|clean|smudge|process|fsmonitor|askpass|proxy)|pager\.\w+)=!?"
    r"|(?:-x|-O|--exec|--extcmd|--upload-pack|--receive-pack|--[a-z]+-filter)=|-[xO](?=\S+\s))([\s\S]+)"
)
"""A setting or an option of git that contains shell text."""
_SED: Final = re.compile(r"(?:^|[\d$/;{}!,I])[ \t]{0,9}e[ \t]{1,9}([^\n]+)", re.MULTILINE)
_SED_REPLACES: Final = tuple(
    re.compile(rf"s{d}(?:[^{d}\\\n]|\\.){{0,500}}{d}((?:[^{d}\\\n]|\\.){{0,500}}){d}\w{{0,9}}e")
    for d in map(re.escape, "/|#,:")
)
"""sed commands that run a shell command, and substitutions that run their result."""


def may_run(name: str) -> bool:
    """Return whether a program may run its arguments. Return False if `Judge` checks them in other ways."""
    return name not in PASSIVE and name not in _CHECKED and language(name) not in CODE


def run_by_options(name: str, args: Sequence[str]) -> Iterator[str]:
    """Yield the commands in a program's options and scripts."""
    if name == "sed":
        for word in args:
            yield from (found[1] for found in _SED.finditer(word))
            yield from (found[1] for pattern in _SED_REPLACES for found in pattern.finditer(word))
    if options := _OPTIONS.get(name):
        for option, value in pairwise([*args, ""]):
            for text in (option, f"{option}={value}", f"{option[:2]}={option[2:]}"):
                if found := options.fullmatch(text):
                    yield found[1]


def run_by_git(args: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands that git runs because of its arguments, or because of settings in environment variables."""
    for command, after in (("bisect", "run"), ("submodule", "foreach")):
        if command in args and after in args:
            rest = args[args.index(after) + 1 :]
            rest = rest[len(list(takewhile(lambda word: word.startswith("-"), rest))) :]
            yield rest[0] if len(rest) == 1 else shlex.join(rest)
    settings = [part.replace("'", "") for part in variables.get("GIT_CONFIG_PARAMETERS", "").split("' '")]
    keys = takewhile(variables.__contains__, (f"GIT_CONFIG_KEY_{i}" for i in count()))
    settings += [f"{variables[key]}={variables.get(key.replace('KEY', 'VALUE'), '')}" for key in keys]
    for before, word in pairwise(["", *args]):
        if word.startswith("--config-env=") or before == "--config-env":
            setting, _, variable = word.removeprefix("--config-env=").partition("=")
            settings.append(f"{setting}={variables.get(variable, '')}")
        whole = before == "-c" or word.startswith("-")
        settings.append(word if whole else f"{before}={word}")
    for setting in settings:
        if found := _GIT.fullmatch(setting):
            yield found[1]
