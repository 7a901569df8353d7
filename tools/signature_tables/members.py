"""Read which names each module binds and which members each class has, line by line.

Parsing the syntax tree of every module in every release would take an hour. Reading lines is enough, because only
differences between releases are kept: a mistake that is made in every release has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CLASS = re.compile(r"class (?P<name>\w+)(?:\((?P<bases>[^)]*)\)?)?")
_FUNCTION = re.compile(r"(?:async )?def (?P<name>\w+)")
_ASSIGNED = re.compile(r"(?P<name>\w+)(?:\s*:[^=]+)?\s*=(?!=)")
_FIELD = re.compile(r"(?P<name>\w+)\s*:\s*\S")
_OWN = re.compile(r"self\.(?P<name>[A-Za-z]\w*)(?:\s*:[^=]+)?\s*=(?!=)")
_IMPORT = re.compile(r"(?:from \S+ )?import (?P<names>.*)")
_BLOCKS = ("if ", "try:", "else:", "elif ", "except", "with ", "finally:")
_QUOTES = ('"""', "'''")
_WORD = re.compile(r"(?:\w+ as )?(\w+)")


@dataclass
class Text:
    """The names in one module's text, and the bases and members of each class."""

    names: set[str] = field(default_factory=set)
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)


def read_text(text: str, *, attributes: bool) -> Text:
    """Return the names and members of a module; with `attributes`, also the attributes that methods assign."""
    found = Text()
    owner, block = "", False
    for indent, body in _statements(text):
        if indent == 0:
            owner, block = "", body.startswith(_BLOCKS)
        declared = _CLASS.match(body) if indent == 0 else None
        if declared is not None:
            owner = declared["name"]
            found.names.add(owner)
            found.bases[owner] = _bases(declared["bases"] or "")
            found.members.setdefault(owner, set())
        elif indent == 0 or (block and indent == 4):
            found.names.update(_bound(body))
        elif owner and indent == 4:
            member = _FUNCTION.match(body) or _ASSIGNED.match(body) or _FIELD.match(body)
            found.members[owner].update([member["name"]] if member else ())
        elif owner and attributes and "self." in body:
            found.members[owner].update(m["name"] for m in _OWN.finditer(body))
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their indentation, without comments and triple-quoted text; a bracketed import is one line."""
    quoted = joined = ""
    start = 0
    for line in text.splitlines():
        if quoted:
            quoted = "" if quoted in line else quoted
            continue
        quoted = next((quote for quote in _QUOTES if line.count(quote) % 2), "")
        body = line.strip()
        if joined:
            joined = f"{joined} {body.partition('#')[0]}"
        elif _IMPORT.match(body) and "(" in body:
            joined, start = body.partition("#")[0], len(line) - len(line.lstrip())
        elif body and body[0] not in "#@)]}\"'":
            yield len(line) - len(line.lstrip()), body
        if ")" in joined:
            yield start, joined
            joined = ""


def _bound(body: str) -> Iterable[str]:
    """Return the names that a statement of a module binds."""
    if imported := _IMPORT.match(body):
        return _imported(imported["names"])
    bound = _CLASS.match(body) or _FUNCTION.match(body) or _ASSIGNED.match(body)
    return [bound["name"]] if bound else []


def _imported(names: str) -> Iterable[str]:
    """Return the names that an import statement binds."""
    for part in names.partition("#")[0].strip("() ").split(","):
        if word := _WORD.fullmatch(part.strip()):
            yield word[1]


def _bases(text: str) -> tuple[str, ...]:
    """Return the names of a class's bases, without their modules and type arguments."""
    plain = re.sub(r"\[[^\]]*\]", "", text)
    names = (part.strip().rpartition(".")[2] for part in plain.split(",") if "=" not in part)
    return tuple(name for name in names if name.isidentifier())


def changes(versions: Sequence[str], releases: Sequence[Mapping[str, Text]]) -> dict[str, Any]:
    """Return the names and members that some releases lack, with the ranges of releases that have them.

    If a name is missing only because its module is missing too, it is not returned. The same applies to the members of
    a missing class.
    """
    names: dict[str, dict[str, set[int]]] = {}
    members: dict[str, dict[str, set[int]]] = {}
    modules: dict[str, set[int]] = {}
    classes: dict[str, set[int]] = {}
    bases: dict[str, set[str]] = {}
    for number, release in enumerate(releases):
        for module, text in release.items():
            modules.setdefault(module, set()).add(number)
            for name in text.names:
                names.setdefault(module, {}).setdefault(name, set()).add(number)
            for owner, own in text.members.items():
                classes.setdefault(owner, set()).add(number)
                bases.setdefault(owner, set()).update(text.bases[owner])
                for member in own:
                    members.setdefault(owner, {}).setdefault(member, set()).add(number)
    changed = {
        owner: {m: at for m, at in own.items() if at != classes[owner] and not m.startswith("__")}
        for owner, own in members.items()
    }
    wanted = _with_heirs({owner for owner, own in changed.items() if own}, bases)
    return {
        "releases": list(versions),
        "names": {
            module: {n: _runs(at) for n, at in bound.items() if at != modules[module]}
            for module, bound in names.items()
            if any(at != modules[module] for at in bound.values())
        },
        "classes": {
            owner: [
                _runs(classes[owner]),
                sorted(bases[owner] & wanted),
                {m: _runs(at) for m, at in changed.get(owner, {}).items()},
            ]
            for owner in wanted
            if owner in classes
        },
    }


def _with_heirs(wanted: set[str], bases: Mapping[str, set[str]]) -> set[str]:
    """Return classes and all classes that inherit from them."""
    while more := {owner for owner, own in bases.items() if own & wanted} - wanted:
        wanted = wanted | more
    return wanted


def _runs(places: set[int]) -> list[list[int]]:
    """Return the first and the last release of each range of consecutive releases."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return runs
