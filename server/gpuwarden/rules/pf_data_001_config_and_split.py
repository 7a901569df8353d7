import re
from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-DATA-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use a config and a split that the dataset has.",
)
def config_and_split(facts: SubmitFacts) -> Iterator[Found]:
    """The dataset has the config and the split that are read.

    Why: half the datasets have no `test`, many need a config to be named, and the library says so only when it
    runs.

    Example:
        load_dataset("openai/gsm8k", split="train")  # the configs are main and socratic

    Instead:
        load_dataset("openai/gsm8k", "main", split="train")

    """
    for fact in facts.hub.data if facts.hub else ():
        structure = fact.repo.structure
        if structure is None or not structure.known or structure.partial or fact.use.revision or fact.use.file:
            continue
        names = [c.name for c in structure.configs]
        if structure.more_configs or structure.failed:
            continue
        if fact.use.config and fact.use.config not in names:
            yield Found(f"{fact.where} has no config {fact.use.config!r}", fix=f"It has {_listed(names)}.")
        elif not fact.use.config and len(names) > 1 and "default" not in names:
            yield Found(f"{fact.where} has {len(names)} configs and none is named", fix=f"Name one: {_listed(names)}.")
        elif fact.config is not None and fact.use.split:
            have = [s.name for s in fact.config.splits]
            wanted = [re.sub(r"\[.*\]$", "", part).strip() for part in fact.use.split.split("+")]
            for name in wanted:
                if have and name != "all" and name not in have:
                    yield Found(f"{fact.where} has no split {name!r}", fix=f"It has {_listed(have)}.")


def _listed(names: list[str]) -> str:
    return ", ".join(map(named, names[:8]))
