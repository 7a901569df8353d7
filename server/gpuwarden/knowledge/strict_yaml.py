"""YAML that says where it is wrong: no duplicate keys, no anchors, and the line of every value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml


class FrontMatterError(Exception):
    """The text can't be used; `line` counts from 1 in the file."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(frozen=True)
class Parsed:
    """A mapping, and the file line of every value in it by its path of keys and indexes."""

    value: dict[str, Any]
    lines: dict[tuple[Any, ...], int]

    def line_of(self, loc: tuple[Any, ...]) -> int:
        """Return the line of the value at `loc`, or of the nearest one around it."""
        while loc not in self.lines:
            loc = loc[:-1]
        return self.lines[loc]


def split_front_matter(text: str) -> tuple[Parsed, str, int]:
    """Split a page into its front matter, its body, and the file line at which the body starts."""
    lines = text.splitlines()
    if not lines or lines[0] != "---":
        raise FrontMatterError(1, "front matter: the first line is not ---")
    if "---" not in lines[1:]:
        raise FrontMatterError(1, "front matter: no closing ---")
    end = lines.index("---", 1)
    return parse_yaml("\n".join(lines[1:end]), 2), "\n".join(lines[end + 1 :]), end + 2


def parse_yaml(text: str, first_line: int = 1) -> Parsed:
    """Parse one mapping; `first_line` is the file line of the text's first line."""
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                raise FrontMatterError(first_line + token.start_mark.line, "YAML: anchors and tags are not used here")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise FrontMatterError(first_line, "expected `key: value` lines")
        lines = dict(_walk(node, (), first_line))
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise FrontMatterError(first_line + (mark.line if mark else 0), f"YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise FrontMatterError(first_line, f"YAML: {error}") from error
    except ValueError as error:  # a scalar that looks like a date but is none
        raise FrontMatterError(first_line, f"YAML: {error}") from error
    return Parsed(value, lines)


def _walk(node: yaml.Node, loc: tuple[Any, ...], first: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    yield loc, first + node.start_mark.line
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _walk(item, (*loc, i), first)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, item in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise FrontMatterError(first + key.start_mark.line, f"YAML: the key {key.value!r} is not text")
            if key.value in keys:
                raise FrontMatterError(first + key.start_mark.line, f"YAML: the key {key.value!r} is there twice")
            keys.add(key.value)
            yield from _walk(item, (*loc, key.value), first)
