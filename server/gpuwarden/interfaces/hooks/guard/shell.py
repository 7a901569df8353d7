"""Read shell text into simple commands with tree-sitter-bash.

The parser knows the syntax only; `words` puts together what a word says. The tree is walked without recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.interfaces.hooks.guard.limits import MOST_VALUE, Budget, TooMuch
from gpuwarden.interfaces.hooks.guard.words import QUOTED_OUT, Words

if TYPE_CHECKING:
    from tree_sitter import Node

PRINTS = frozenset({"echo", "printf"})
FINDS = frozenset({"which", "command", "type", "whence"})


@dataclass
class Feed:
    """Surroundings of a command: texts on its standard input, and the files its output goes to."""

    stdin: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    fed: bool = False

    def only_input(self) -> Feed:
        """Return the feed of a part: output is judged once, for the whole."""
        return Feed(self.stdin, (), self.fed)


@dataclass
class Command:
    """One simple command. `fed`: its standard input is a pipe, a file or a text."""

    words: list[str] = field(default_factory=list)
    assigned: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    fed: bool = False

    @property
    def name(self) -> str:
        """The program's name, without its folder."""
        return name_of(self.words[0]) if self.words else ""

    def printed(self) -> str:
        """Return what the command plainly prints."""
        if self.name in PRINTS:
            return " ".join(self.words[1:])
        if self.name in FINDS and len(self.words) > 1:
            return self.words[-1]
        return "\n".join(self.stdin) if self.name in {"cat", "tee", "envsubst", "sort"} else ""


def name_of(word: str) -> str:
    """Return a program's name in lower case, without its folder."""
    return re.split(r"[\\/]", word)[-1].lower().removesuffix(".exe")


class Reader(Words):
    """Read one text command by command; assignments in it change `values`."""

    def __init__(self, text: str, values: dict[str, str], budget: Budget, feed: Feed | None = None) -> None:
        super().__init__(text, values, budget)
        self.feed = feed or Feed()

    def commands(self) -> Iterator[Command]:
        """Yield the simple commands in the order of the text, those inside substitutions after the one around them."""
        stack: list[tuple[Node, Feed]] = [(self.root, self.feed)]
        while stack:
            node, feed = stack.pop()
            self.budget.spend()
            kind = node.type
            parts: list[tuple[Node, Feed]]
            if kind == "command":
                command = self.command(node, feed)
                yield command
                parts = [(child, Feed()) for child in _inside(node)]
            elif kind in {"declaration_command", "unset_command"}:
                yield self._declaration(node, feed)
                parts = [(child, Feed()) for child in _inside(node)]
            elif kind == "redirected_statement":
                parts, whole = self._redirected(node, feed)
                if whole.targets:
                    yield whole
            elif kind == "pipeline":
                stages = node.named_children
                # Each stage is fed what the one before it plainly prints.
                fed = [Feed((self._said_by(before, Feed()),), (), True) for before in stages[:-1]]
                parts = list(zip(stages, [feed, *fed], strict=False))
            else:
                # An assignment sets its variable, and a loop sets its own to the first value.
                variable, first = node.child_by_field_name("variable"), node.child_by_field_name("value")
                if kind == "variable_assignment":
                    name, value = self._assignment(node)
                    self.values[name] = value
                elif kind == "for_statement" and variable is not None and first is not None:
                    self.values[self.raw(variable)] = " ".join(self.fields(first))
                parts = [(child, feed) for child in node.named_children]
            stack.extend(reversed(parts))

    def command(self, node: Node, feed: Feed, depth: int = 0) -> Command:
        """Put one simple command together."""
        found = Command(targets=list(feed.targets), stdin=list(feed.stdin), fed=feed.fed)
        for child in node.named_children:
            kind = child.type
            if kind == "variable_assignment":
                found.assigned.append(self._assignment(child, depth))
            elif kind == "herestring_redirect":
                found.stdin += [" ".join(self.fields(c, depth)) for c in child.named_children]
                found.fed = True
            elif kind == "file_redirect":
                self._file(child, found, depth)
            elif kind == "process_substitution":
                found.stdin.append(self.said(child, depth))
                found.words.append("<()")
            else:
                inner = child.named_children[0] if kind == "command_name" and child.named_children else child
                found.words += self.fields(inner, depth)
        return found

    def _declaration(self, node: Node, feed: Feed) -> Command:
        """Return `export A=1` as a command, and set its variables."""
        keyword = node.children[0].type if node.children else "export"
        found = Command([keyword], targets=list(feed.targets))
        for child in node.named_children:
            if child.type == "variable_assignment":
                name, value = self._assignment(child)
                self.values[name] = value
                found.words.append(f"{name}={value}")
            else:
                found.words += self.fields(child) if child.type != "variable_name" else [self.raw(child)]
        return found

    def _assignment(self, node: Node, depth: int = 0) -> tuple[str, str]:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        said = " ".join(self.fields(value, depth)) if value is not None else ""
        if len(said) > MOST_VALUE:
            raise TooMuch("the value of a variable is too long to be read")
        return (self.raw(name).partition("[")[0] if name is not None else "", said)

    def _redirected(self, node: Node, feed: Feed) -> tuple[list[tuple[Node, Feed]], Command]:
        """Return the parts of a statement with redirections, and the redirections that are judged on their own."""
        body, own = node.child_by_field_name("body"), Command(stdin=list(feed.stdin), fed=feed.fed)
        later: list[tuple[Node, Feed]] = []
        piped: list[Node] = []
        for child in node.named_children:
            if child == body:
                continue
            if child.type == "heredoc_redirect":
                piped += self._heredoc(child, own, later)
            elif child.type in {"file_redirect", "ERROR"}:
                self._file(child, own, 0)
            elif child.type == "herestring_redirect":
                own.stdin += [" ".join(self.fields(c)) for c in child.named_children]
                own.fed = True
            later += [(c, Feed()) for c in child.named_children if child.type != "heredoc_redirect"]
        simple = body is not None and body.type == "command"
        inner = Feed(tuple(own.stdin), tuple(own.targets) if simple else (), own.fed)
        parts = [(body, inner)] if body is not None else []
        said = self._said_by(body, inner) if body is not None and piped else ""
        parts += [(stage, Feed((said,), (), True)) for stage in piped]
        return parts + later, Command(targets=[] if simple else own.targets, stdin=own.stdin)

    def _heredoc(self, node: Node, own: Command, later: list[tuple[Node, Feed]]) -> list[Node]:
        """Read a here-document into `own`. Return the commands that the statement is piped into."""
        piped: list[Node] = []
        for child in node.named_children:
            if child.type == "heredoc_body":
                own.stdin.append(self.raw(child))
                own.fed = True
                later.append((child, Feed()))
            elif child.type == "file_redirect":
                self._file(child, own, 0)
            elif child.type == "pipeline":
                piped += child.named_children
            elif child.type not in {"heredoc_start", "heredoc_end"}:
                later.append((child, Feed()))
        return piped

    def _file(self, node: Node, found: Command, depth: int) -> None:
        """Read `> FILE` or `< FILE`."""
        operator = next((c.type for c in node.children if not c.is_named), "")
        for child in node.named_children:
            if child.type != "file_descriptor" and ">" in operator and operator != ">&":
                found.targets += self.fields(child, depth)
            if child.type == "process_substitution":
                found.stdin.append(self.said(child, depth))
        found.fed |= "<" in operator

    def _said_by(self, node: Node, feed: Feed) -> str:
        """Return what a statement plainly prints: it is one command, or some in brackets."""
        if node.type == "redirected_statement":
            own = Command()
            for child in node.named_children:
                if child.type == "heredoc_redirect":
                    self._heredoc(child, own, [])
            body = node.child_by_field_name("body")
            return self._said_by(body, Feed(tuple(own.stdin))) if body is not None else ""
        return self.command(node, feed, 1).printed() if node.type == "command" else self.said(node, 1)

    def said(self, node: Node, depth: int) -> str:
        """Return what the commands directly below a node plainly print."""
        self.deeper(depth)
        found = []
        for child in node.named_children[:50]:
            if child.type == "command":
                found.append(self.command(child, Feed(), depth + 1).printed())
            elif child.type == "redirected_statement":
                found.append(self._said_by(child, Feed()))
            elif child.type == "file_redirect":
                found.append(QUOTED_OUT)
        return "\n".join(text for text in found if text)


def _inside(command: Node) -> list[Node]:
    """Return the parts of a command that can contain further commands; a plain word can't."""
    found = []
    for child in command.named_children:
        if child.type == "variable_assignment":
            found += [c for c in child.named_children if c.named_child_count]
        elif child.named_child_count:
            found.append(child)
    return found
