"""Rewrite newer Python into the grammar of Python 3.11 without changing the line numbers.

Type parameter lists are checked and removed. The text of an f-string does not change, but each expression in it is
replaced by a name and parsed separately.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Final

from gpuwarden.static_analysis.source_tokens import Field, Kind, Text, Token, failure, tokens_of

_LINE: Final = re.compile(r"\r\n|\r|\n")
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_BLOCKS = frozenset({"def", "class"})
Edit = tuple[int, int, str]
"""A change to the program: its start, its end and the new text."""


@dataclass(frozen=True)
class Construct:
    """A syntax construct, and the Python release that introduced it."""

    version: tuple[int, int]
    line: int
    what: str


@dataclass
class _Bracket:
    """An open bracket: its position, the first `for` in it, and whether a comma precedes the `for`."""

    start: int
    loop: int = 0
    several: bool = False


class Rewriting:
    """Rewrite a program into older grammar. `hoisted` maps placeholders to the f-string expressions they replace."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokens_of(source)
        self.found: list[Construct] = []
        self.hoisted: dict[str, ast.expr] = {}
        self.shown: dict[str, str] = {}
        self._breaks = [match.end() for match in _LINE.finditer(source)]
        used = set(re.findall(r"_newer(\d+)_", source))
        self.stem = next(f"_newer{n}_" for n in range(len(used) + 1) if str(n) not in used)

    def text(self, start: int, end: int, tokens: Sequence[Token], *, statements: bool = True) -> str:
        """Return a part of the program, rewritten in older grammar with the same number of lines."""
        parts, at = [], start
        for begin, stop, replacement in sorted(self._edits(tokens, 0 if statements else len(tokens))):
            if begin < at:
                raise failure(self.source, begin, "invalid syntax")
            lost = len(_LINE.findall(self.source, begin, stop)) - len(_LINE.findall(replacement))
            parts += [self.source[at:begin], replacement, "\\\n" * lost]
            at = stop
        return "".join([*parts, self.source[at:end]])

    # -------------------------------------------------------------------------------------------------- statements

    def _edits(self, tokens: Sequence[Token], header: int) -> Iterator[Edit]:
        """Yield the changes to a part of the program in a single pass that takes linear time, even for long lines.

        No statement begins before the token with the index `header`.
        """
        brackets: list[_Bracket] = []
        begins, taken, listed = True, 0, -1  # one call handles a complete parameter list
        for n, token in enumerate(tokens):
            if n < taken:
                continue
            if begins and not brackets and n >= header:
                if token.text == "except":
                    header = yield from self._handler(tokens, n + 1)
                elif token.text == "lazy" and _text(tokens, n + 1) in ("import", "from"):
                    self._note((3, 15), token, "a lazy import")
                    yield token.start, tokens[n + 1].start, ""
                elif token.text == "type" and _text(tokens, n + 2) in ("=", "[") and _names(tokens[n + 1]):
                    listed, header = n + 2, self._statement(tokens, n)
                    yield token.start, tokens[n + 1].start, ""
            if isinstance(token, Text):
                yield from self._string(token, tokens[n - 1] if n else None)
            elif (
                token.text == "["
                and not brackets
                and (n == listed or (n > header + 1 and tokens[n - 2].text in _BLOCKS))
            ):
                taken = yield from self._parameters(tokens, n)
            elif token.text in _OPEN:
                brackets.append(_Bracket(n))
            elif brackets and token.text in _CLOSE:
                yield from self._comprehension(tokens, brackets.pop())
            elif brackets and not brackets[-1].loop:
                brackets[-1].several |= token.text == ","
                brackets[-1].loop = n if token.text == "for" else 0
            begins = token.kind is Kind.NEWLINE or token.text in (";", ":")

    def _statement(self, tokens: Sequence[Token], n: int) -> int:
        """Check a `type` statement, and return the index of its end."""
        self._note((3, 12), tokens[n], "a `type` statement")
        end = _first(tokens, n, len(tokens), (";", ""))
        sign = _first(tokens, n, end, ("=",))
        if _text(tokens, n + 2) == "[" and _first(tokens, n, end, ("]",)) != sign - 1:
            raise failure(self.source, tokens[n].start, "invalid syntax")
        self._expression(tokens[sign + 1 : end], tokens[end - 1])
        return end

    def _handler(self, tokens: Sequence[Token], n: int) -> Generator[Edit, None, int]:
        """Yield the edits that put parentheses around the exceptions in `except A, B:`; return the index of the end."""
        depth = lambdas = 0
        comma = False
        n += n < len(tokens) and tokens[n].text == "*"
        for end in range(n, len(tokens)):
            text = tokens[end].text
            depth += (text in _OPEN) - (text in _CLOSE)
            if depth:
                continue
            if text in ("as", ";") or tokens[end].kind is Kind.NEWLINE:
                return end
            if text == "*" and (end == n or tokens[end - 1].text == ","):
                raise failure(self.source, tokens[end].start, "invalid syntax")
            comma |= text == ","
            lambdas += text == "lambda"
            if text == ":":
                lambdas -= 1
                if lambdas < 0:
                    if comma:
                        self._note((3, 14), tokens[n], "`except` without parentheses around its exceptions")
                        yield tokens[n].start, tokens[n].start, "("
                        yield tokens[end].start, tokens[end].start, ")"
                    return end
        return len(tokens)

    def _parameters(self, tokens: Sequence[Token], n: int) -> Generator[Edit, None, int]:
        """Yield the change that removes a type parameter list, and return the index of its end.

        Raises SyntaxError for an invalid type parameter.
        """
        self._note((3, 12), tokens[n], "a list of type parameters")
        depth, groups = 0, list[list[Token]]([[]])
        for end in range(n, len(tokens)):
            token = tokens[end]
            depth += (token.text in _OPEN) - (token.text in _CLOSE)
            if depth == 0:
                if not groups[-1] and len(groups) > 1:
                    groups.pop()
                for group in groups:
                    self._parameter(group, token)
                yield tokens[n].start, token.end, ""
                return end + 1
            if depth == 1 and token.text == ",":
                groups.append([])
            elif token is not tokens[n]:
                groups[-1].append(token)
        return len(tokens)

    def _parameter(self, group: Sequence[Token], end: Token) -> None:
        """Check one type parameter: `T`, `T: bound`, `*Ts` or `**P`. Python 3.13 and later allow defaults."""
        stars = next((n for n, token in enumerate(group) if token.text != "*"), len(group))
        sign = _first(group, 0, len(group), ("=",))
        name, bound = group[stars : stars + 1], group[stars + 1 : sign]
        valid = stars <= 2 and bool(name) and _names(name[0])
        if not valid or (bound and (stars or bound[0].text != ":")):
            raise failure(self.source, (group[0] if group else end).start, "invalid type parameter")
        if bound:
            self._expression(bound[1:], bound[0])
        if sign < len(group):
            self._note((3, 13), group[sign], "a default for a type parameter")
            default = group[sign + 1 :]
            starred = stars == 1 and bool(default) and default[0].text == "*"
            self._expression(default[1:] if starred else default, group[sign])

    def _comprehension(self, tokens: Sequence[Token], bracket: _Bracket) -> Iterator[Edit]:
        """Yield the change that replaces `[*part for part in parts]` with a call that has an unknown value."""
        star, loop = bracket.start + 1, bracket.loop
        first = star + (2 if _text(tokens, star + 1) == "*" else 1)
        if tokens[star].text == "*" and loop > first and not bracket.several:
            until = tokens[loop - 1] if tokens[loop - 1].text == "async" else tokens[loop]
            self._note((3, 15), tokens[star], "unpacking in a comprehension")
            yield tokens[star].start, tokens[first].start, f"{self.stem}unpacked("
            yield until.start, until.start, ") "

    def _expression(self, tokens: Sequence[Token], at: Token) -> None:
        """Check a single expression. Raises SyntaxError with the line number in the program."""
        body = self._parsed(tokens, at, "(0 if 0 else {}\n)")  # exactly one expression may follow `else`
        if not isinstance(body, ast.IfExp):
            raise failure(self.source, tokens[0].start, "invalid syntax")

    def _parsed(self, tokens: Sequence[Token], at: Token, form: str = "({}\n)") -> ast.expr:
        """Parse the expressions in a field separately. Raises SyntaxError with the line number in the program."""
        if not tokens:
            raise failure(self.source, at.start, "expected an expression")
        line = self._line(tokens[0].start)
        code = self.text(tokens[0].start, tokens[-1].end, tokens, statements=False)
        try:
            body = ast.parse(form.format(code), mode="eval").body
        except SyntaxError as error:
            error.lineno = (error.lineno or 1) + line - 1
            raise
        if isinstance(body, ast.GeneratorExp) and (body.lineno, body.col_offset) == (1, 0):
            raise failure(self.source, at.start, "invalid syntax")  # a generator expression without its own parentheses
        return ast.increment_lineno(body, line - 1)

    # ----------------------------------------------------------------------------------------------------- strings

    def _string(self, token: Text, before: Token | None) -> Iterator[Edit]:
        """Yield the change to a string literal that older grammar can't parse."""
        template = "t" in token.prefix
        if isinstance(before, Text) and template != ("t" in before.prefix):
            raise failure(self.source, token.start, "cannot mix t-string literals with string or bytes literals")
        if template:
            self._note((3, 14), token, "a t-string")
        if template or _is_newer(token, self.source):
            if not template:
                self._note((3, 12), token, "an f-string with a field in newer syntax")
            prefix = self.source[token.start : token.start + len(token.prefix)].replace("t", "f").replace("T", "F")
            head = token.start + len(token.prefix) + len(token.quote)
            mark = f"{{{self.stem}template}}" if template else ""
            body = self._literal(head, token.end - len(token.quote), token.fields, token.quote, 0)
            yield token.start, token.end, f"{prefix}{token.quote}{mark}{body}{token.quote}"

    def _literal(self, start: int, end: int, fields: Sequence[Field], quote: str, level: int) -> str:
        """Return the content of an f-string or a format spec, with a placeholder for each expression."""
        parts, at = [], start
        for one in fields:
            parts += [self.source[at : one.start], self._field(one, quote, level)]
            at = one.end
        return "".join([*parts, self.source[at:end]])

    def _field(self, one: Field, quote: str, level: int) -> str:
        source, inner = self.source, one.tokens
        name = f"{self.stem}{len(self.hoisted) + len(self.shown)}"
        if level and one.spec:  # older grammar allows only two levels of fields, so this field becomes an f-string
            self.hoisted[name] = ast.Constant(None)
            whole = ast.parse(f"f{quote}{self._field(one, quote, 0)}{quote}", mode="eval").body
            self.hoisted[name] = ast.increment_lineno(whole, self._line(one.start) - 1)
            return f"{{{name}}}"
        sign = ""
        if inner[-1].text == "=":
            inner, sign = inner[:-1], "="
            self.shown[f"{name}="] = source[one.start + 1 : one.code_end]
        self.hoisted[name] = ast.Constant(None)  # reserve the name, because nested f-strings also need names
        self.hoisted[name] = self._parsed(inner, one.tokens[-1])
        conversion = source[one.code_end : one.spec_start].rstrip()
        spec = ""
        if one.spec_start < one.end - 1:
            spec = ":" + self._literal(one.spec_start + 1, one.end - 1, one.spec, quote, level + 1)
        return f"{{{name}{sign}{conversion}{spec}}}"

    # ------------------------------------------------------------------------------------------------------- places

    def _note(self, version: tuple[int, int], token: Token, what: str) -> None:
        self.found.append(Construct(version, self._line(token.start), what))

    def _line(self, at: int) -> int:
        return bisect_right(self._breaks, at) + 1


def _first(tokens: Sequence[Token], start: int, end: int, marks: tuple[str, ...]) -> int:
    """Return the index of the first mark outside brackets, or else `end`. An empty mark matches the end of a line."""
    depth = 0
    for n in range(start, end):
        depth += (tokens[n].text in _OPEN) - (tokens[n].text in _CLOSE)
        if depth == 0 and ("" if tokens[n].kind is Kind.NEWLINE else tokens[n].text) in marks:
            return n
    return end


def _text(tokens: Sequence[Token], n: int) -> str:
    return tokens[n].text if n < len(tokens) else ""


def _names(token: Token) -> bool:
    return token.kind is Kind.NAME and not iskeyword(token.text)


def _is_newer(token: Text, source: str) -> bool:
    """Return true if Python 3.11 rejects an f-string because of its fields."""
    return any(_field_is_newer(one, token, source) for one in token.fields)


def _field_is_newer(one: Field, token: Text, source: str, level: int = 0) -> bool:
    code, whole = source[one.start : one.code_end], source[one.start : one.end]
    nested = (inner for inner in one.tokens if isinstance(inner, Text))
    return (
        level > 1
        or token.quote in whole
        or "\\" in code
        or one.comments
        or source[one.code_end : one.spec_start][-1:].isspace()
        or (len(token.quote) == 1 and _LINE.search(whole) is not None)
        or any("t" in inner.prefix or _is_newer(inner, source) for inner in nested)
        or any(_field_is_newer(inner, token, source, level + 1) for inner in one.spec)
    )
