"""A user at a real terminal."""

from __future__ import annotations

from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.cli.approval import Terminal, ask
from gpuwarden.lifecycle.context import Context


class Typed(Terminal):
    """An in-process terminal, for tests that need no real one."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.shown = ""

    def say(self, text: str) -> None:
        self.shown += text + "\n"

    def ask(self, prompt: str) -> str:
        self.shown += prompt
        return self.answers.pop(0)

    secret = ask


async def typed(ctx: Context, ticket: str, *answers: str, without_proof: bool = False) -> tuple[str, str]:
    """Answer the prompts; return the code of the result and the output."""
    person = Typed(*answers)
    try:
        return (await ask(ctx, ticket, person, without_proof=without_proof)).code, person.shown
    except WardenError as error:
        return error.code, person.shown + error.message
