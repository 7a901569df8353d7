from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-COST-001", gate="submit", severity=Severity.ERROR, fix=do(Action.SET_ARGUMENT, name="max_cost_usd"))
def cost_bounded(facts: SubmitFacts) -> Iterator[Found]:
    """A metered job has a price, or a cap and a timeout.

    Why: without them, the job's cost is unbounded, because no total can be shown for approval and no limit can end the
    job. The price comes from the platform's quote. A job that reaches its cap is canceled, but the cost is only known
    if the platform reports a price for the rented machine; otherwise, only the timeout ends the job.

    Example:
        submit_job(platform="ssh/rented-box", script=train)  # no price is known, and no cap is set

    Instead:
        submit_job(platform="ssh/rented-box", script=train, max_cost_usd=5, timeout_s=3_600)

    """
    limits = {"max_cost_usd": facts.spec.max_cost_usd, "timeout_s": facts.spec.timeout_s}
    missing = [name for name, limit in limits.items() if limit is None]
    if not facts.metered or facts.price is not None or not missing:
        return
    why = facts.quote.why if isinstance(facts.quote, Unknown) else "the platform reports no price"
    what = "no cost cap is set" if "max_cost_usd" in missing else "the cost cap may have no effect without a timeout"
    yield Found(f"the price is unknown ({why}), and {what}", fix=[do(Action.SET_ARGUMENT, name=n) for n in missing])
