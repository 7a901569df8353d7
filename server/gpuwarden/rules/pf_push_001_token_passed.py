from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PUSH-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add HF_TOKEN to secrets.",
)
def token_passed(facts: SubmitFacts) -> Iterator[Found]:
    """A job that pushes to the Hub gets a token.

    Why: without a token, the push fails with 401: at the start if a trainer pushes, otherwise at the very end. If the
    script catches that error, the finding is a warning, unless the job declares the pushed repo as an output. If the
    owner of the pushed repo is unknown, any declared repo is assumed to be the pushed one.

    Example:
        submit_job(script='model.push_to_hub("me/model")', secrets=[])

    Instead:
        submit_job(script='model.push_to_hub("me/model")', secrets=["HF_TOKEN"])

    """
    names = {*facts.spec.secrets, *facts.spec.env}
    own = {r.name for r in facts.uses.env if "TOKEN" in r.name.upper() and r.name in names}
    if facts.uses.pushes and "HF_TOKEN" not in names and not own:
        push = max(facts.uses.pushes, key=facts.certain)
        where = f"line {push.line}" if push.line else "the command line"
        severity = None if facts.metered and facts.certain(push) else Severity.WARNING
        yield Found(f"{where} pushes to the Hub ({push.via}), but HF_TOKEN is not among the secrets", severity=severity)
