"""Check signatures: regular expressions that match log lines and must be fast on any line.

Python's `re` can't be interrupted, so a signature may only use constructs that can't backtrack without limit: no group
is repeated, a dot is repeated only up to a bound, a signature does not begin with an unbounded repetition, and
look-arounds and back references are not allowed. A signature must contain a literal that is part of every match, so
that one substring search rules out most signatures for a whole log.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache

MAX_PATTERN = 300
MAX_DOT = 300
MAX_WILD = 3
_BOUND = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d*(?:,\d*)?\})\??")
_BACK = re.compile(r"\\\d")
_CLASS_ESCAPES = "dDwWsSbBAZ"


def complaint(pattern: str) -> str | None:
    """Return the reason why `pattern` can't be a signature, or None if it is valid."""
    if len(pattern) > MAX_PATTERN:
        return f"is longer than {MAX_PATTERN} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns about syntax whose meaning may change
            compiled = re.compile(pattern)
    except (re.error, FutureWarning) as error:
        return f"is not a regular expression: {error}"
    if compiled.search("") is not None:
        return "matches an empty line"
    return _unsafe(pattern) or (None if literal_of(pattern) else "has no fixed part of 3 characters to search for")


@lru_cache(maxsize=4096)
def compiled_signature(pattern: str) -> re.Pattern[str]:
    """Compile a signature once. It is case-sensitive unless it starts with `(?i)`."""
    return re.compile(pattern)


def _unsafe(pattern: str) -> str | None:
    """Return the reason why a construct in a pattern is not allowed, or None if all are allowed."""
    wild = 0
    atoms = _atoms(_body(pattern))
    for number, (atom, quantifier) in enumerate(atoms):
        if number == 0 and quantifier.startswith(("*", "+")):
            return "begins with a repetition without a bound, which is slow because it is tried at every character"
        if atom.startswith("(?") and not atom.startswith("(?:"):
            return "uses a look-around or a named group; plain groups and (?:...) are enough"
        if _BACK.match(atom):
            return "contains a back reference to a group"
        if quantifier in ("", "?", "??"):
            continue
        if atom == ")":
            return f"repeats a group ({quantifier}); write out the repetition"
        if atom == ".":
            bound = _BOUND.match(quantifier)
            top = (bound.group(1) if bound.group(2) is None else bound.group(2)) if bound else ""
            if not top or int(top) > MAX_DOT:
                return f"repeats a dot without a bound; write .{{0,N}} with N up to {MAX_DOT}"
            wild += 1
    return f"has more than {MAX_WILD} wildcards" if wild > MAX_WILD else None


def _body(pattern: str) -> str:
    return pattern.removeprefix("(?i)")


@lru_cache(maxsize=4096)
def _atoms(body: str) -> tuple[tuple[str, str], ...]:
    """Split a pattern into (atom, quantifier) pairs. An atom is a character, an escape, a class, or a parenthesis."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(body):
        if body[at] == "\\":
            end = at + 2
        elif body[at] == "[":
            end = at + (3 if body.startswith("[^", at) else 2)
            while end < len(body) and body[end] != "]":
                end += 2 if body[end] == "\\" else 1
            end += 1
        else:
            end = at + (3 if body.startswith("(?", at) else 1)
        quantifier = _QUANTIFIER.match(body, end)
        stop = quantifier.end() if quantifier and body[at] not in "(|" else end
        found.append((body[at:end], body[end:stop]))
        at = stop
    return tuple(found)


def parts(pattern: str) -> tuple[list[str], list[str]]:
    """Return the fixed parts of a pattern in order and, separately, those inside groups, which a match may lack."""
    fixed, optional, depth = [""], [""], 0
    for atom, quantifier in _atoms(_body(pattern)):
        depth += (atom[0] == "(") - (atom == ")")
        found = optional if depth or atom == ")" else fixed
        literal = _literal(atom) if quantifier == "" else ""
        if literal:
            found[-1] += literal
        else:
            found.append("")
    return fixed, optional


def _literal(atom: str) -> str:
    """Return the one character that an atom matches, or an empty string for any other atom."""
    if len(atom) == 2 and atom[0] == "\\":
        return "" if atom[1] in _CLASS_ESCAPES or atom[1].isdigit() else atom[1]
    return "" if atom in {".", "^", "$", "|", ")"} or atom[0] in "([" else atom


@lru_cache(maxsize=4096)
def literal_of(pattern: str) -> str:
    """Return the longest text that every match contains, in lower case; empty if it has fewer than 3 characters."""
    best = run = ""
    depth = 0
    for atom, quantifier in _atoms(_body(pattern)):
        fixed = _literal(atom)
        if atom.startswith("("):
            depth += 1
        elif atom == ")":
            depth -= 1
        elif atom == "|" and depth == 0:
            return ""
        run = run + fixed if depth == 0 and fixed and quantifier == "" else ""
        best = max(best, run, key=len)
    return best.lower() if len(best) >= 3 else ""
