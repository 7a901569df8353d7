import re
from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-DATA-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use a config and split that exist in the dataset.",
)
def config_and_split(facts: SubmitFacts) -> Iterator[Found]:
    """The dataset has the config and split that the job reads.

    Why: half of all datasets have no `test` split, many require a config, and the error appears only at run time.

    Example:
        load_dataset("openai/gsm8k", split="train")  # the configs are main and socratic

    Instead:
        load_dataset("openai/gsm8k", "main", split="train")

    """
    for fact in facts.hub.data if facts.hub else ():
        structure = fact.repo.structure
        if structure is None or not structure.known or structure.partial or fact.use.revision or fact.use.file:
            continue
        if fact.use.unknown & {"revision", "file"}:
            continue
        severity = None if fact.use.certain else Severity.WARNING
        names = [c.name for c in structure.configs]
        given = fact.use.config or "config" in fact.use.unknown
        if structure.more_configs or structure.failed:
            continue
        if fact.use.config and fact.use.config not in names:
            fix = f"Its configs are {_listed(names)}."
            yield Found(f"{fact.where} has no config {fact.use.config!r}", fix=fix, severity=severity)
        elif not given and len(names) > 1 and not {"default", fact.repo.default_config} & {*names}:
            fix = f"Specify one of {_listed(names)}."
            yield Found(f"{fact.where} has {len(names)} configs, but none is specified", fix=fix, severity=severity)
        elif fact.config is not None and fact.use.split:
            have = [s.name for s in fact.config.splits]
            wanted = [re.sub(r"\[.*\]$", "", part).strip() for part in fact.use.split.split("+")]
            for name in wanted:
                if have and name != "all" and name not in have:
                    fix = f"Its splits are {_listed(have)}."
                    yield Found(f"{fact.where} has no split {name!r}", fix=fix, severity=severity)


def _listed(names: list[str]) -> str:
    return ", ".join(map(named, names[:8]))
