"""Log lines that are designed to mislead or slow down a search."""

from __future__ import annotations

import random
import re
import string

from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.log_lines import MAX_LINE

PAIRS = [(g, s) for g in shipped().gotchas.values() for s in g.signatures]


def hostile_lines(signature: str, length: int = MAX_LINE) -> list[str]:
    """Return lines of the given length that make a matcher backtrack as much as possible."""
    literal = next(iter(re.findall(r"[A-Za-z ]{3,}", signature)), "x")
    pieces = ["a", " ", "0", "/", "'", literal, f"{literal} ", f"{literal}0", string.printable.replace("\n", "")]
    rng = random.Random(signature)
    mixed = "".join(rng.choice([*pieces, ".", "(", "[", ":", "=", "%"]) for _ in range(length))
    return [(piece * length)[:length] for piece in pieces] + [mixed[:length]]
