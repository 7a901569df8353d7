"""Check shell text: every simple command in it, and every command that these commands run in turn."""

from __future__ import annotations

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.desired import desired
from gpuwarden.interfaces.hooks.guard.limits import TooMuch
from gpuwarden.interfaces.hooks.guard.nested import (
    run_by_find,
    run_by_runner,
    run_by_unknown,
    run_elsewhere,
    unwrapped,
)
from gpuwarden.interfaces.hooks.guard.patterns import SCRIPTS
from gpuwarden.interfaces.hooks.guard.printing import name_of
from gpuwarden.interfaces.hooks.guard.programs import HTTP, called
from gpuwarden.interfaces.hooks.guard.run_by_options import may_run
from gpuwarden.interfaces.hooks.guard.shell import Command, Feed, Reader
from gpuwarden.interfaces.hooks.guard.texts import Texts
from gpuwarden.interfaces.hooks.guard.wrappers import (
    ASSIGNMENT,
    CODE,
    RUNNERS,
    SHELLS,
    WRAPPERS,
    for_each,
    inside,
    language,
    other_docker,
)

DEEPEST = 12
MOST_WRAPPERS = 15


class Judge(Texts):
    """Check the commands that one call would run, including those in text that other commands run."""

    def shell(self, text: str, depth: int = 0, *, far: bool = False, feed: Feed | None = None) -> str | None:
        """Return the reason to block shell text, or None to allow it. `far`: the text runs on another machine.

        Raises TooMuch if the text is too long or too complex to check.
        """
        if depth > DEEPEST:
            raise TooMuch("the command is nested too deeply to check")
        self.drafts.texts.append(text)
        reader = Reader(text, self.state.values, self.budget, feed)
        for command in reader.commands():
            self.files.cwd = self.state.values.get("PWD", self.files.cwd)
            if why := self._command(command, depth, far=far):
                return why
        if reader.broken and ">" in text:
            self.files.blind = self.files.blind or "a file"
        return (self.spoken(text) if reader.broken else None) or self.run_by_variables({}, depth, far=far)

    def names_kept(self) -> bool:
        """Return whether the call names a protected file or a setting reserved for the user."""
        text = "\n".join(self.drafts.texts)
        ends = ("/".join(file.split("/")[-2:]) for file in (*self.files.files, *self.files.settings))
        return settings.names_kept(text) or any(end in text for end in ends)

    def _command(self, command: Command, depth: int, *, far: bool) -> str | None:
        """Return the reason to block a simple command."""
        self.budget.spend(2 + len(command.words) + sum(map(len, command.stdin)) // 64)
        if why := self._redirected(command, far=far):
            return why
        assigned = dict(command.assigned)
        words = command.words
        for _ in range(MOST_WRAPPERS):
            name, whole = name_of("".join(words[:1])), words is command.words
            if why := settings.decided(name, words[1:], command.assigned if whole else ()):
                return why
            if not words:
                return None
            if not whole and " " in words[0].strip():  # `watch 'a command'`
                return self.shell(" ".join(words), depth + 1, far=far)
            if f"{words[0]}()" in self.state.values:
                with self.state.inside(words[0], words[1:]) as body:
                    if why := self.shell(body, depth + 1, far=far, feed=command.feed):
                        return why
            if name in {"xargs", "parallel"}:
                return self._each(name, words, command, depth, far=far)
            rest = unwrapped(words, assigned, self.patterns)
            if rest is None:
                return self._program(name, words[1:], assigned, command, depth, far=far)
            options = [word for word in words[1 : len(words) - len(rest)] if not ASSIGNMENT.fullmatch(word)]
            if options and not far and (why := self._changes(name, options, command, far=False)):
                return why
            words = rest
        raise TooMuch("the command has too many nested wrappers to check")

    def _redirected(self, command: Command, *, far: bool) -> str | None:
        """Return the reason to block a command because of the files to which its output is redirected."""
        if far:
            empties = command.name in {"", ":", "true"} or command.words == ["cat", "/dev/null"]
            return next((w for t in command.targets if empties and (w := self.files.lost(t, deep=False))), None)
        function = bool(command.words) and f"{command.words[0]}()" in self.state.values
        return self.drafts.redirected(command, printed_elsewhere=function)

    def _each(self, name: str, words: list[str], command: Command, depth: int, *, far: bool) -> str | None:
        """Return the reason to block a program that `xargs` or `parallel` runs with its input."""
        parts = for_each(name, words, command.stdin)
        if name == "parallel" and " " in "".join(inside(words[1:], WRAPPERS[name], name)[:1]):
            return self.first(map(" ".join, parts), depth, far=far)
        return next((w for p in parts if (w := self._command(Command(p, fed=True), depth + 1, far=far))), None)

    def _program(
        self, name: str, args: list[str], assigned: dict[str, str], command: Command, depth: int, *, far: bool
    ) -> str | None:
        """Return the reason to block a program because of its own effects, or because of the commands that it runs."""
        request = [*args, *command.stdin] if name in HTTP else []
        return (
            self.run_by_variables(assigned, depth, far=far)
            or self.run_by_settings(name, args, assigned, depth, far=far)
            or self._ended(name, args, assigned, far=far)
            or self._builtin(name, args, far=far)
            or self.run_by_program(name, args, command, depth, far=far)
            or self._elsewhere(name, args, command, depth)
            or self._nested(name, args, command, depth, far=far)
            or (called(name, request, self.patterns) if request else None)
            or self._changes(name, args, command, far=far)
        )

    def _ended(self, name: str, args: list[str], assigned: dict[str, str], *, far: bool) -> str | None:
        """Return the reason to block a program that itself stops or deletes a resource."""
        program = self.patterns.program(name)
        docker = program in {"docker", "docker-compose"} and (
            "DOCKER_HOST" in assigned or "DOCKER_HOST" in self.state.values or other_docker(args)
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
        return None

    def _builtin(self, name: str, args: list[str], *, far: bool) -> str | None:
        """Return the reason to block an alias's command. For a builtin, update the shell's state instead."""
        if alias := self.state.aliases.pop(name, ""):
            return self.shell(" ".join([alias, *args]), far=far)
        self.state.run(name, args, far=far)
        return None

    def _elsewhere(self, name: str, args: list[str], command: Command, depth: int) -> str | None:
        """Return the reason to block a command that a program runs on another machine."""
        texts = run_elsewhere(name, args, command, self.patterns)
        return next((w for text, feed in texts if (w := self.shell(text, depth + 1, far=True, feed=feed))), None)

    def _nested(self, name: str, args: list[str], command: Command, depth: int, *, far: bool) -> str | None:
        """Return the reason to block a program that another program runs from its arguments."""
        if name in {"find", "fd", "fdfind"}:
            parts = run_by_find(name, args, self.files.cwd)
        elif name == "runuser":
            parts = [inside(args, "ugG", name)]
        elif name in RUNNERS:
            far = far or other_docker(args)
            parts = run_by_runner(args, self.patterns, far=far)
        elif name not in settings.SENTENCES:
            unknown = may_run(name) and f"{name}()" not in self.state.values
            parts = run_by_unknown(args, self.patterns, may_run=unknown)
        else:
            return None
        for part in parts:
            # Nested runners yield the same command more than once.
            if self.state.is_new(*part, *command.stdin, self.files.cwd, far, len(self.drafts.printed)):
                inner = Command(part, stdin=command.stdin, fed=command.fed)
                if why := self._command(inner, depth + 1, far=far):
                    return why
        return None

    def _changes(self, name: str, args: list[str], command: Command, *, far: bool) -> str | None:
        """Return the reason to block a program because of the files that it changes."""
        why = None if far else self.drafts.written_by(name, args, command)
        return why or self.files.judged(name, args, far=far)
