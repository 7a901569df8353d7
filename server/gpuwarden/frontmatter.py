"""Parse strict YAML front matter in profiles and references.

Only plain data is allowed: mappings with string keys, lists, strings, integers, decimal numbers, `true`, `false`,
`null`. Duplicate keys, anchors and tags are refused. YAML 1.1's implicit types (`no` for false, `2026-08-20` for a
date, `1:30` for 90) are read as strings. Every error is a BadRequest that begins with `file:line:`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from yaml.composer import Composer
from yaml.resolver import Resolver

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.inputs import describe_error

try:
    from yaml.cyaml import CParser as Parser  # type: ignore[attr-defined]  # libyaml is eight times faster
except ImportError:  # without libyaml

    class Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        """Parse YAML events in pure Python."""

        def __init__(self, stream: str) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


M = TypeVar("M", bound=BaseModel)

MAX_CHARS = 1 << 20
MAX_SHOWN = 3
MAX_WORDS = 200  # characters in the description of one error
FENCE = "---"
_SURROGATE = re.compile("[\ud800-\udfff]")


class FrontMatter(NamedTuple):
    """The data above the second `---`, the text below it, and the line on which that text starts."""

    data: dict[str, Any]
    body: str
    body_line: int


@dataclass(frozen=True)
class Parsed:
    """Plain data, and the line number of every value, keyed by the keys and indexes that lead to the value."""

    value: dict[str, Any]
    lines: dict[tuple[str | int, ...], int]

    def line_of(self, loc: Sequence[str | int]) -> int:
        """Return the line of the value at `loc`, or of the nearest value that contains it.

        Steps in `loc` that are not in the file, such as a union branch in a validation error, are skipped.
        """
        here: tuple[str | int, ...] = ()
        for step in loc:
            here = (*here, step) if (*here, step) in self.lines else here
        return self.lines[here]


def read_front_matter(text: str, *, name: str) -> FrontMatter:
    """Split `text` into its front matter and its body. Raises BadRequest with `name` and the line."""
    parsed, body, body_line = _split(text, name)
    return FrontMatter(parsed.value, body, body_line)


def load_front_matter(model: type[M], text: str, *, name: str) -> tuple[M, str, int]:
    """Return the front matter as a `model`, the body and its first line. Raises BadRequest with `name` and the line."""
    parsed, body, body_line = _split(text, name)
    return validate(model, parsed, name=name), body, body_line


def validate(model: type[M], parsed: Parsed, *, name: str) -> M:
    """Validate parsed data as a `model` without type coercion, so `"yes"` is not a boolean. Raises BadRequest."""
    try:
        return model.model_validate_json(json.dumps(parsed.value), strict=True)
    except ValidationError as error:
        found = []
        for fault in error.errors(include_url=False, include_context=False):
            where = _short(".".join(str(step) for step in fault["loc"]))
            fault_text = _short(describe_error(fault["type"], fault["msg"]))
            found.append(f"{name}:{parsed.line_of(fault['loc'])}: {where + ': ' if where else ''}{fault_text}")
        more = f" (and {len(found) - MAX_SHOWN} more)" if len(found) > MAX_SHOWN else ""
        raise BadRequest("; ".join(found[:MAX_SHOWN]) + more, f"Correct {name}.") from error


def parse_yaml(text: str, *, name: str, first_line: int = 1) -> Parsed:
    """Parse one mapping; `first_line` is the line on which the text starts in the file. Raises BadRequest."""
    if len(text) > MAX_CHARS:
        raise _wrong(name, first_line, f"{len(text):,} characters of YAML; the limit is {MAX_CHARS:,}")
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        at = first_line + text.count("\n", 0, odd.start())
        raise _wrong(name, at, "contains a character that YAML does not allow")
    try:
        node = _Loader(text).get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(name, first_line, "expected lines of the form `key: value`")
        lines: dict[tuple[str | int, ...], int] = {}
        value = _plain(node, (), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _wrong(name, first_line + (mark.line if mark else 0), f"{error.problem or error.context}") from error
    except RecursionError as error:
        raise _wrong(name, first_line, "values are nested too deeply") from error
    except (ValueError, OverflowError) as error:  # raised by PyYAML's pure Python scanner
        raise _wrong(name, first_line, "contains an escape sequence for a character that does not exist") from error
    return Parsed(value, {loc: first_line + line for loc, line in lines.items()})


def _split(text: str, name: str) -> tuple[Parsed, str, int]:
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != FENCE:
        raise _wrong(name, 1, "the file must begin with a line ---, followed by its front matter")
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        raise _wrong(name, 1, "the front matter has no closing line ---")
    return parse_yaml("\n".join(lines[1:end]), name=name, first_line=2), "\n".join(lines[end + 1 :]), end + 2


class _Loader(Composer, Resolver, Parser):
    """PyYAML's composer, restricted to the JSON types, without aliases, anchors or tags."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str) -> None:
        Parser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "anchors, aliases and tags are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:null|~|)$"), ["n", "~", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^-?(?:0|[1-9][0-9]{0,17})$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}$"), list("-0123456789")
)

_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "true",
    "null": lambda _: None,
    "int": int,
    "float": float,
    "str": str,
}


def _plain(node: yaml.Node, loc: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> Any:
    lines[loc] = node.start_mark.line
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*loc, i), lines) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        pairs: dict[str, yaml.Node] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                raise yaml.MarkedYAMLError(problem="a key that is not a string", problem_mark=key.start_mark)
            if key.value in pairs:
                twice = f"the key {key.value!r} appears twice here"
                raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
            pairs[key.value] = item
        return {key: _plain(item, (*loc, key), lines) for key, item in pairs.items()}
    if _SURROGATE.search(node.value):
        raise yaml.MarkedYAMLError(problem="an unpaired surrogate", problem_mark=node.start_mark)
    return _SCALARS[node.tag.rpartition(":")[2]](node.value)


def _wrong(name: str, line: int, what: str) -> BadRequest:
    return BadRequest(f"{name}:{line}: {_short(what)}", f"Correct {name}.")


def _short(text: str) -> str:
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."
