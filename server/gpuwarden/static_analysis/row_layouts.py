"""Decide how a dataset's columns become the rows that a training method reads.

The bundled trainers can rename columns (`--columns old=new`). `fit` decides whether that makes a dataset usable, based
only on the names and types of its columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuwarden.static_analysis.ecosystem_tables import SYNONYMS

Columns = tuple[str, ...]
"""A set of columns that a method reads together."""

_ROLES: Final = re.compile(r"list<\{(.*, )?role: ")
_TURNS: Final = re.compile(r"(list<)?\{(.*, )?from: ")
_NUMBER: Final = re.compile(r"u?int\d+|float\d+|double|decimal.*")
_WHOLE: Final = re.compile(r"u?int\d+|class<2>")
_NUMBERS: Final = re.compile(r"list<u?int\d+>")
_OBJECTS: Final = re.compile(
    r"\{.*\bbbox: list<list<.*\bcategor(y|ies): list<.*|\{.*\bcategor(y|ies): list<.*\bbbox: list<list<.*"
)
_TEXTS: Final = frozenset({"text", "anchor", "positive", "negative", "sentence1", "sentence2", "instruction", "output"})
_PARTS: Final = frozenset({"prompt", "completion", "chosen", "rejected"})
_PICTURES: Final = frozenset({"image", "img", "mask", "annotation"})
_UNTOLD: Final = re.compile(r"|null|unknown.*|json.*|.*(\.\.\.|\n).*", re.DOTALL)
"""Types that don't determine whether a column is usable: an empty type, null, mixed values, or a truncated type."""
_CONTEXTS: Final = ("input", "context")
_INFORMATIVE: Final = frozenset({"prompt"})
"""Columns that may accompany a pair of plain texts. A column with any other name is read only if it is renamed to one
of these names."""


@dataclass(frozen=True)
class Fit:
    """How a training method can use a dataset: the columns that are read, and the renames that are needed first.

    `talks` is true if the rows are conversations, which need a chat template. `missing` lists the columns for which the
    dataset has no usable column; it is empty if the dataset can be used.
    """

    reads: Columns = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    talks: bool = False
    missing: Columns = ()

    @property
    def option(self) -> str:
        """Return the renames in the format of the trainers' option."""
        return ",".join(f"{old}={new}" for old, new in self.renames.items())


def fit(columns: Mapping[str, str], wanted: tuple[Columns, ...]) -> Fit:
    """Return the best fit of columns to one of a method's column sets. `columns` maps names to types ("": unknown)."""
    found = as_it_is(columns, wanted) or next(renamed(columns, wanted), None)
    if found is not None:
        return found
    served = {n for n, kind in columns.items() if usable(n, kind)}
    lacking = [tuple(n for n in names if n not in served and not _renames(columns, (n,))) or names for names in wanted]
    return Fit(missing=min(lacking, key=len, default=()))


def usable(name: str, kind: str) -> bool:
    """Return true if a column of this type can be used as the named column, or if the type is unknown."""
    plain = kind in {"string", "large_string"}
    if not kind or kind == "null":
        return True
    if name in _TEXTS:
        return plain
    if name in _PARTS:
        return plain or bool(_ROLES.match(kind))
    if name == "messages":
        return bool(_ROLES.match(kind))
    if name == "conversations":
        return bool(_ROLES.match(kind) or _TURNS.match(kind))
    if name == "objects":
        return bool(_OBJECTS.fullmatch(kind))
    if name == "label":
        return plain or kind == "bool" or kind.startswith("class<") or bool(_NUMBER.fullmatch(kind))
    return name != "score" or bool(_NUMBER.fullmatch(kind))


def reads(name: str, kind: str, beside: Collection[str]) -> bool | None:
    """Return whether a method can use a column of this type, in a dataset on the Hub, as its column `name`.

    `beside` contains the names of the other columns. Return None if the type is unknown. A string is never an image
    here, because only paths in local files refer to images.
    """
    labels_answers = name in {"label", "labels"} and "completion" in beside
    if name in _PICTURES:
        right = kind == "image"
    elif name == "input_ids":
        right = bool(_NUMBERS.fullmatch(kind))
    elif labels_answers:
        right = kind == "bool" or bool(_WHOLE.fullmatch(kind))
    else:
        right = bool(kind) and kind != "null" and usable("label" if name == "labels" else name, kind)
    return True if right else None if _UNTOLD.fullmatch(kind) else False


def as_it_is(columns: Mapping[str, str], wanted: tuple[Columns, ...]) -> Fit | None:
    """Return the fit for a column set that the dataset has, or for a larger set that it has after renames."""
    for names in wanted:
        if not all(n in columns and usable(n, columns[n]) for n in names):
            continue
        if len({bool(_ROLES.match(columns[n])) for n in _PARTS.intersection(names) if columns[n]}) > 1:
            continue  # TRL can't append a list of messages to a plain-text prompt
        talks = any(_ROLES.match(columns[n]) for n in names)
        larger = (w for w in wanted if set(w) > set(names) and set(w) - set(names) <= _INFORMATIVE)
        for more in () if talks else larger:
            renames = _renames(columns, more)
            if renames:
                return Fit(more, renames, talks=talks)
        return Fit(names, talks=talks)
    return None


def renamed(columns: Mapping[str, str], wanted: tuple[Columns, ...]) -> Iterator[Fit]:
    """Yield a fit for each column set that the dataset has after columns with synonymous names are renamed."""
    context = "instruction" in columns and any(usable("text", columns.get(name, "-")) for name in _CONTEXTS)
    for names in wanted:
        if context and "completion" in names:
            continue  # with the renamed columns, training would ignore the context
        if renames := _renames(columns, names):
            back = {new: old for old, new in renames.items()}
            yield Fit(names, renames, talks=any(_ROLES.match(columns[back.get(n, n)]) for n in names))


def _renames(columns: Mapping[str, str], names: Columns) -> dict[str, str]:
    """Return the renames that provide all columns in `names`; empty if that is impossible or not needed."""
    found: dict[str, str] = {}
    for name in names:
        if name in columns and usable(name, columns[name]):
            continue
        others = (o for o in SYNONYMS.get(name, ()) if o in columns and o not in names and o not in found)
        old = next((o for o in others if usable(name, columns[o]) and name not in columns), None)
        if old is None:
            return {}
        found[old] = name
    return found
