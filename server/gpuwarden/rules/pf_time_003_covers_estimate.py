from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.estimate import duration, run_of


@rule(
    "PF-TIME-003",
    gate="submit",
    severity=Severity.WARNING,
    fix=(do(Action.SET_ARGUMENT, "higher", name="timeout_s"), "Or shorten the job."),
)
def covers_estimate(facts: SubmitFacts) -> Iterator[Found]:
    """The timeout is not below what the job will surely take.

    Why: a job that can't finish in time is money spent on nothing. The estimate is a wide interval, and only its
    lower end is used here.

    Example:
        submit_job(gpu="t4-small", script=three_epochs_of_an_8b_model, timeout_s=600)

    Instead:
        submit_job(gpu="a100-large", script=three_epochs_of_an_8b_model, timeout_s=86_400)

    """
    spec, gpu = facts.spec, facts.gpu
    model = facts.hub.model if facts.hub else None
    if spec.timeout_s is None or gpu is None or model is None or not model.repo.params:
        return
    rows = None  # known for a single dataset that the script does not change
    data = facts.hub.data if facts.hub else ()
    if len(data) == 1 and data[0].config and not facts.uses.called("select", "take", "shuffle", "filter"):
        wanted = data[0].use.split or "train"
        rows = next((s.rows for s in data[0].config.splits if s.name == wanted), None)
    time = duration(run_of(facts.uses, model.repo.params, rows, gpu[1]), gpu[0])
    if time is not None and time.low > spec.timeout_s:
        yield Found(f"the timeout is {spec.timeout_s} s; even at its fastest the job takes {time} ({time.how})")
