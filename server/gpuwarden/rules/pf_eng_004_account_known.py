from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import line
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-004",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(Action.SET_ARGUMENT, "to use an account and a QOS that you have, or leave both out", name="options"),
)
def account_known(facts: SubmitFacts) -> Iterator[Found]:
    """The user has access to the job's account and QOS.

    Why: an engine with accounting rejects a job under another user's account, or never starts it. A job's usage is
    charged to the job's account.

    Example:
        submit_job(platform="slurm/cluster", options={"account": "vision"}, script=train)  # you are in nlp

    Instead:
        submit_job(platform="slurm/cluster", options={"account": "nlp"}, script=train)

    """
    limits = facts.limits
    if limits is None:
        return
    request = limits.request
    if limits.accounts == ():
        yield Found(
            f"you have no account on {facts.spec.platform}", "Ask the site's administrators to add you to an account."
        )
    elif request.account and limits.accounts is not None and request.account not in limits.accounts:
        yield Found(
            f"the account {request.account} is not one of your accounts: {line(', '.join(limits.accounts), 300)}"
        )
    if request.qos and limits.qos and request.qos not in limits.qos:
        yield Found(f"the QOS {request.qos} is not one of your QOS: {line(', '.join(limits.qos), 300)}")
