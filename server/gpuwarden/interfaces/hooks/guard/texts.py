"""Check the text that programs run: shell text, code in other languages, and the values of variables and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.drafts import Drafts
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, name_of, output_of_code
from gpuwarden.interfaces.hooks.guard.programs import RUNS_IN_CODE, commands_in_code, removed_by_code, spoken
from gpuwarden.interfaces.hooks.guard.run_by_options import RUN_FROM_NAME, may_run, run_by_git, run_by_options
from gpuwarden.interfaces.hooks.guard.shell import Command, Feed
from gpuwarden.interfaces.hooks.guard.state import ShellState
from gpuwarden.interfaces.hooks.guard.wrappers import (
    CODE,
    DOERS,
    ENDING,
    LATER,
    REMOVERS,
    RUN_APART,
    RUN_FROM,
    SHELLS,
    SOURCED,
    TEXT_RUNNERS,
    WINDOWS,
    WRAPPERS,
    after_c,
    after_command,
    language,
    script_of,
)


class Texts:
    """The texts that a call's commands run. `Judge` checks the commands in them.

    `typing`: the client can type into a running program without calling a hook first.
    """

    def __init__(self, patterns: Patterns, files: Files, values: dict[str, str], *, typing: bool) -> None:
        self.patterns, self.files, self.budget, self.typing = patterns, files, files.budget, typing
        self.state = ShellState(files, values)
        self.drafts = Drafts(files, files.budget)

    def shell(self, text: str, depth: int = 0, *, far: bool = False, feed: Feed | None = None) -> str | None:
        """Return the reason to block shell text, or None to allow it. `Judge` implements this."""
        raise NotImplementedError

    def first(self, texts: Iterable[str], depth: int, *, far: bool) -> str | None:
        """Return the first reason to block one of several shell texts."""
        return next((why for text in texts if text and (why := self.shell(text, depth + 1, far=far))), None)

    def spoken(self, text: str) -> str | None:
        """Return the reason to block text that is not shell code."""
        self.budget.spend(len(text) // 8)
        return spoken(text, self.patterns)

    def _apart(self, text: str, depth: int, *, far: bool) -> str | None:
        """Return the reason to block shell text that another process runs."""
        with self.state.apart():
            return self.shell(text, depth + 1, far=far)

    def _written(self, paths: Iterable[str]) -> list[str]:
        """Return the contents of those files that were written earlier in this call."""
        printed = self.drafts.printed
        return [printed[path] for a in paths if printed and (path := self.files.path(a)) in printed]

    def run_by_variables(self, assigned: Mapping[str, str], depth: int, *, far: bool) -> str | None:
        """Return the reason to block shell text that a program runs because a variable contains it."""
        values = self.state.values
        for name in sorted(RUN_FROM.keys() & (assigned.keys() | values.keys())):
            value = assigned.get(name) or values.get(name)
            if value and self.state.is_new(name, value, len(self.drafts.printed)):
                text = RUN_FROM[name].format(value)
                apart = name in RUN_APART
                if why := self._apart(text, depth, far=far) if apart else self.shell(text, depth + 1, far=far):
                    return why
        return None

    def run_by_settings(
        self, name: str, args: list[str], assigned: Mapping[str, str], depth: int, *, far: bool
    ) -> str | None:
        """Return the reason to block commands that a program runs because of its options, settings or variables."""
        set_here = assigned.items() if name != "export" else (word.partition("=")[::2] for word in args)
        texts = [value.lstrip("|! ") for variable, value in set_here if RUN_FROM_NAME.fullmatch(variable)]
        self.budget.spend(sum(map(len, args)) // 8)
        texts += run_by_options(name, args)
        values, settings_of_git = self.state.values, dict[str, str]()
        if name == "git":
            self.budget.spend(len(values) // 8)
            texts += run_by_git(args, {**values, **assigned})
            settings_of_git = {v: values.pop(v) for v in list(values) if v.startswith("GIT_CONFIG_")}
        why = next((why for text in texts if (why := self._apart(text, depth, far=far))), None)
        values.update(settings_of_git)  # removed above, so that a text that runs git does not apply them again
        if why:
            return why
        if may_run(name) and f"{name}()" not in values and not self.patterns.knows(name):
            for text in args:
                if " " in text and (found := self.patterns.command_in_code(text, begins=True)):
                    return f"`{name}` may run `{' '.join(found.split())[:60]}`"
        return None

    def run_by_program(self, name: str, args: list[str], command: Command, depth: int, *, far: bool) -> str | None:
        """Return the reason to block a program that runs text, such as a shell, an interpreter or a scheduler."""
        if self.typing and name in SHELLS and not command.fed and all(a.startswith("-") for a in args):
            return f"input typed into a running `{name}` can't be checked; pass the commands with -c"
        if name in SHELLS | SOURCED | TEXT_RUNNERS:
            texts = [" ".join(args)] if name == "eval" else [*after_c(args), *self._written(args), *command.stdin]
            if name == "script":
                texts.append(" ".join([a for a in args if not a.startswith("-")][1:]))
            before = self.state.values.get("PWD", self.files.cwd)
            why = self.first(texts, depth, far=far)
            if name in SHELLS:
                self.state.values["PWD"] = before
            return why
        if name != "cat" and (why := self.first(self._written(command.words[:1]), depth, far=far)):
            return why
        if name == "trap":
            return next((self._apart(text, depth, far=far) for text in args if text != "--"), None)
        if name in LATER:
            lines = "\n".join(command.stdin).splitlines()
            lines = [re.sub(r"^\s*(?:@\w+|(?:[\d*/,-]+\s+){4}\S+)\s+", "", line) for line in lines[:200]]
            return self.first(["\n".join(lines)], depth, far=far) or self.spoken(" ".join([*args, *command.stdin]))
        if name in WINDOWS:
            texts = after_command(args)
            return self.first(texts, depth, far=far) or self.spoken("\n".join([*texts, *command.stdin]))
        quoted = (re.sub(r"^--[\w-]+=|^-\w", "", a) for a in args if " " in a)
        if name in {"tmux", "hyperfine"} and (why := self.first(quoted, depth, far=far)):
            return why
        if language(name) in CODE:
            return self._code(language(name), args, command.stdin, depth, far=far)
        if name not in DOERS:
            return None
        typed = " ".join([*(a for a in args if a not in {"Space", "Enter", "C-m"}), *command.stdin])
        return settings.code_edits(typed) or self.spoken(typed)

    def _code(self, name: str, args: list[str], stdin: list[str], depth: int, *, far: bool) -> str | None:
        """Return the reason to block an interpreter because of the code that this call passes to it."""
        flag = CODE[name]
        code = [b for a, b in pairwise(args) if re.fullmatch(rf"-\w*{flag[-1]}|{flag}|--eval", a)]
        if not code and "-" not in args and script_of(args):
            code, stdin = self._written(args), []
        if why := settings.code_edits("\n".join([*args, *code, *stdin])):
            return why
        for text in (*code, *stdin):
            if output_of_code(name, ["-c", text]) is not None:
                continue
            if why := self.spoken(text) or self._run_by_code(text, depth, far=far):
                return why
            for path, deep in removed_by_code(text):
                lost = self.files.lost(path or "*", deep=deep) if far and (path or deep) else None
                if why := lost if far else self.files.removal(path or UNKNOWN):
                    return why
        return None

    def _run_by_code(self, text: str, depth: int, *, far: bool) -> str | None:
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
