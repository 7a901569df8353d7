"""Find the commands that a program runs: after a wrapper, on another machine, or from its arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise

from gpuwarden.interfaces.hooks.guard.patterns import SCRIPTS, Patterns
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, name_of, printed, roots
from gpuwarden.interfaces.hooks.guard.programs import HTTP
from gpuwarden.interfaces.hooks.guard.shell import Command, Feed
from gpuwarden.interfaces.hooks.guard.wrappers import (
    ASSIGNMENT,
    CODE,
    ENDING,
    FLEETS,
    FOUND_RUNS,
    KEYWORDS,
    SHELLS,
    SSH_VALUED,
    WRAPPERS,
    candidates,
    for_fleets,
    inside,
    language,
    script_of,
    split_string,
)


def unwrapped(words: list[str], assigned: dict[str, str], patterns: Patterns) -> list[str] | None:
    """Return the words after a wrapper, such as `sudo`, and its options; None if there is no wrapper.

    The variables that the wrapper sets are added to `assigned`.
    """
    name = name_of(words[0])
    if ASSIGNMENT.fullmatch(words[0]):
        variable, _, value = words[0].partition("=")
        assigned[variable] = value
        return words[1:]
    if words[0] in KEYWORDS:
        return words[1:]
    if name in WRAPPERS:
        rest = inside(words[1:], WRAPPERS[name], name)
        options = words[1 : len(words) - len(rest)]
        assigned.update(word.partition("=")[::2] for word in options if ASSIGNMENT.fullmatch(word))
        split = split_string(options) if name == "env" else []
        return ["env", *split, *rest] if split else rest
    if not name.startswith(("python", "pypy")):
        return None
    if "-m" in words[1:6]:
        at = words.index("-m")
        module = words[at + 1] if at + 1 < len(words) else ""
        whole = patterns.knows(module.lower()) or module == "json.tool"
        return [module if whole else module.partition(".")[0], *words[at + 2 :]]
    script = script_of(words[1:])
    return words[words.index(script) :] if patterns.knows(name_of(script)) else None


def run_elsewhere(name: str, args: list[str], command: Command, patterns: Patterns) -> Iterator[tuple[str, Feed]]:
    """Yield the shell texts that a program runs on another machine, each with its standard input."""
    rest: list[str] | None = None
    if name in FLEETS and (name != "aws" or "ssm" in args):
        yield from ((text, Feed()) for text in for_fleets(args) if text)
    elif name in {"ssh", "autossh", "mosh", "plink"}:
        rest = inside(inside(args, SSH_VALUED, name)[1:], SSH_VALUED, name)
    elif name in {"sftp", "lftp"}:
        yield from (("\n".join(text.splitlines()[:200]), Feed()) for text in command.stdin)
    elif rest := patterns.remote_part(patterns.program(name), args):
        yield shlex.join(rest), Feed()
    if rest:
        yield " ".join(rest), Feed(tuple(command.stdin), (), command.fed)
    elif rest is not None:
        yield from ((text, Feed()) for text in command.stdin if text)


def run_by_find(name: str, args: list[str], folder: str) -> list[list[str]]:
    """Return the commands that `find` or `fd` runs for the files that it finds from `folder`.

    The `rm` of `find` is omitted, because `Files` checks it.
    """
    found = printed([name, *args], (), folder)
    names = [b for a, b in pairwise(args) if a in {"-name", "-iname"}] or ["**"]
    if name == "find" and not any(UNKNOWN in root for root in roots(args)):
        found = "\n".join(f"{root.rstrip('/')}/**/{each}" for root in roots(args) for each in names)
    runs = [i for i, a in enumerate(args) if a in FOUND_RUNS][:20]
    parts = [[word.replace("{}", found) for word in args[i + 1 :]] for i in runs]
    parts = [p if name == "find" or found in p else [*p, found] for p in parts]
    return [p for p in parts if name != "find" or name_of("".join(p[:1])) != "rm"]


def run_by_runner(args: list[str], patterns: Patterns, *, far: bool) -> list[list[str]]:
    """Return the commands that a program with subcommands, such as `docker`, may run."""
    known = {*SHELLS, *WRAPPERS, *HTTP, "ssh", *(ENDING if far else ())}

    def is_checked(word: str) -> bool:
        program = name_of(word)
        return patterns.knows(program) or program in known or language(program) in CODE or program.endswith(SCRIPTS)

    return list(candidates(args, is_checked))


def run_by_unknown(args: list[str], patterns: Patterns, *, may_run: bool) -> list[list[str]]:
    """Return the commands in the arguments of a program that may answer gpuwarden's prompt.

    If `may_run` is true, include commands of the platforms' programs.
    """
    names = {"gpuwarden", *patterns.ends, *patterns.remote} if may_run else {"gpuwarden"}
    parts = candidates(args, lambda word: patterns.program(name_of(word)) in names)
    return [part for part in parts if len(part) > 1 or name_of(part[0]) == "gpuwarden"]
