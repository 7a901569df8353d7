"""Split Python source into tokens as Python 3.12 and later do: an f-string is a tree whose fields contain tokens.

In Python 3.11, `tokenize` reads an f-string as a single token, which ends at the first inner quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

MOST_NESTED: Final = 50
"""Maximum nesting depth of f-strings inside f-strings; Python's own limit is 150."""
MOST_SPECS: Final = 2
"""Maximum number of nested format specs around a field, as in `{a:{b:{c}}}`."""
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f\ufeff]+|\\(?:\r\n|\r|\n)|\#[^\r\n]*)
    |(?P<line>\r\n|\r|\n)
    |(?P<prefix>[bBfFrRtTuU]{0,2})(?P<quote>'''|\"\"\"|'|\")
    |(?P<number>\.?[0-9][\w.]*)
    |(?P<name>[\w\u0080-\U0010ffff]+)
    |(?P<mark>!=|.)""",
    re.VERBOSE | re.DOTALL,
)

_RAW_ESCAPE = re.compile(r"\\(?![{}])(?:\r\n|.)", re.DOTALL)
_ESCAPE = re.compile(r"\\N\{[^}\r\n]*\}|" + _RAW_ESCAPE.pattern, re.DOTALL)
_CODE_END = re.compile(r"[}:]|!(?!=)")


class Kind(Enum):
    """A token's kind. NEWLINE ends a statement; line breaks in brackets are not tokens."""

    NAME = auto()
    NUMBER = auto()
    STRING = auto()
    MARK = auto()
    NEWLINE = auto()


@dataclass(frozen=True)
class Token:
    """One token in the source, from `start` up to `end`."""

    kind: Kind
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Field:
    """A replacement field in an f-string: `{code!conversion:spec}`, from `start` up to `end`.

    The code ends at `code_end`. The conversion ends at `spec_start`, the position of the colon before a spec.
    """

    start: int
    code_end: int
    spec_start: int
    end: int
    tokens: tuple[Token, ...]
    spec: tuple[Field, ...]
    comments: bool


@dataclass(frozen=True)
class Text(Token):
    """A string literal. `quote` is its delimiter; `fields` lists the replacement fields in an f- or t-string."""

    prefix: str = ""
    quote: str = ""
    fields: tuple[Field, ...] = field(default=())


def tokens_of(source: str) -> tuple[Token, ...]:
    """Return a program's tokens. Raises SyntaxError for an unterminated string literal."""
    return tuple(_Lexer(source).tokens())


def line_of(source: str, at: int) -> int:
    """Return the line number of a position, counting lines as Python does."""
    before = source[:at]
    return 1 + before.count("\n") + before.count("\r") - before.count("\r\n")


def failure(source: str, at: int, message: str) -> SyntaxError:
    """Return a SyntaxError for one position in a program."""
    error = SyntaxError(message)
    error.lineno = line_of(source, at)
    return error


class _Lexer:
    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.level = 0
        self.comments = 0

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens from the current position to the end of the program."""
        depth = 0
        while self.at < len(self.source):
            found = self.token()
            if found is None:
                continue
            if found.kind is Kind.MARK:
                depth += (found.text in _OPEN) - (found.text in _CLOSE)
            if found.kind is not Kind.NEWLINE or depth <= 0:
                yield found

    def token(self) -> Token | None:
        """Return the next token; None for white space and comments."""
        match = _TOKEN.match(self.source, self.at)
        assert match is not None  # the pattern for marks matches any character
        start, self.at = self.at, match.end()
        if match["quote"]:
            return self.string(start, match["prefix"].lower(), match["quote"])
        if match["blank"] is not None:
            self.comments += match["blank"].startswith("#")
            return None
        names = {"line": Kind.NEWLINE, "number": Kind.NUMBER, "name": Kind.NAME, "mark": Kind.MARK}
        return Token(names[str(match.lastgroup)], match[0], start, self.at)

    def string(self, start: int, prefix: str, quote: str) -> Text:
        """Return the string literal whose opening quote has just been read."""
        formatted = "f" in prefix or "t" in prefix
        self.level += formatted
        if self.level > MOST_NESTED:
            raise failure(self.source, start, "f-string: too many nested f-strings")
        fields = tuple(self.fields(start, quote, formatted=formatted, raw="r" in prefix))
        self.at += len(quote)
        self.level -= formatted
        return Text(Kind.STRING, self.source[start : self.at], start, self.at, prefix, quote, fields)

    def fields(self, start: int, quote: str, *, formatted: bool, raw: bool, spec: int = 0) -> Iterator[Field]:
        """Read literal text up to the quote that ends it, or the brace that ends a spec, and yield its fields.

        `spec` is the number of format specs around the text.
        """
        source = self.source
        while not source.startswith(quote, self.at):
            here = source[self.at : self.at + 1]
            if not here or (here in "\r\n" and len(quote) == 1):
                raise failure(source, start, f"unterminated {'f-string' if formatted else 'string'} literal")
            if here == "\\":
                escape = (_RAW_ESCAPE if raw else _ESCAPE).match(source, self.at)
                self.at = escape.end() if escape else self.at + 1
            elif formatted and here == "{" and (spec or not source.startswith("{{", self.at)):
                yield self.field(quote, raw=raw, spec=spec)
            elif spec and here == "}":
                return
            elif formatted and here == "}" and not source.startswith("}}", self.at):
                raise failure(source, self.at, "f-string: single '}' is not allowed")
            else:
                self.at += 2 if formatted and here in "{}" else 1
        if spec:
            raise failure(source, self.at, "f-string: expecting '}'")

    def field(self, quote: str, *, raw: bool, spec: int) -> Field:
        """Return the replacement field that begins at the current position."""
        if spec > MOST_SPECS:
            raise failure(self.source, self.at, "f-string: expressions nested too deeply")
        start, comments, depth = self.at, self.comments, 0
        inner: list[Token] = []
        self.at += 1
        while depth or not _CODE_END.match(self.source, self.at):
            if self.at >= len(self.source):
                raise failure(self.source, start, "f-string: expecting '}'")
            found = self.token()
            if found is None or found.kind is Kind.NEWLINE:
                continue
            inner.append(found)
            if found.kind is Kind.MARK:
                depth += (found.text in _OPEN) - (found.text in _CLOSE)
            if depth < 0:
                raise failure(self.source, found.start, f"f-string: unmatched '{found.text}'")
        if not inner:
            raise failure(self.source, start, "f-string: valid expression required before '}'")
        code_end = self.at
        if self.source[self.at] == "!":
            while self.source[self.at : self.at + 1] not in (":", "}", "", quote[0]):
                self.at += 1
        spec_start = self.at
        within: tuple[Field, ...] = ()
        if self.source.startswith(":", self.at):
            self.at += 1
            within = tuple(self.fields(start, quote, formatted=True, raw=raw, spec=spec + 1))
        if not self.source.startswith("}", self.at):
            raise failure(self.source, start, "f-string: expecting '}'")
        self.at += 1
        return Field(start, code_end, spec_start, self.at, tuple(inner), within, self.comments > comments)
