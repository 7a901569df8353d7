"""Known training failures as data: a strict loader, a search, and the diagnosis of logs. The catalog consists of the
entries in `references/**/*.md`, which users read too.
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
from gpuwarden.knowledge.observations import Seen, Sign
from gpuwarden.knowledge.search import Hit, search

__all__ = [
    "Catalogue",
    "Diagnosis",
    "Gotcha",
    "Hit",
    "MatchedLine",
    "Page",
    "Problem",
    "Seen",
    "Sign",
    "diagnose",
    "load",
    "read_tree",
    "search",
    "shipped",
]
