"""Known training failures as data: a strict loader, a search and a diagnosis of logs. The catalog is
`references/**/*.md`. Users read the same entries that `search` and `diagnose` use.
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
