"""Track the state that commands change in a shell: variables, functions, aliases and the working directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN
from gpuwarden.interfaces.hooks.guard.wrappers import BETWEEN, positional

_POSITIONAL = frozenset("@*#0123456789")
"""First characters of the names of positional parameters."""


class ShellState:
    """The state of the shell that runs a call's commands.

    `values` maps variables to values, and `name()` to a function's body. The working directory is `files.cwd`. A `cd`
    sets only `PWD`; `files.cwd` is updated before the next command.
    """

    def __init__(self, files: Files, values: dict[str, str]) -> None:
        self.files, self.values = files, values
        self.aliases: dict[str, str] = {}
        self._checked: set[int] = set()

    def is_new(self, *parts: object) -> bool:
        """Return whether a command or a text has not been checked yet, and record it as checked."""
        key = hash(parts)
        new = key not in self._checked
        self._checked.add(key)
        return new

    def run(self, name: str, args: Sequence[str], *, far: bool) -> None:
        """Apply a shell builtin that changes the state. Ignore all other programs."""
        if name == "alias":
            self.aliases.update((n, v) for n, _, v in (a.partition("=") for a in args) if v)
        elif name in {"cd", "pushd"} and not far:
            there = next((a for a in args if not re.fullmatch(r"-[LPe@]*|--", a)), "~")
            there = self.values.get("OLDPWD", UNKNOWN) if "-" in args else there
            self.values.update(OLDPWD=self.files.cwd, PWD=self.files.place(there))
        elif name == "set" and (given := positional(args)) is not None:
            self._bind(given)
        elif name == "shift" and "@" in self.values:
            self._bind(self.values["@"].split(BETWEEN)[1:])

    def _bind(self, words: Sequence[str]) -> None:
        """Set the positional parameters."""
        for name in [n for n in self.values if n.isdigit()]:
            del self.values[name]
        self.values.update({str(i): word for i, word in enumerate(words, 1)})
        self.values.update({"@": BETWEEN.join(words), "*": " ".join(words), "#": str(len(words))})

    @contextmanager
    def inside(self, function: str, args: Sequence[str]) -> Iterator[str]:
        """Yield a function's body, with its positional parameters set. Inside the body, the function's name refers to a
        program.
        """
        before = {name: value for name, value in self.values.items() if name[0] in _POSITIONAL}
        before[f"{function}()"] = body = self.values.pop(f"{function}()")
        self.files.budget.spend(5)
        self._bind(args)
        try:
            yield body
        finally:
            for name in [n for n in self.values if n[0] in _POSITIONAL]:
                del self.values[name]
            self.values.update(before)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore the state, and the record of checked commands, after the check of text that another process runs."""
        self.files.budget.spend((len(self.values) + len(self._checked)) // 8)
        values, aliases, folder, checked = dict(self.values), dict(self.aliases), self.files.cwd, set(self._checked)
        yield
        self.values.clear()
        self.values.update(values)
        self.aliases, self.files.cwd, self._checked = aliases, folder, checked
