from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PUSH-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Push to the Hub (push_to_hub, hub_model_id and HF_TOKEN in secrets), or write to a mounted bucket.",
)
def something_durable(facts: SubmitFacts) -> Iterator[Found]:
    """On a platform that wipes the machine when the job ends, the job puts its results elsewhere itself.

    Why: there is no machine left to pull from. A job that only writes to its disk loses everything, silently and
    with success.
    """
    profile, spec = facts.profile, facts.spec
    if profile is None or profile.kind != "serverless" or facts.uses.pushes:
        return
    lives = [
        o for o in spec.outputs if profile.survives(profile.place_of(o), "job_end", requested=spec.durable_storage)
    ]
    if not lives:
        yield Found(f"{spec.platform} deletes the job's files when it ends, and nothing is pushed anywhere")
