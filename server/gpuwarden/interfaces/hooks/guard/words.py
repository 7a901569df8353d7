"""Resolve a shell word's value: quotes, known variables, and commands with predictable output."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gpuwarden.interfaces.hooks.guard.limits import (
    DEEPEST,
    MOST_BYTES,
    Budget,
    TooMuch,
    check_marks,
    parsed,
)
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, among, as_written
from gpuwarden.interfaces.hooks.guard.reach import MOST_SPELLINGS, braced

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBERS = frozenset({"RANDOM", "UID", "EUID", "PPID", "SECONDS", "LINENO", "HOSTNAME", "USER", "LOGNAME"})
"""Variables whose value is not a path."""
MOST_STRIPPED = 500


class Words:
    """A parsed command text and its words. `values` maps variables to values. `broken`: the text has syntax errors."""

    def __init__(self, text: str, values: dict[str, str], budget: Budget) -> None:
        text = as_written(text).replace("\r\n", "\n").replace("\\\n", "").replace("\x00", "")
        self.data = text.encode("utf-8", "replace")
        if len(self.data) > MOST_BYTES:
            raise TooMuch(f"the command is longer than {MOST_BYTES} bytes; put the text in a file")
        budget.spend(len(self.data) // 16)
        check_marks(self.data.decode("utf-8"))
        self.values, self.budget = values, budget
        self.root = parsed(self.data).root_node
        self.broken = self.root.has_error
        budget.spend(self.root.descendant_count // 2)

    def printed(self, node: Node, depth: int) -> str:
        """Return the output of the commands directly under a node. `Reader` implements this."""
        raise NotImplementedError

    def deeper(self, depth: int) -> None:
        """Count one step. Raises TooMuch if `depth` exceeds the limit."""
        self.budget.spend()
        if depth > DEEPEST:
            raise TooMuch("the command is nested too deeply to check")

    def raw(self, node: Node) -> str:
        """Return a node's source text."""
        return self._text(node.start_byte, node.end_byte)

    def fields(self, node: Node, depth: int = 0) -> list[str]:
        """Return the words to which one word in the text expands. An unquoted variable may expand to several words."""
        self.deeper(depth)
        kind = node.type
        if kind in {"simple_expansion", "expansion", "command_substitution"}:
            return self._value(node, depth).split() or []
        if kind == "array":
            return [word for child in node.named_children for word in self.fields(child, depth + 1)]
        if kind == "string" and node.named_child_count == 1:
            if self.raw(node) in {'"$@"', '"${@}"'} and "@" in self.values:
                return self.values["@"].split("\x1f")
            if self.raw(node).endswith('[@]}"'):
                return self._value(node.named_children[0], depth).split()
        if kind == "concatenation":
            words = [""]
            for child in node.children:
                first, *rest = self.fields(child, depth + 1) or [""]
                words[-1] += first
                words += rest
            unquoted = "".join(self.raw(c) for c in node.children if c.type == "word")
            return self._braced(words) if {"{", ",", "}"} <= set(re.sub(r"\\.", "", unquoted)) else words
        if kind in {"string", "translated_string"}:
            return [self._double(node, depth)]
        raw = self.raw(node)
        if kind == "raw_string":
            return [raw[1:-1]]
        if kind == "ansi_c_string":
            code = r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)"
            return [re.sub(code, _escape, raw[2:-1], flags=re.DOTALL)]
        return [re.sub(r"\\(.)", r"\1", raw, flags=re.DOTALL) if kind == "word" else raw]

    def _braced(self, words: list[str]) -> list[str]:
        """Return the brace expansions of the words. If words are omitted, the original word is added.

        The braces in a path, such as `~/{a,b}`, are kept for `reach`, because a copy needs its target in one word.
        """
        found = [(word, [word] if "/" in word.partition("{")[0] else braced(word)) for word in words]
        words = [w for word, each in found for w in (each if len(each) <= MOST_SPELLINGS else [*each, word])]
        self.budget.spend(len(words) + sum(map(len, words)) // 64)
        return words

    def _double(self, node: Node, depth: int) -> str:
        """Return the value of double-quoted text, including the blanks next to expansions, which the parser omits."""
        self.deeper(depth)
        found, at = [], node.start_byte
        for child in node.named_children:
            found.append(self._text(at, child.start_byte))
            if child.type == "string_content":
                found.append(re.sub(r'\\(["\\$`])', r"\1", self.raw(child)))
            else:
                found.append(
                    self._double(child, depth + 1) if child.type == "string" else self._value(child, depth + 1)
                )
            at = child.end_byte
        found.append(self._text(at, node.end_byte))
        whole = "".join(found).removeprefix("$")
        return whole[1:-1] if len(whole) > 1 and whole[0] == whole[-1] == '"' else whole.strip('"')

    def _value(self, node: Node, depth: int) -> str:
        """Return the value of `$X`, `${X:-word}` or `$(...)`; for an unknown value, UNKNOWN and the source text."""
        self.deeper(depth)
        raw = self.raw(node)
        if node.type == "command_substitution":
            elsewhere = "pwd" in raw and re.search(r"\b(?:cd|pushd)\b", raw)
            return UNKNOWN + "$()" if elsewhere else self.printed(node, depth + 1)
        name = re.match(r"\$\{?[!#]?(\w+|[@*#?$!-])", raw)
        known = self.values.get(name[1]) if name else None
        if known is not None:
            self.budget.spend(len(known) if "%" in raw or "#" in raw else len(known) // 32)
            return _stripped(known, raw).replace("\x1f", " ")
        if node.type == "expansion" and re.match(r"\$\{\w+:?[-=]", raw) and node.named_child_count > 1:
            return " ".join(self.fields(node.named_children[-1], depth + 1))
        if name is None or name[1][0] in "@*#?$!-0123456789":
            return raw  # a function's or script's arguments are known only when it is called
        return among(["*"]) if name[1] in _NUMBERS else UNKNOWN + raw

    def expanded(self, node: Node, depth: int = 0) -> str:
        """Return a here-document's text with its expansions replaced by their values."""
        found, at = [], node.start_byte
        for child in node.named_children:
            if child.type in {"simple_expansion", "expansion", "command_substitution"}:
                found += [self._text(at, child.start_byte), self._value(child, depth + 1)]
                at = child.end_byte
        return "".join([*found, self._text(at, node.end_byte)])

    def _text(self, start: int, end: int) -> str:
        return self.data[start:end].decode("utf-8", "replace")


def _stripped(value: str, raw: str) -> str:
    """Return a value without the prefix or suffix that `${X#prefix}` or `${X%suffix}` removes."""
    found = re.fullmatch(r"\$\{\w+(%%?|##?)([^}]*)\}", raw)
    if found is None or len(value) > MOST_STRIPPED or len(found[2]) > MOST_STRIPPED:
        return value
    mark, pattern = found.groups()
    places = range(len(value) + 1) if mark in {"%%", "#"} else range(len(value), -1, -1)
    for at in places:
        if fnmatchcase(value[at:] if mark[0] == "%" else value[:at], pattern):
            return value[:at] if mark[0] == "%" else value[at:]
    return value


def _escape(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(int(code, 8) & 255) if code[0] in "01234567" else {"n": "\n", "t": "\t", "r": "\r"}.get(code, code)
