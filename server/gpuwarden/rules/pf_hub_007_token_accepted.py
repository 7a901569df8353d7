from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-007",
    gate="submit",
    severity=Severity.ERROR,
    fix="Create a token with write access at huggingface.co/settings/tokens and set it as HF_TOKEN.",
)
def token_accepted(facts: SubmitFacts) -> Iterator[Found]:
    """The token in use is valid and has write access to the job's push targets.

    Why: a trainer creates its repo in its constructor or, worse, pushes only at the end. A read-only or expired token
    then wastes the whole run. If the script catches push errors, the finding is a warning, unless the job declares the
    target as an output. If the target's owner is unknown, any declared repo is assumed to be the target.

    Example:
        SFTConfig(push_to_hub=True, hub_model_id="some-org/model")  # the token can't write to some-org

    Instead:
        SFTConfig(push_to_hub=True, hub_model_id="me/model")  # HF_TOKEN of "me" has write access

    """
    account = facts.hub.account if facts.hub else None
    if account is None:
        return
    if isinstance(account, Unknown):
        yield Found(f"the token's write access could not be checked: {account.why}", severity=facts.could_not)
        return
    who = account.value
    severity = None if any(map(facts.certain, facts.uses.pushes)) else Severity.WARNING
    if not who.name:
        yield Found("the Hub rejects the token in use: it is invalid or expired", severity=severity)
        return
    if who.role == "read":
        yield Found(f"{who.name}'s token can only read, but the job pushes to the Hub", severity=severity)
        return
    owned = [(p.target.partition("/")[0], p) for p in facts.uses.pushes if p.target and "/" in p.target]
    certain = {owner for owner, push in owned if facts.certain(push)}
    for owner in sorted({owner for owner, _ in owned}):
        if who.may_write(owner) is False:
            has = ", ".join(map(named, (who.name, *who.orgs)))
            message = f"the job pushes to {owner}, but {who.name} can't write to it"
            yield Found(message, fix=f"Push to one of {has}.", severity=None if owner in certain else Severity.WARNING)
