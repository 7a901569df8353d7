"""Load and search the catalog of known training failures, and diagnose logs with it.

The catalog consists of the entries in `references/**/*.md`, which are also documentation for users.
"""

from gpuwarden.knowledge.catalog import (
    Catalogue,
    Gotcha,
    Page,
    Problem,
    load,
    read_tree,
    shipped,
)
from gpuwarden.knowledge.diagnosis import Diagnosis, MatchedLine, diagnose
from gpuwarden.knowledge.observations import ObservedSign, Sign
from gpuwarden.knowledge.search import Hit, search

__all__ = [
    "Catalogue",
    "Diagnosis",
    "Gotcha",
    "Hit",
    "MatchedLine",
    "ObservedSign",
    "Page",
    "Problem",
    "Sign",
    "diagnose",
    "load",
    "read_tree",
    "search",
    "shipped",
]
