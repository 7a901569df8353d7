"""The guard's patterns, compiled from the providers' declarations and those in `clouds.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

MOST_ARGUMENTS = 300
"""Maximum number of words that are searched after a program's name. Real commands have fewer words."""
SCRIPTS = (".py", ".sh", ".js", ".ts", ".rb")
HELP = frozenset({"--help", "-h", "-help", "--version"})
HELP_LAST = frozenset({"aws", "tccli"})
"""Programs that show help if `help` is the word after the command."""
_TRIAL = re.compile(r"--(?:no-)?dry-?run(?:=.*)?")
# Names that are also common words or keywords. In code, they are matched only at the start of a command.
AMBIGUOUS = frozenset(
    {"lambda", "prime", "ray", "sky", "modal", "copilot", "serverless", "mc", "hf", "oc", "az", "sam"}
)

_BEGINS = (
    r"(?:^(?:-\w)?|[\"'`(;&|{!=\n]\s{0,4}|\b(?:then|do|else|exec|sudo|env|\w{0,20}[cC]ommand)\s{1,4})"
    r"(?:[\w.~/-]{0,80}/)?"
)
"""Text before a program's name if the name is at the start of a command."""

VERBS = frozenset({"destroy", "terminate", "delete", "stop", "down", "kill", "remove", "teardown", "release", "cancel"})
_WORD = re.compile(r"[a-z0-9][a-z0-9._-]+")

Steps = tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Spelling:
    """A declared command: its words in order, its required options, and its excluded options."""

    text: str
    words: Steps
    options: Steps
    without: Steps = ()

    @classmethod
    def parse(cls, text: str) -> Spelling:
        """Parse a declaration in the syntax of `core.shell_guard`."""
        steps = [frozenset(step.split("|")) for step in text.split()]
        words = tuple(s for s in steps if not any(w.startswith(("-", "!-")) for w in s))
        without = tuple(frozenset(w.removeprefix("!") for w in s) for s in steps if any(w[0] == "!" for w in s))
        return cls(text, words, tuple(s for s in steps if any(w[0] == "-" for w in s)), without)

    def end(self, args: Sequence[str]) -> int | None:
        """Return the index in `args` after the last declared word; None if `args` does not match."""
        at = {0}
        for step in self.words:
            at = {i + 1 for start in at for i in _starts(args, start) if "*" in step or args[i].lower() in step}
        if not at or not all(any(_given(args, option) for option in step) for step in self.options):
            return None
        return None if any(_given(args, option) for step in self.without for option in step) else min(at)


def _starts(args: Sequence[str], start: int) -> Iterator[int]:
    """Yield possible indices of the next word. Options, each with at most one value, may precede that word."""
    for i in range(start, len(args)):
        yield i
        if not args[i].startswith("-") and not (i > start and args[i - 1].startswith("-") and "=" not in args[i - 1]):
            return


def _given(args: Sequence[str], option: str) -> bool:
    """Return whether an option is given. A declared `--replicas=0` also matches `--replicas 0`, and `-r` also matches
    `-rf`.
    """
    name, equals, value = option.partition("=")
    if equals:
        return any(a == option or (a == name and args[i + 1 : i + 2] == [value]) for i, a in enumerate(args))
    short = len(option) == 2 and option[1] != "-"
    return any(
        a == option or a.startswith(option + "=") or (short and re.fullmatch(r"-\w*" + option[1] + r"\w*", a))
        for a in args
    )


@dataclass(frozen=True)
class Patterns:
    """Patterns of commands, requests and code that stop or delete a machine, as declared by the providers."""

    ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    remote: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    key_variables: tuple[str, ...] = ()
    far: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Commands that stop or delete a resource only if they run on another machine."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Patterns:
        """Read the output of `declared.table`. Raises KeyError or TypeError for an unknown format."""

        def sequences(name: str) -> dict[str, tuple[str, ...]]:
            return {program: tuple(texts) for program, texts in table[name].items()}

        texts = {n: tuple(map(str, table[n])) for n in ("hosts", "requests", "code", "servers", "key_variables")}
        texts["paths"] = tuple(map(str, table.get("paths", ())))  # older versions did not write it
        return cls(sequences("ends"), dict(table["aliases"]), sequences("remote"), far=sequences("far"), **texts)

    def program(self, name: str) -> str:
        """Return the name under which a program is declared."""
        return self.aliases.get(name, name)

    def knows(self, name: str) -> bool:
        """Return whether the declarations mention a program."""
        name = self.program(name)
        return name in self.ends or name in self.remote or name in self.far

    def ended(self, name: str, args: Sequence[str], *, far: bool) -> str | None:
        """Return the part of a command that stops or deletes a resource, or None."""
        args = args[:MOST_ARGUMENTS]
        flags = args[: args.index("--")] if "--" in args else args
        asks_help = HELP & set(flags) - ({"-h"} if name in self.far else set())
        trials = [a for a in flags if _TRIAL.fullmatch(a)]
        tries = bool(trials) and not re.search(r"--no-|=(?:none|false|f|0)$", trials[-1].lower())
        if (asks_help and "--help=false" not in flags) or args[:1] == ["help"] or tries:
            return None
        declared = (*self.ends.get(name, ()), *(self.far.get(name, ()) if far else ()))
        for sequence in map(Spelling.parse, declared):
            end = sequence.end(args)
            if end is not None and not (name in HELP_LAST and args[end:] == ["help"]):
                parts = (next((a for a in args[:end] if a.lower() in step), "...") for step in sequence.words)
                return " ".join([name, *parts])
        return None

    def helped(self, words: Sequence[str]) -> str | None:
        """Return the part of a command that tells a platform's script to stop or delete a resource, such as
        `vast_job.py destroy`.
        """
        at = next((i for i, word in enumerate(words[:20]) if word.endswith(SCRIPTS)), None)
        if (
            at is None
            or not set(re.split(r"[\W_]+", words[at].rpartition("/")[2].lower())) & {*self.servers} - AMBIGUOUS
        ):
            return None
        verbs = [word for word in words[at + 1 : at + 20] if not word.startswith("-")][:2]
        return next((f"{words[at]} {verb}" for verb in verbs if verb.lower() in VERBS), None)

    def remote_part(self, name: str, args: Sequence[str]) -> list[str] | None:
        """Return the command that a program runs on the rented machine; None if it runs nothing there."""
        ends = (Spelling.parse(text).end(args[:MOST_ARGUMENTS]) for text in self.remote.get(name, ()))
        end = next((e for e in ends if e is not None), None)
        if end is None:
            return None
        rest = list(args[end:])
        if "--" in rest:
            return rest[rest.index("--") + 1 :]
        for i, word in enumerate(rest):
            option, equals, value = word.partition("=")
            if option in {"--command", "--ssh-command", "--scripts", "--cmd", "-c", "-C"}:
                return [value] if equals else rest[i + 1 : i + 2]
        return [word for word in rest if not word.startswith("--")]

    @cached_property
    def host(self) -> re.Pattern[str]:
        """Match a URL of a platform's API, but not of its documentation."""
        names = "|".join(re.escape(host) for host in self.hosts) or "(?!)"
        named = rf"(?<![\w.-])(?!(?:docs|www|blog|status)\.)(?:[\w-]+\.){{0,4}}(?:{names})(?![\w.-]*\w@)"
        return re.compile("(?i)" + "|".join((named, *self.paths)))

    @cached_property
    def request(self) -> re.Pattern[str]:
        """Match the parts of a request's URL or body that ask to stop or delete a resource."""
        return re.compile("(?i)" + "|".join((r"\bDELETE\b", r"\bterminate\b", r"\bdestroy\b", *self.requests)))

    @cached_property
    def key(self) -> re.Pattern[str]:
        """Match the use of a variable that contains an account's key."""
        return re.compile(r"\$\{?(?:" + ("|".join(map(re.escape, self.key_variables)) or "(?!)") + r")\b")

    @cached_property
    def library(self) -> re.Pattern[str]:
        """Match calls to a platform's library that stop or delete a resource."""
        return re.compile("|".join(self.code) or "(?!)")

    def command_in_code(self, text: str, *, begins: bool = False) -> str | None:
        """Return the first command in non-shell text that stops or deletes a resource.

        With `begins`, the command must be at the start of the text, or follow a quote, a bracket or an operator.
        """
        words = {word.rstrip(".") for word in _WORD.findall(re.sub(r"^-\w", "", text.lower()))}
        for word in sorted(words & (self.ends.keys() | self.aliases.keys())):
            before = r"(?:^|[\"'`(;&|]\s{0,4})" if word in AMBIGUOUS else r"(?<![\w.-])"
            before = _BEGINS if begins else before
            patterns = []
            for sequence in map(Spelling.parse, self.ends.get(self.program(word), ())):
                steps = (
                    r"\W{1,12}(?:" + (r"[\w./-]{1,80}" if "*" in s else "|".join(map(re.escape, sorted(s)))) + r")\b"
                    for s in sequence.words
                )
                options = (rf"[^\n]{{1,200}}{re.escape(min(s))}" for s in sequence.options)
                after = "".join((*steps, *options)) or r"[\"',\s]{1,6}[-\w$]"
                patterns.append(f"{before}{re.escape(word)}\\b{after}")
            if patterns and (found := re.search("|".join(patterns), text)):
                return found[0]
        return None
