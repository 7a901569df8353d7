from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-004",
    gate="submit",
    severity=Severity.INFO,
    fix="Pass revision= to make the run repeatable.",
)
def revision_noted(facts: SubmitFacts) -> Iterator[Found]:
    """The revision of each repo is pinned, or at least known.

    Why: the commit that `main` points to changes over time. The receipt is bound to the checked revision, so if the
    repo changes before the launch, the job must pass the preflight again. A pinned revision makes the run repeatable,
    because the script always loads the same weights and rows.

    Example:
        load_dataset("trl-lib/tldr", split="train")
        AutoModel.from_pretrained("Qwen/Qwen3-0.6B")

    Instead:
        load_dataset("trl-lib/tldr", split="train", revision="COMMIT")
        AutoModel.from_pretrained("Qwen/Qwen3-0.6B", revision="COMMIT")

    """
    for fact in facts.hub.repos if facts.hub else ():
        if fact.repo.exists and not fact.use.revision and fact.use.role != "base" and fact.repo.sha:
            yield Found(f"{fact.where} is not pinned; its revision is now {fact.repo.sha[:12]}")
