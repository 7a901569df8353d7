"""Split a command line that runs a program into gpuwarden's options and the program's arguments.

`gpuwarden submit --platform local train.py --lr 2e-5` passes `--lr` to the script. A gpuwarden option that the script
does not declare may come after the script. To separate the two explicitly, put `--` before the program or, if
gpuwarden's options follow the program, after those options.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import is_fan_out

_END: Final = "--"


class RunsProgram(click.Command):
    """A command whose WHAT argument is a program with its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse gpuwarden's options, and leave the program's arguments unchanged."""
        what = self._what(ctx, args, interspersed=False)
        if not what or not self.takes_words(what[0]):
            return super().parse_args(ctx, args)
        ours, program, words = args[: len(args) - len(what)], what[0], list(what[1:])
        if ours[-1:] == [_END]:
            ours = ours[:-1]
        elif _END in words:
            at = words.index(_END)
            before, behind = words[:at], words[at + 1 :]
            try:
                only_options = not self._what(ctx, before, interspersed=True)
            except click.UsageError:
                only_options = False
            if only_options:
                ours, words = [*ours, *before], behind
            else:
                moved, rest = self._sorted(program, before)
                ours, words = [*ours, *moved], [*rest, *behind]
        else:
            moved, words = self._sorted(program, words)
            ours = [*ours, *moved]
        return super().parse_args(ctx, [*ours, _END, program, *words])

    def takes_words(self, program: str) -> bool:
        """Return whether the words after `program` belong to it. After a fan-out's id, they belong to gpuwarden."""
        return not is_fan_out(program)

    def _what(self, ctx: click.Context, args: Sequence[str], *, interspersed: bool) -> tuple[str, ...]:
        """Return the words that are not gpuwarden's options."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = interspersed
        what = parser.parse_args(list(args))[0].get("what")
        return what if isinstance(what, tuple) else ()

    def _sorted(self, program: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split a program's words into gpuwarden's options and the other words.

        A gpuwarden option that the script definitely does not declare belongs to gpuwarden at any position. Raises
        BadRequest if it can't be determined whether an option belongs to the script.
        """
        options = {name: p for p in self.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
        if not options.keys() & {word.partition("=")[0] for word in words}:
            return [], list(words)
        from gpuwarden.static_analysis.flag_owner import ScriptFlags, flags_of

        flags = flags_of(read_script_file(Path(program)), words) if program.endswith(".py") else ScriptFlags()
        moved: list[str] = []
        rest: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            name = word.partition("=")[0]
            option = options.get(name)
            if option is None or (declared := flags.declares(word)) is True:
                rest.append(word)
                continue
            if declared is None:
                raise BadRequest(
                    f"{name} comes after {program}, and gpuwarden can't determine whether {program} has this option",
                    f"Put {name} before {program}, or `{_END}` before {program} if {name} belongs to the program.",
                )
            takes_next = not option.is_flag and "=" not in word
            moved += [word, *left[:takes_next]]
            left = left[takes_next:]
        return moved, rest


class RunsScript(RunsProgram):
    """A command whose WHAT argument is a script.py with its arguments, or one word such as a model's id."""

    def takes_words(self, program: str) -> bool:
        """Return whether the words after `program` are a script's arguments."""
        return program.endswith(".py")


def read_script_file(path: Path) -> str:
    """Return a script's text, with the package `gputrain` if the script imports it.

    Raises BadRequest if the file can't be read, is too large or is not UTF-8.
    """
    from gpuwarden.core.models import MAX_SCRIPT_BYTES
    from gpuwarden.lifecycle.submission.bundling import with_trainer_package

    try:
        with path.open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"the script {path} can't be read: {error.strerror}", "Check the path.") from error
    if len(content) > MAX_SCRIPT_BYTES:
        raise BadRequest(
            f"the script {path} is larger than {MAX_SCRIPT_BYTES:,} bytes", "Move data into separate files."
        )
    try:
        return with_trainer_package(content.decode("utf-8"), path.parent)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the script {path} is not UTF-8 (byte {error.start})", "Save it as UTF-8.") from error
