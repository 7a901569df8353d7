from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-001",
    gate="submit",
    severity=Severity.ERROR,
    fix=(do(Action.LOOK_AT_REPO), do(Action.SEARCH_DATASETS, alternative=True), "Use an id that exists."),
)
def repo_exists(facts: SubmitFacts) -> Iterator[Found]:
    """Every repo that the job names exists on the Hub.

    Why: an id recalled from memory is often off by a letter, and a job that can't find its data fails after the machine
    has been rented. If the Hub does not answer, the result is unknown, which blocks a metered job. A repo that is read
    in a `try` block must exist too, because the job would otherwise train without it; if the script also pushes to the
    repo, the finding is a warning.

    Example:
        load_dataset("trl-lib/capybarra")

    Instead:
        load_dataset("trl-lib/Capybara")

    """
    for fact in facts.hub.repos if facts.hub else ():
        repo = fact.repo
        near = f"Did you mean {', '.join(map(named, repo.did_you_mean[:3]))}?" if repo.did_you_mean else ""
        if repo.status in {"missing", "private_or_missing"}:
            # A name without an owner may be a folder that another program creates, except in a bundled trainer.
            certain = ("/" in fact.use.id or facts.uses.typed is not None) and not fact.use.maybe
            # A push target without an owner belongs to the token's account, which may own this repo.
            names = {fact.use.id, fact.use.id.rpartition("/")[2]}
            resumed = fact.use.tried and any(push.target in names for push in facts.uses.pushes)
            severity = None if certain and not resumed else Severity.WARNING
            yield Found(f"{fact.where}: {repo.why}", fix=near, severity=severity)
        elif repo.status == "error":
            fix = "Try again when the Hub answers."
            yield Found(f"{fact.where} could not be checked: {repo.why}", fix=fix, severity=facts.could_not)
