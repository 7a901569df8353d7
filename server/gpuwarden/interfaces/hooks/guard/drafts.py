"""Record and check the files that a call writes. The target path is always checked; the text is checked if the target
is a client's configuration or a shell startup file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.limits import Budget
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, as_written, printed
from gpuwarden.interfaces.hooks.guard.shell import Command
from gpuwarden.interfaces.hooks.guard.writes import written_by

MOST_COPIED: Final = 65_536
"""Maximum size in bytes of a copied file that is read to check its content."""
FILTERS: Final = frozenset(
    {"jq", "yq", "sed", "awk", "gawk", "mawk", "tr", "cut", "json.tool", "perl", "column", "paste"}
)
"""Programs that transform their input according to their arguments and print the result."""
VERBATIM: Final = frozenset({"cat", "head", "tail", "tac", "sort", "grep", "tee"})
"""Programs that print their input, or a part of it, unchanged."""


class Drafts:
    """The files that one call has written so far. `printed` maps paths to the known output written there, and `texts`
    contains all shell text in the call.
    """

    def __init__(self, files: Files, budget: Budget) -> None:
        self.files, self.budget = files, budget
        self.printed: dict[str, str] = {}
        self.texts: list[str] = []
        self._drafts: dict[str, str] = {}

    def redirected(self, command: Command, *, printed_elsewhere: bool) -> str | None:
        """Return the reason to block a command because of the files to which its output is redirected."""
        if not command.targets:
            return None
        plain = text = printed(command.words, command.stdin, self.files.cwd)
        if printed_elsewhere:
            text = ""
        elif UNKNOWN in plain and command.name in FILTERS | VERBATIM:
            # A filter's output contains its arguments, followed by the files and texts that it reads.
            files = [self._content(a) for a in command.words[1:] if not a.startswith("-")]
            files = [f for f in files if command.name in VERBATIM or f != UNKNOWN]
            words = [] if command.name in VERBATIM else command.words
            text = "\n".join([*words, *command.stdin, *files])
        elif UNKNOWN in plain:
            text = "\n".join([*command.words, *command.stdin, UNKNOWN])
        for target in dict.fromkeys(command.targets):
            if why := self._written(target, text):
                return why
            self._record(target, plain)
        return None

    def _record(self, target: str, text: str) -> None:
        """Record the text written to a file, if it is known, because a shell may run the file later."""
        if text and not text.startswith(UNKNOWN):
            path = self.files.path(target)
            self.printed[path] = "\n".join(filter(None, [self.printed.get(path), as_written(text)]))

    def written_by(self, name: str, args: Sequence[str], command: Command) -> str | None:
        """Return the reason to block a program because of the files that it writes, apart from redirected output."""
        for write in written_by(name, args):
            self.budget.spend(15)
            if write.folder:
                self.files.unpacked(write.target)
                continue
            text = "\n".join(map(self._content, write.sources)) if write.sources else f"{UNKNOWN}$()"
            text = (
                " ".join(args) if write.printed else "\n".join(command.stdin) if write.fed and command.stdin else text
            )
            if why := self._written(write.target, text):
                return why
            drafts = command.stdin if write.fed else (self.printed.get(self.files.path(s), "") for s in write.sources)
            self._record(write.target, "\n".join(drafts))
        return None

    def _written(self, target: str, text: str) -> str | None:
        """Return the reason to block a write to a file. Also record the written text."""
        self.budget.spend(len(text) // 64)
        if why := self.files.change(target):
            return why
        path = self.files.path(target)
        whole = self._drafts[path] = "\n".join(filter(None, [self._drafts.get(path), text]))
        unknown = UNKNOWN in text and settings.watched(path)
        if why := settings.shell_written(path, "\n".join([whole, *self.texts]) if unknown else whole):
            return why
        if settings.is_client_file(path) and (unknown or settings.may_be_off(text)):
            self.files.ask(f"{path} configures a coding agent, and the text to be written to it is unknown")
        return None

    def _content(self, file: str) -> str:
        """Return the text that this call wrote to a file, or else the file's content; UNKNOWN if it can't be read."""
        path = self.files.path(file)
        text = self._drafts.get(path)
        text = settings.contents(path, MOST_COPIED) if text is None else text
        self.budget.spend(len(text or "") // 64)
        return UNKNOWN if text is None else text
