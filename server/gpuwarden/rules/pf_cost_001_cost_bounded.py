from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-COST-001", gate="submit", severity=Severity.ERROR, fix=do(Action.SET_ARGUMENT, name="max_cost_usd"))
def cost_bounded(facts: SubmitFacts) -> Iterator[Found]:
    """A metered job has a price or a cap.

    Why: without either, the job's cost is unbounded, because no total can be shown for approval and no limit can end
    the job. The price comes from the platform's quote. The cap is an argument of the job; a job that reaches its cap is
    canceled.

    Example:
        submit_job(platform="ssh/rented-box", script=train)  # no price is known, and no cap is set

    Instead:
        submit_job(platform="ssh/rented-box", script=train, max_cost_usd=5)

    """
    if not facts.metered or facts.price is not None or facts.spec.max_cost_usd is not None:
        return
    why = facts.quote.why if isinstance(facts.quote, Unknown) else "the platform reports no price"
    yield Found(f"the price is unknown ({why}) and no cost cap is set")
