r"""Read shell text into simple commands with tree-sitter-bash; quotes, variables and plain substitutions are resolved.

The parser knows the syntax only. What a word says is put together here: quotes inside it, `$'...'` with codes, `$X`
that was set before, `$(which vastai)`. The tree is walked with a stack of its own, and everything is counted: a text
that needs more than `MOST_STEPS` raises `TooMuch`, for a guard that hangs is a guard that lets everything pass.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import tree_sitter
import tree_sitter_bash

if TYPE_CHECKING:
    from tree_sitter import Node, Tree

MOST_BYTES = 131_072
"""Linux runs no shell with a longer text: it is the limit of one argument."""
MOST_STEPS = 30_000
MOST_VALUE = 100_000
MOST_PARSE_S = 0.06
MOST_MARKS = 6_000
MOST_PIPES = 1_000
MOST_HEREDOCS = 300
"""The parser's time grows with the square of marks that it can't make sense of."""
DEEPEST = 40
_HEREDOC = re.compile(r"<<-?[ \t]*['\"\\]?(\w+)")
PRINTS = frozenset({"echo", "printf"})
FINDS = frozenset({"which", "command", "type", "whence"})
QUOTED_OUT = "$()"
"""Stands for the output of a command that is not known before it runs."""


class TooMuch(Exception):
    """The text is too long, too deep or too tangled to be read in time."""


class Budget:
    """Counts steps over all texts of one call. Raises TooMuch when they are spent."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps away."""
        self.left -= steps
        if self.left < 0:
            raise TooMuch("the command has too many parts to be read")


@dataclass
class Feed:
    """What a command gets from around it: texts on its standard input, and the files its output goes to."""

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
        """What the command plainly prints."""
        if self.name in PRINTS:
            return " ".join(self.words[1:])
        if self.name in FINDS and len(self.words) > 1:
            return self.words[-1]
        return "\n".join(self.stdin) if self.name in {"cat", "tee", "envsubst", "sort"} else ""


def name_of(word: str) -> str:
    """Return a program's name in lower case, without its folder."""
    return re.split(r"[\\/]", word)[-1].lower().removesuffix(".exe")


class Reader:
    """Read one text. `values` are the variables, which assignments in the text change; `broken`: it has errors."""

    def __init__(self, text: str, values: dict[str, str], budget: Budget, feed: Feed | None = None) -> None:
        self.data = text.replace("\r\n", "\n").replace("\\\n", "").replace("\x00", "").encode("utf-8", "replace")
        if len(self.data) > MOST_BYTES:
            raise TooMuch(f"the command is longer than {MOST_BYTES} bytes; put the text into a file")
        budget.spend(len(self.data) // 16)
        _check_marks(text)
        self.values, self.budget, self.feed = values, budget, feed or Feed()
        self.root = _parsed(self.data).root_node
        self.broken = self.root.has_error
        if self.root.descendant_count > MOST_STEPS:
            raise TooMuch("the command has too many parts to be read")

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
                parts = self._pipeline(node.named_children, feed)
            else:
                self._set(node, kind)
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
                found.stdin.append(self._said(child, depth))
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
                found.words += self.fields(child) if child.type != "variable_name" else [self._raw(child)]
        return found

    def _assignment(self, node: Node, depth: int = 0) -> tuple[str, str]:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        said = " ".join(self.fields(value, depth)) if value is not None else ""
        if len(said) > MOST_VALUE:
            raise TooMuch("the value of a variable is too long to be read")
        return (self._raw(name).partition("[")[0] if name is not None else "", said)

    def _set(self, node: Node, kind: str) -> None:
        """Set the variable of an assignment, or of a loop to its first value."""
        if kind == "variable_assignment":
            name, value = self._assignment(node)
            self.values[name] = value
        elif kind == "for_statement":
            variable, value_node = node.child_by_field_name("variable"), node.child_by_field_name("value")
            if variable is not None and value_node is not None:
                self.values[self._raw(variable)] = " ".join(self.fields(value_node))

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
                own.stdin.append(self._raw(child))
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
                found.stdin.append(self._said(child, depth))
        found.fed |= "<" in operator

    def _pipeline(self, stages: list[Node], feed: Feed) -> list[tuple[Node, Feed]]:
        """Return the stages of a pipeline; each is fed what the one before it plainly prints."""
        parts = [(stages[0], feed)] if stages else []
        for before, stage in pairwise(stages):
            parts.append((stage, Feed((self._said_by(before, Feed()),), (), True)))
        return parts

    def _said_by(self, node: Node, feed: Feed) -> str:
        """Return what a statement plainly prints: it is one command, or some in brackets."""
        if node.type == "redirected_statement":
            own = Command()
            for child in node.named_children:
                if child.type == "heredoc_redirect":
                    self._heredoc(child, own, [])
            body = node.child_by_field_name("body")
            return self._said_by(body, Feed(tuple(own.stdin))) if body is not None else ""
        return self.command(node, feed, 1).printed() if node.type == "command" else self._said(node, 1)

    def _said(self, node: Node, depth: int) -> str:
        """Return what the commands directly below a node plainly print."""
        self._deeper(depth)
        found = []
        for child in node.named_children[:50]:
            if child.type == "command":
                found.append(self.command(child, Feed(), depth + 1).printed())
            elif child.type == "redirected_statement":
                found.append(self._said_by(child, Feed()))
            elif child.type == "file_redirect":
                found.append(QUOTED_OUT)
        return "\n".join(text for text in found if text)

    def _deeper(self, depth: int) -> None:
        self.budget.spend()
        if depth > DEEPEST:
            raise TooMuch("the command is nested too deep to be read")

    def _raw(self, node: Node) -> str:
        return self.data[node.start_byte : node.end_byte].decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------------------------- words

    def fields(self, node: Node, depth: int = 0) -> list[str]:
        """Return the words that one word of the text becomes: several where an unquoted variable holds several."""
        self._deeper(depth)
        kind = node.type
        if kind in {"simple_expansion", "expansion", "command_substitution"}:
            return self._value(node, depth).split() or []
        if kind == "array":
            return [word for child in node.named_children for word in self.fields(child, depth + 1)]
        if kind == "string" and node.named_child_count == 1 and self._raw(node).endswith('[@]}"'):
            return self._value(node.named_children[0], depth).split()
        if kind != "concatenation":
            return [self._text(node, depth)]
        words = [""]
        for child in node.children:
            first, *rest = self.fields(child, depth + 1) or [""]
            words[-1] += first
            words += rest
        return words

    def _text(self, node: Node, depth: int) -> str:
        """Return what a word without unquoted variables says."""
        raw, kind = self._raw(node), node.type
        if kind == "raw_string":
            return raw[1:-1]
        if kind == "ansi_c_string":
            return re.sub(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", _escape, raw[2:-1], flags=re.DOTALL)
        if kind in {"string", "translated_string"}:
            return self._double(node, depth)
        return re.sub(r"\\(.)", r"\1", raw, flags=re.DOTALL) if kind == "word" else raw

    def _double(self, node: Node, depth: int) -> str:
        """Return what a text in double quotes says; the parser leaves out blanks beside expansions."""
        self._deeper(depth)
        found, at = [], node.start_byte
        for child in node.named_children:
            found.append(self.data[at : child.start_byte].decode("utf-8", "replace"))
            if child.type == "string_content":
                found.append(re.sub(r'\\(["\\$`])', r"\1", self._raw(child)))
            else:
                found.append(
                    self._double(child, depth + 1) if child.type == "string" else self._value(child, depth + 1)
                )
            at = child.end_byte
        found.append(self.data[at : node.end_byte].decode("utf-8", "replace"))
        whole = "".join(found).removeprefix("$")
        return whole[1:-1] if len(whole) > 1 and whole[0] == whole[-1] == '"' else whole.strip('"')

    def _value(self, node: Node, depth: int) -> str:
        """Return the value of `$X`, `${X:-word}` or `$(...)`; the text itself when it is not known."""
        self._deeper(depth)
        raw = self._raw(node)
        if node.type == "command_substitution":
            return self._said(node, depth + 1) or QUOTED_OUT
        name = re.match(r"\$\{?[!#]?(\w+|[@*#?$!-])", raw)
        known = self.values.get(name[1]) if name else None
        if known is not None:
            self.budget.spend(len(known) // 32)
            return known
        if node.type == "expansion" and re.match(r"\$\{\w+:?[-=]", raw) and node.named_child_count > 1:
            return " ".join(self.fields(node.named_children[-1], depth + 1))
        return raw


def _parsed(data: bytes) -> Tree:
    """Parse a text. Raises TooMuch when the parser needs too long, counted in its own time on the processor."""
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    end = time.process_time() + MOST_PARSE_S
    try:
        return parser.parse(
            lambda at, _: data[at : at + 4096], progress_callback=lambda _at, _error: time.process_time() > end
        )
    except ValueError as error:
        raise TooMuch("the command is too tangled to be read") from error


def _check_marks(text: str) -> None:
    """Raise TooMuch when a text has more marks of the shell, outside here-documents, than any command needs."""
    end, outside = "", []
    for line in text.split("\n"):
        if not end:
            outside.append(line)
            found = _HEREDOC.search(line)
            end = found[1] if found else ""
        elif line.strip() == end:
            end = ""
    kept = "\n".join(outside)
    if (
        kept.count("|") > MOST_PIPES
        or text.count("<<") > MOST_HEREDOCS
        or sum(map(kept.count, "|&;<>(){}$`=")) > MOST_MARKS
    ):
        raise TooMuch("the command has too many marks of the shell to be read")


def _inside(command: Node) -> list[Node]:
    """Return the parts of a command that can hold further commands; a plain word can't."""
    found = []
    for child in command.named_children:
        if child.type == "variable_assignment":
            found += [c for c in child.named_children if c.named_child_count]
        elif child.named_child_count:
            found.append(child)
    return found


def _escape(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(int(code, 8) & 255) if code[0] in "01234567" else {"n": "\n", "t": "\t", "r": "\r"}.get(code, code)
