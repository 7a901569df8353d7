"""Check shell text: every simple command in it, and every command that these commands run in turn."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.desired import desired
from gpuwarden.interfaces.hooks.guard.drafts import Drafts
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.limits import Budget, TooMuch
from gpuwarden.interfaces.hooks.guard.patterns import SCRIPTS, Patterns
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, name_of, output_of_code, printed, roots
from gpuwarden.interfaces.hooks.guard.programs import (
    HTTP,
    RUNS_IN_CODE,
    called,
    commands_in_code,
    removed_by_code,
    spoken,
)
from gpuwarden.interfaces.hooks.guard.run_by_options import RUN_FROM_NAME, may_run, run_by_git, run_by_options
from gpuwarden.interfaces.hooks.guard.shell import Command, Feed, Reader
from gpuwarden.interfaces.hooks.guard.wrappers import (
    ASSIGNMENT,
    BETWEEN,
    CODE,
    DOERS,
    ENDING,
    FLEETS,
    FOUND_RUNS,
    KEYWORDS,
    LATER,
    REMOVERS,
    RUN_APART,
    RUN_FROM,
    RUNNERS,
    SHELLS,
    SOURCED,
    SSH_VALUED,
    TEXT_RUNNERS,
    WINDOWS,
    WRAPPERS,
    after_c,
    after_command,
    candidates,
    for_each,
    for_fleets,
    inside,
    language,
    other_docker,
    positional,
    script_of,
    split_string,
)

DEEPEST = 12
MOST_WRAPPERS = 15


@dataclass
class Judge:
    """Check the commands that one call would run, and track the variables, aliases, drafts and folder that they set."""

    patterns: Patterns
    files: Files
    typing: bool = False
    """Whether the client can type into a running program without calling a hook first."""
    values: dict[str, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    aliases: dict[str, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.files, self.budget)

    def shell(self, text: str, depth: int = 0, *, far: bool = False, feed: Feed | None = None) -> str | None:
        """Return the reason to block shell text, or None to allow it. `far`: the text runs on another machine.

        Raises TooMuch if the text is too long or too complex to check.
        """
        if depth > DEEPEST:
            raise TooMuch("the command is nested too deeply to check")
        self.drafts.texts.append(text)
        reader = Reader(text, self.values, self.budget, feed)
        for command in reader.commands():
            self.files.cwd = self.values.get("PWD", self.files.cwd)
            if why := self.command(command, depth, far=far):
                return why
        if reader.broken and ">" in text:
            self.files.blind = self.files.blind or "a file"
        return (self.spoken(text) if reader.broken else None) or self._run_from({}, depth, far)

    def command(self, command: Command, depth: int, *, far: bool) -> str | None:
        """Return the reason to block a simple command."""
        self.budget.spend(2 + len(command.words) + sum(map(len, command.stdin)) // 64)
        if why := self._outputs(command, far):
            return why
        if why := settings.decided(command.name, command.words[1:], command.assigned):
            return why
        assigned = dict(command.assigned)
        words = command.words
        for _ in range(MOST_WRAPPERS):
            if not words:
                return None
            name = name_of(words[0])
            if words is not command.words and (why := settings.decided(name, words[1:], ())):
                return why
            if words is not command.words and " " in words[0].strip():  # `watch 'a command'`
                return self.shell(" ".join(words), depth + 1, far=far)
            if f"{words[0]}()" in self.values and (why := self._function(words, command, depth, far)):
                return why
            if name in {"xargs", "parallel"}:
                return self._each(name, words, command, depth, far)
            unfolded = self._unwrapped(name, words, assigned)
            if unfolded is None:
                args = words[1:]
                request = [*args, *command.stdin] if name in HTTP else []
                return (
                    self._run_from(assigned, depth, far)
                    or self._may_run(name, args, assigned, depth, far)
                    or self._ended(name, args, assigned, far)
                    or self._texts(name, args, command, depth, far)
                    or self._elsewhere(name, args, command, depth)
                    or self._inner(name, args, command, depth, far)
                    or (called(name, request, self.patterns) if request else None)
                    or self._wrote(name, args, command, far=far)
                )
            options = [word for word in words[1 : len(words) - len(unfolded)] if not ASSIGNMENT.fullmatch(word)]
            if options and not far and (why := self._wrote(name, options, command)):
                return why
            words = unfolded
        raise TooMuch("the command has too many nested wrappers to check")

    def _wrote(self, name: str, args: list[str], command: Command, *, far: bool = False) -> str | None:
        """Return the reason to block a program because of the files that it changes."""
        why = None if far else self.drafts.written_by(name, args, command)
        return why or self.files.judged(name, args, far=far)

    def _unwrapped(self, name: str, words: list[str], assigned: dict[str, str]) -> list[str] | None:
        """Return the words after a wrapper, such as `sudo`, and its options; None without a wrapper."""
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
        if name.startswith(("python", "pypy")) and "-m" in words[1:6]:
            at = words.index("-m")
            module = words[at + 1] if at + 1 < len(words) else ""
            whole = self.patterns.knows(module.lower()) or module == "json.tool"
            known = module if whole else module.partition(".")[0]
            return [known, *words[at + 2 :]]
        if name.startswith(("python", "pypy")) and self.patterns.knows(name_of(script_of(words[1:]))):
            return words[words.index(script_of(words[1:])) :]
        return None

    def _ended(self, name: str, args: list[str], assigned: dict[str, str], far: bool) -> str | None:
        """Return the reason to block a program that itself stops or deletes a resource."""
        program = self.patterns.program(name)
        docker = program in {"docker", "docker-compose"} and (
            "DOCKER_HOST" in assigned or "DOCKER_HOST" in self.values or other_docker(args)
        )
        ended = self.patterns.ended(program, args, far=far or docker)
        if not ended and (language(name) in CODE or name in SHELLS or name.endswith(SCRIPTS)):
            ended = self.patterns.helped([name, *args])
        if ended:
            return f"`{ended}` stops or deletes a resource that gpuwarden guards"
        if why := desired(program, args, self.files):
            return why
        if name in {"pkill", "killall"} and any("gpuwarden" in a for a in args):
            return f"`{name}` stops the gpuwarden watch, which monitors billing"
        if name in self.aliases:
            return self.shell(" ".join([self.aliases.pop(name), *args]), far=far)
        if name == "alias":
            self.aliases.update((n, v) for n, _, v in (a.partition("=") for a in args) if v)
        if name in {"cd", "pushd"} and not far:
            there = next((a for a in args if not re.fullmatch(r"-[LPe@]*|--", a)), "~")
            there = self.values.get("OLDPWD", UNKNOWN) if "-" in args else there
            self.values.update(OLDPWD=self.files.cwd, PWD=self.files.place(there))
        if name == "set" and (given := positional(args)) is not None:
            self._bind(given)
        if name == "shift" and "@" in self.values:
            self._bind(self.values["@"].split(BETWEEN)[1:])
        return None

    def _aside(self, text: str, depth: int, far: bool) -> str | None:
        """Return the reason to block shell text that another process runs, and keep this shell's variables."""
        self.budget.spend(len(self.values) // 8)
        values, aliases, folder = dict(self.values), dict(self.aliases), self.files.cwd
        why = self.shell(text, depth + 1, far=far)
        self.values.clear()
        self.values.update(values)
        self.aliases, self.files.cwd = aliases, folder
        return why

    def _may_run(self, name: str, args: list[str], assigned: dict[str, str], depth: int, far: bool) -> str | None:
        """Return the reason to block commands that a program runs because of its options, settings or variables."""
        set_here = assigned.items() if name != "export" else (word.partition("=")[::2] for word in args)
        texts = [value.lstrip("|! ") for variable, value in set_here if RUN_FROM_NAME.fullmatch(variable)]
        self.budget.spend(sum(map(len, args)) // 8)
        texts += run_by_options(name, args)
        settings_of_git: dict[str, str] = {}
        if name == "git":
            self.budget.spend(len(self.values) // 8)
            texts += run_by_git(args, self.values | assigned)
            settings_of_git = {v: self.values.pop(v) for v in list(self.values) if v.startswith("GIT_CONFIG_")}
        why = next((why for text in texts if (why := self._aside(text, depth, far))), None)
        self.values.update(settings_of_git)  # a text that runs git would have read the same settings again
        if why:
            return why
        if may_run(name) and f"{name}()" not in self.values and not self.patterns.knows(name):
            for text in args:
                if " " in text and (found := self.patterns.command_in_code(text, begins=True)):
                    return f"`{name}` may run `{' '.join(found.split())[:60]}`"
        return None

    def _run_from(self, assigned: dict[str, str], depth: int, far: bool) -> str | None:
        """Return the reason to block shell text that a program runs because a variable contains it."""
        for name in sorted(RUN_FROM.keys() & (assigned.keys() | self.values.keys())):
            value = assigned.get(name) or self.values.get(name)
            key = hash((name, value, len(self.drafts.printed)))
            if value and key not in self.seen:
                self.seen.add(key)
                text = RUN_FROM[name].format(value)
                apart = name in RUN_APART
                if why := self._aside(text, depth, far) if apart else self.shell(text, depth + 1, far=far):
                    return why
        return None

    def _texts(self, name: str, args: list[str], command: Command, depth: int, far: bool) -> str | None:
        """Return the reason to block a program that runs text, such as a shell, an interpreter or a scheduler."""
        if self.typing and name in SHELLS and not command.fed and all(a.startswith("-") for a in args):
            return f"input typed into a running `{name}` can't be checked; pass the commands with -c"
        if name in SHELLS | SOURCED | TEXT_RUNNERS:
            texts = [" ".join(args)] if name == "eval" else [*after_c(args), *self._scripts(args), *command.stdin]
            if name == "script":
                texts.append(" ".join([a for a in args if not a.startswith("-")][1:]))
            before = self.values.get("PWD", self.files.cwd)
            why = self._any(texts, depth, far)
            if name in SHELLS:
                self.values["PWD"] = before
            return why
        if name != "cat" and (why := self._any(self._scripts(command.words[:1]), depth, far)):
            return why
        if name == "trap":
            return next((self._aside(text, depth, far) for text in args if text != "--"), None)
        if name in LATER:
            lines = "\n".join(command.stdin).splitlines()
            lines = [re.sub(r"^\s*(?:@\w+|(?:[\d*/,-]+\s+){4}\S+)\s+", "", line) for line in lines[:200]]
            return self._any(["\n".join(lines)], depth, far) or self.spoken(" ".join([*args, *command.stdin]))
        if name in WINDOWS:
            texts = after_command(args)
            return self._any(texts, depth, far) or self.spoken("\n".join([*texts, *command.stdin]))
        quoted = (re.sub(r"^--[\w-]+=|^-\w", "", a) for a in args if " " in a)
        if name in {"tmux", "hyperfine"} and (why := self._any(quoted, depth, far)):
            return why
        if language(name) in CODE:
            return self._code(language(name), args, command.stdin, depth, far)
        if name not in DOERS:
            return None
        typed = " ".join([*(a for a in args if a not in {"Space", "Enter", "C-m"}), *command.stdin])
        return settings.code_edits(typed) or self.spoken(typed)

    def _code(self, name: str, args: list[str], stdin: list[str], depth: int, far: bool) -> str | None:
        """Return the reason to block an interpreter because of the code that this call passes to it."""
        flag = CODE[name]
        code = [b for a, b in pairwise(args) if re.fullmatch(rf"-\w*{flag[-1]}|{flag}|--eval", a)]
        if not code and "-" not in args and script_of(args):
            code, stdin = self._scripts(args), []
        if why := settings.code_edits("\n".join([*args, *code, *stdin])):
            return why
        for text in (*code, *stdin):
            if output_of_code(name, ["-c", text]) is not None:
                continue
            if why := self.spoken(text) or self._run_by_code(text, depth, far):
                return why
            for path, deep in removed_by_code(text):
                lost = self.files.lost(path or "*", deep=deep) if far and (path or deep) else None
                if why := lost if far else self.files.removal(path or UNKNOWN):
                    return why
        return None

    def _run_by_code(self, text: str, depth: int, far: bool) -> str | None:
        """Return the reason to block code because one of its strings is a command that would be blocked."""
        before, runs = self.files.question, RUNS_IN_CODE.search(text)
        for inner, elsewhere in commands_in_code(text):
            first = name_of((inner.split() or [""])[0])
            if runs and inner.strip() in REMOVERS and (why := self.files.removal(UNKNOWN)):
                return why
            writes = ">" in inner and settings.names_kept(inner)
            if first in SHELLS or first in WRAPPERS or first in ENDING or first in {"ssh", "scp"} or writes:
                self.budget.spend(len(inner) // 8)
                if why := self.shell(inner, depth + 1, far=far or elsewhere):
                    return why
        self.files.question = self.files.question if runs else before
        return None

    def _scripts(self, args: Iterable[str]) -> list[str]:
        """Return the contents of the files that are named in `args` and were written earlier in this call."""
        printed = self.drafts.printed
        return [printed[path] for a in args if printed and (path := self.files.path(a)) in printed]

    def _elsewhere(self, name: str, args: list[str], command: Command, depth: int) -> str | None:
        """Return the reason to block a command that a program runs on another machine."""
        rest: list[str] | None = None
        if name in FLEETS and (name != "aws" or "ssm" in args):
            return self._any(for_fleets(args), depth, far=True)
        if name in {"ssh", "autossh", "mosh", "plink"}:
            rest = inside(inside(args, SSH_VALUED, name)[1:], SSH_VALUED, name)
        elif name in {"sftp", "lftp"}:
            starts = ("\n".join(text.splitlines()[:200]) for text in command.stdin)
            return next((w for text in starts if (w := self.shell(text, depth + 1, far=True))), None)
        else:
            rest = self.patterns.remote_part(self.patterns.program(name), args)
            if rest and (why := self.shell(shlex.join(rest), depth + 1, far=True)):
                return why
        if rest is None:
            return None
        feed = Feed(tuple(command.stdin), (), command.fed)
        if rest:
            return self.shell(" ".join(rest), depth + 1, far=True, feed=feed)
        return self._any(command.stdin, depth, far=True)

    def _runs(self, word: str) -> bool:
        """Return whether a word is gpuwarden or a platform's program."""
        name = self.patterns.program(name_of(word))
        return name == "gpuwarden" or name in self.patterns.ends or name in self.patterns.remote

    def _inner(self, name: str, args: list[str], command: Command, depth: int, far: bool) -> str | None:
        """Return the reason to block a program that another program runs from its arguments."""
        if name in {"find", "fd", "fdfind"}:
            found = printed([name, *args], (), self.files.cwd)
            names = [b for a, b in pairwise(args) if a in {"-name", "-iname"}] or ["**"]
            if name == "find" and not any(UNKNOWN in root for root in roots(args)):
                found = "\n".join(f"{root.rstrip('/')}/**/{each}" for root in roots(args) for each in names)
            runs = [i for i, a in enumerate(args) if a in FOUND_RUNS][:20]
            parts = [[word.replace("{}", found) for word in args[i + 1 :]] for i in runs]
            parts = [p if name == "find" or found in p else [*p, found] for p in parts]
            parts = [p for p in parts if name != "find" or name_of("".join(p[:1])) != "rm"]
        elif name == "runuser":
            parts = [inside(args, "ugG", name)]
        elif name in RUNNERS:
            known = {*SHELLS, *WRAPPERS, *HTTP, "ssh"}
            if far or other_docker(args):
                known, far = known | ENDING, True

            def worth_a_look(word: str) -> bool:
                program = name_of(word)
                return (
                    self.patterns.knows(program)
                    or program in known
                    or language(program) in CODE
                    or program.endswith(SCRIPTS)
                )

            parts = list(candidates(args, worth_a_look))
        elif name not in settings.SENTENCES:  # an unknown program may run its arguments, or answer gpuwarden's prompt
            unknown = may_run(name) and f"{name}()" not in self.values
            parts = list(candidates(args, lambda word: self._runs(word) if unknown else name_of(word) == "gpuwarden"))
            parts = [part for part in parts if len(part) > 1 or name_of(part[0]) == "gpuwarden"]
        else:
            return None
        for part in parts:
            key = hash((*part, *command.stdin, self.files.cwd, far, len(self.drafts.printed)))
            if key not in self.seen:  # nested runners yield the same command more than once
                self.seen.add(key)
                inner = Command(part, stdin=command.stdin, fed=command.fed)
                if why := self.command(inner, depth + 1, far=far):
                    return why
        return None

    def _function(self, words: list[str], command: Command, depth: int, far: bool) -> str | None:
        """Return the reason to block a function call. Inside its body, the function's name refers to a program."""
        before = {name: value for name, value in self.values.items() if name[0] in "@*#0123456789"}
        before[f"{words[0]}()"] = body = self.values.pop(f"{words[0]}()")
        self.budget.spend(5)
        self._bind(words[1:])
        try:
            return self.shell(body, depth + 1, far=far, feed=command.feed)
        finally:
            for name in [n for n in self.values if n[0] in "@*#0123456789"]:
                del self.values[name]
            self.values.update(before)

    def _bind(self, words: Sequence[str]) -> None:
        """Set the positional parameters of the shell or a function."""
        for name in [n for n in self.values if n.isdigit()]:
            del self.values[name]
        self.values.update({str(i): word for i, word in enumerate(words, 1)})
        self.values.update({"@": BETWEEN.join(words), "*": " ".join(words), "#": str(len(words))})

    def _each(self, name: str, words: list[str], command: Command, depth: int, far: bool) -> str | None:
        """Return the reason to block a program that `xargs` or `parallel` runs with its input."""
        parts = for_each(name, words, command.stdin)
        if name == "parallel" and " " in "".join(inside(words[1:], WRAPPERS[name], name)[:1]):
            return self._any(map(" ".join, parts), depth, far)
        return next((w for p in parts if (w := self.command(Command(p, fed=True), depth + 1, far=far))), None)

    # ---------------------------------------------------------------------------------------------------- helpers

    def _outputs(self, command: Command, far: bool) -> str | None:
        """Return the reason to block a command because of the files that it writes, and record their contents."""
        if far:
            empties = command.name in {"", ":", "true"} or command.words == ["cat", "/dev/null"]
            return next((w for t in command.targets if empties and (w := self.files.lost(t, deep=False))), None)
        function = bool(command.words) and f"{command.words[0]}()" in self.values
        return self.drafts.redirected(command, printed_elsewhere=function)

    def _any(self, texts: Iterable[str], depth: int, far: bool) -> str | None:
        return next((why for text in texts if text and (why := self.shell(text, depth + 1, far=far))), None)

    def names_kept(self) -> bool:
        """Return whether the call names a protected file or a setting reserved for the user."""
        text = "\n".join(self.drafts.texts)
        ends = ("/".join(file.split("/")[-2:]) for file in (*self.files.files, *self.files.settings))
        return settings.names_kept(text) or any(end in text for end in ends)

    def spoken(self, text: str) -> str | None:
        """Return the reason to block text that is not shell code."""
        self.budget.spend(len(text) // 8)
        return spoken(text, self.patterns)
