from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-DATA-003", gate="submit", severity=Severity.ERROR, fix="Read a column that the dataset has.")
def columns_read(facts: SubmitFacts) -> Iterator[Found]:
    """The columns that the script's own row functions read exist.

    Why: a `map` over the rows raises KeyError at the first row, after the download.
    """
    data = {f.use.id: f for f in facts.hub.data} if facts.hub else {}
    if len(data) != 1:
        return  # with several datasets, which one a function sees is not known
    (fact,) = data.values()
    if fact.config is None or not fact.config.columns:
        return
    has = fact.config.column_names | set(facts.uses.renames.values()) | facts.uses.makes
    for name, line in sorted(set(facts.uses.reads)):
        if name not in has:
            listed = ", ".join(sorted(fact.config.column_names)[:12])
            yield Found(f"line {line} reads the column {name!r}, which {fact.use.id} does not have; it has {listed}")
