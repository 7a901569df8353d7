from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Accept the terms on the repo's page with the account whose token the job uses, or choose an open repo.",
)
def repo_readable(facts: SubmitFacts) -> Iterator[Found]:
    """The job can read its gated and private repos, and none of its repos is disabled on the Hub.

    Why: a gated repo's page is public, so it looks usable, but requests for its files return 403 until the account has
    accepted the terms. A job has no token unless one is passed to it. No account can read a disabled repo's files.

    Example:
        submit_job(script='AutoModel.from_pretrained("meta-llama/Llama-3.2-1B")', secrets=[])  # gated

    Instead:
        submit_job(script='AutoModel.from_pretrained("meta-llama/Llama-3.2-1B")', secrets=["HF_TOKEN"])

    """
    hub = facts.hub
    for fact in hub.repos if hub else ():
        repo = fact.repo
        severity = None if fact.use.certain else Severity.WARNING
        if repo.status == "disabled":
            yield Found(
                f"{fact.where}: {repo.why}", fix="Choose another repo, or a copy of this one.", severity=severity
            )
        if not repo.exists:
            continue
        if repo.access is False:
            yield Found(f"{fact.where}: {repo.why}", severity=severity)
        elif repo.access is None:
            yield Found(f"{fact.where}: {repo.why}", fix="Try again.", severity=facts.could_not)
        elif (repo.private or repo.gated) and hub and not hub.job_token:
            kind = "private" if repo.private else "gated"
            message = f"{fact.where} is {kind}, but the job gets no token"
            yield Found(message, fix="Add HF_TOKEN to secrets.", severity=severity)
