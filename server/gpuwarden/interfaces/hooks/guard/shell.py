"""Split shell text into simple commands with tree-sitter-bash.

The parser knows only the syntax; `words` resolves the value of each word. The tree is walked without recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.interfaces.hooks.guard.limits import MOST_VALUE, Budget, TooMuch
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, name_of, printed
from gpuwarden.interfaces.hooks.guard.words import Words

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROUNDS: Final = 40
"""Maximum number of loop words or lines that are checked one by one; a longer loop is checked once with all of them.
"""
MOST_ALL_ROUNDS: Final = 200
APART: Final = frozenset({"subshell", "command_substitution", "process_substitution"})
"""Nodes that run in a subshell. Changes to the working directory end with the subshell."""
_GROUPS: Final = frozenset({"list", "pipeline", "negated_command"})


@dataclass(frozen=True)
class Feed:
    """Input and output of a command: the texts on its standard input, and the files that receive its output."""

    stdin: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    fed: bool = False

    def and_(self, other: Feed) -> Feed:
        """Return the combined input and output of two feeds."""
        return Feed(self.stdin + other.stdin, self.targets + other.targets, self.fed or other.fed)


@dataclass
class Command:
    """A simple command. `fed`: the standard input is a pipe, a file or literal text."""

    words: list[str] = field(default_factory=list)
    assigned: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    fed: bool = False

    @property
    def name(self) -> str:
        """Return the program's name, without its folder."""
        return name_of(self.words[0]) if self.words else ""

    @property
    def feed(self) -> Feed:
        """Return the command's input and output."""
        return Feed(tuple(self.stdin), tuple(self.targets), self.fed)


Part = tuple["Node | tuple[str, str]", Feed]
"""A node to walk, or a variable to set before the next part."""


class Reader(Words):
    """Read shell text command by command. Assignments change `values`; its keys `NAME()` contain functions' bodies."""

    def __init__(self, text: str, values: dict[str, str], budget: Budget, feed: Feed | None = None) -> None:
        super().__init__(text, values, budget)
        self.feed = feed or Feed()
        self.rounds = 0

    def commands(self) -> Iterator[Command]:
        """Yield the simple commands in text order. A substitution follows the command that contains it."""
        stack: list[Part] = [(self.root, self.feed)]
        while stack:
            node, feed = stack.pop()
            self.budget.spend()
            if isinstance(node, tuple):
                self.values[node[0]] = node[1]
                continue
            kind = node.type
            parts: list[Part]
            if kind in {"command", "declaration_command", "unset_command"}:
                own = self._own(node) if kind == "command" else {}
                self.values.update(own)
                found = self.command(node, feed) if kind == "command" else self._declaration(node, feed)
                if found.name == "read":
                    self._read(found)
                elif found.name == "printf":
                    self._print_to(found.words)
                yield found
                for name in own:
                    self.values.pop(name, None)
                parts = [(child, Feed()) for child in _inside(node)]
            elif kind in {"redirected_statement", "function_definition", "file_redirect"}:
                parts, whole = self._redirected(node, feed)
                if whole.targets:
                    yield whole
            else:
                parts = self._parts(node, feed)
            stack.extend(reversed(parts))

    def _parts(self, node: Node, feed: Feed) -> list[Part]:
        """Return the parts of a compound statement in execution order."""
        kind, inner = node.type, node.named_children
        if kind == "pipeline":
            return [*self._stages(inner, feed)]
        if kind == "for_statement":
            return self._loop(node, feed)
        if kind == "while_statement" and len(lines := "\n".join(feed.stdin).splitlines()) > 1:
            few = lines if self._may_repeat(len(lines)) else ["\n".join(lines)]
            return [(child, Feed((line,), feed.targets, True)) for line in few for child in inner]
        if kind == "variable_assignment":
            name, value = self._assignment(node)
            self.values[name] = value
        back: list[Part] = [(("PWD", self.values["PWD"]), Feed())] if kind in APART and "PWD" in self.values else []
        return [*((child, feed) for child in inner), *back]

    def _own(self, node: Node) -> dict[str, str]:
        """Return the variables that are set for this command only, as in `A=1 command`."""
        given = dict(self._assignment(c) for c in node.named_children if c.type == "variable_assignment")
        return {name: value for name, value in given.items() if name not in self.values}

    def command(self, node: Node, feed: Feed, depth: int = 0) -> Command:
        """Return the simple command that a node represents."""
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
                found.stdin.append(self.printed(child, depth))
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
        text = " ".join(self.fields(value, depth)) if value is not None else ""
        return (self.raw(name).partition("[")[0] if name is not None else "", self._short(text))

    @staticmethod
    def _short(text: str) -> str:
        """Return a variable's value. Raises TooMuch if it is too long."""
        if len(text) > MOST_VALUE:
            raise TooMuch("a variable's value is too long to check")
        return text

    def _read(self, command: Command) -> None:
        """Set the variables that `read` assigns from its input. The last variable gets the rest of each line."""
        names = [w for w in command.words[1:] if re.fullmatch(r"[A-Za-z_]\w*", w)] or ["REPLY"]
        rows = [line.split(None, len(names) - 1) for text in command.stdin for line in text.splitlines()]
        for at, name in enumerate(names):
            self.values[name] = "\n".join(row[at] for row in rows if at < len(row)) or f"{UNKNOWN}${name}"

    def _print_to(self, words: list[str]) -> None:
        """Set the variable of `printf -v NAME FORMAT ...`, if one is given."""
        at = 2 if words[1:2] == ["-v"] else 1
        name = re.fullmatch(r"(?:-v)?([A-Za-z_]\w*)", "".join(words[at : at + 1]))
        if name and (at == 2 or words[1].startswith("-v")):
            self.values[name[1]] = self._short(printed(["printf", *words[at + 1 :]], (), "."))

    # ------------------------------------------------------------------------------------------- groups of commands

    def _may_repeat(self, times: int) -> bool:
        """Count a loop's iterations. Return whether each of them may be checked separately."""
        self.rounds += times
        return times <= MOST_ROUNDS and self.rounds <= MOST_ALL_ROUNDS

    def _loop(self, node: Node, feed: Feed) -> list[Part]:
        """Return the parts of a `for` or `select` loop, repeated for each word in its list."""
        variable, given = node.child_by_field_name("variable"), node.children_by_field_name("value")
        inner: list[Part] = [(value, Feed()) for value in given]
        body: list[Part] = [(c, feed) for c in node.named_children if c not in given and c != variable]
        words = [word for value in given for word in self.fields(value)]
        if variable is None or not words:
            return inner + body
        few = words if self._may_repeat(len(words)) else ["\n".join(words)]
        return inner + [part for word in few for part in (((self.raw(variable), word), Feed()), *body)]

    def _stages(self, stages: list[Node], feed: Feed) -> list[tuple[Node, Feed]]:
        """Return the stages of a pipeline; the input of each stage is the output of the previous stage."""
        parts = []
        fed = Feed(feed.stdin, (), feed.fed)
        for stage in stages[:-1]:
            parts.append((stage, fed))
            fed = Feed((self._output_of(stage, fed, 1),), (), True)
        return [*parts, *((stage, fed.and_(Feed((), feed.targets))) for stage in stages[-1:])]

    def _function(self, node: Node) -> tuple[list[Part], Command]:
        """Store a function's body for later calls. Return the body's parts and the function's redirections."""
        name, body, own = node.child_by_field_name("name"), node.child_by_field_name("body"), Command()
        if name is None or body is None:
            return [(child, Feed()) for child in node.named_children], own
        self.values[f"{self.raw(name)}()"] = self._text(body.start_byte, node.end_byte)
        later: list[Part] = []
        for child in node.named_children:
            if child.type == "file_redirect":
                self._file(child, own, 0)
                later += [(c, Feed()) for c in child.named_children]
        return [(body, Feed()), *later], own

    def _redirected(self, node: Node, feed: Feed) -> tuple[list[Part], Command]:
        """Return the parts of a statement with redirections, and the redirections outside simple commands.

        The parser attaches the redirection of `a && b > FILE` to both commands, but the shell applies it only to the
        last command.
        """
        if node.type == "function_definition":
            return self._function(node)
        body, own = node.child_by_field_name("body"), Command()
        if node.type == "file_redirect":  # `$(> FILE)`
            self._file(node, own, 0)
            return [(child, Feed()) for child in node.named_children], own
        later: list[Part] = []
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
        if body is None:
            return later, own
        parts: list[Part] = []
        last, outer, inner = body, feed, feed.and_(own.feed)
        while last.type in _GROUPS and last.named_children:
            if last.type == "pipeline":
                *before, (tail, fed) = self._stages(last.named_children, outer)
                parts += before
                last, outer, inner = tail, fed, fed.and_(own.feed)
            else:
                parts += [(child, outer) for child in last.named_children[:-1]]
                last = last.named_children[-1]
        if piped:
            later += self._stages(piped, Feed((self._output_of(last, inner, 1),), feed.targets, True))
            inner = Feed(inner.stdin, tuple(own.targets), inner.fed)
        simple = last.type in {"command", "declaration_command", "unset_command"}
        return [*parts, (last, inner), *later], Command(targets=[] if simple else own.targets)

    def _heredoc(self, node: Node, own: Command, later: list[Part]) -> list[Node]:
        """Add a here-document's text to `own`. Return the commands into which the statement's output is piped."""
        piped: list[Node] = []
        for child in node.named_children:
            if child.type == "heredoc_body":
                own.stdin.append(self.expanded(child))
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
        """Add the redirection `> FILE` or `< FILE` to a command."""
        operator = next((c.type for c in node.children if not c.is_named), "")
        for child in node.named_children:
            if child.type != "file_descriptor" and ">" in operator:
                words = self.fields(child, depth)
                found.targets += words if operator != ">&" else [w for w in words if not re.fullmatch(r"\d*-?", w)]
            if child.type == "process_substitution":
                found.stdin.append(self.printed(child, depth))
        found.fed |= "<" in operator

    # -------------------------------------------------------------------------------------------------------- output

    def _output_of(self, node: Node, feed: Feed, depth: int) -> str:
        """Return a statement's output."""
        self.deeper(depth)
        if node.type == "command":
            found = self.command(node, feed, depth + 1)
            return printed(found.words, found.stdin, self.values.get("PWD", "."))
        if node.type == "pipeline":
            for stage in node.named_children:
                feed = Feed((self._output_of(stage, feed, depth + 1),), (), True)
            return "\n".join(feed.stdin)
        if node.type == "redirected_statement":
            own = Command()
            for child in node.named_children:
                if child.type == "heredoc_redirect":
                    self._heredoc(child, own, [])
                elif child.type == "herestring_redirect":
                    own.stdin += [" ".join(self.fields(c, depth)) for c in child.named_children]
            body = node.child_by_field_name("body")
            return self._output_of(body, feed.and_(own.feed), depth + 1) if body is not None else f"{UNKNOWN}$()"
        return self.printed(node, depth, feed)

    def printed(self, node: Node, depth: int, feed: Feed | None = None) -> str:
        """Return the output of the commands under a node."""
        self.deeper(depth)
        known = {"command", "redirected_statement", "pipeline", "list", "subshell", "compound_statement"}
        found = []
        for child in node.named_children[:50]:
            if child.type in known:
                found.append(self._output_of(child, feed or Feed(), depth + 1))
            elif child.type not in {"comment", "variable_assignment", "declaration_command"}:
                found.append(f"{UNKNOWN}$()")
        return "\n".join(text for text in found if text)


def _inside(command: Node) -> list[Node]:
    """Return the parts of a command that can contain further commands; plain words are omitted."""
    found = []
    for child in command.named_children:
        if child.type == "variable_assignment":
            found += [c for c in child.named_children if c.named_child_count]
        elif child.named_child_count:
            found.append(child)
    return found
