"""Decide how much to trust a signature, based on its results in public reports.

For each signature, `signature_record.txt` contains the number of open reports in which the signature led to its entry,
and the number of these reports in which the thread confirms that cause. `runtime_wording.txt` lists the signatures
whose words a language runtime, a shell, the C library or pip prints for any program. These words name only a symptom,
which has several causes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

LIKELY = 0.95
"""A cause is called likely if the estimated share of correct diagnoses is at least this value."""
OWN_RATE = 0.86
"""The share of correct first diagnoses in reports not used for tuning, for signatures whose words no runtime prints."""
RUNTIME_RATE = 0.53
"""The share of correct first diagnoses in the same reports, for signatures whose words a runtime prints."""


def trusted(entry: str, signature: str) -> bool:
    """Return whether a match of this signature alone makes the entry likely.

    The rate for the signature's kind counts as one additional report. Therefore, two confirmed reports are needed, or
    nine for words that a runtime prints, plus about twenty for each report with another cause.
    """
    right, total = records().get((entry, signature), (0, 0))
    rate = RUNTIME_RATE if (entry, signature) in runtime_wordings() else OWN_RATE
    return (right + rate) / (total + 1) >= LIKELY


@lru_cache(maxsize=1)
def records() -> dict[tuple[str, str], tuple[int, int]]:
    """Return, by entry and signature, the number of correctly explained reports and the number of all reports."""
    rows = (line.split(" ", 3) for line in _lines("signature_record.txt"))
    return {(entry, signature): (int(right), int(total)) for entry, right, total, signature in rows}


@lru_cache(maxsize=1)
def runtime_wordings() -> frozenset[tuple[str, str]]:
    """Return the (entry, signature) pairs for messages that a runtime prints for any program."""
    rows = (line.split(" ", 1) for line in _lines("runtime_wording.txt"))
    return frozenset((entry, signature) for entry, signature in rows)


def _lines(name: str) -> list[str]:
    text = resources.files("gpuwarden.knowledge").joinpath(name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
