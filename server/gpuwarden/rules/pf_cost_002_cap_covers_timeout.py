from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_FIX = (
    do(Action.SET_ARGUMENT, "higher", name="max_cost_usd"),
    do(Action.SET_ARGUMENT, "lower", alternative=True, name="timeout_s"),
)


@rule("PF-COST-002", gate="submit", severity=Severity.WARNING, fix=_FIX)
def cap_covers_timeout(facts: SubmitFacts) -> Iterator[Found]:
    """The cost cap covers the timeout.

    Why: a job that reaches its cap before its timeout is stopped, possibly just before its last save.

    Example:
        submit_job(gpu="h100", timeout_s=36_000, max_cost_usd=10)  # 10 hours at $3.00 per hour cost $30.00

    Instead:
        submit_job(gpu="h100", timeout_s=36_000, max_cost_usd=30)

    """
    spec = facts.spec
    if spec.max_cost_usd is None or spec.timeout_s is None or not facts.price:
        return
    full = facts.price * spec.timeout_s / 3600
    if spec.max_cost_usd < full:
        whole = f"{spec.timeout_s} s at {usd_per_hour(facts.price)} cost {usd(full)}"
        yield Found(f"the cost cap is {usd(spec.max_cost_usd)}, but {whole}")
