from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-VERB-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Set teardown to a verb that the platform supports.",
)
def verb_exists(facts: SubmitFacts) -> Iterator[Found]:
    """The platform supports the intended teardown.

    Why: a machine that can't be stopped is still billed after a planned stop. The intended teardown also decides which
    outputs survive, so a verb that the platform lacks makes the output path check meaningless.

    Example:
        submit_job(platform="lambda", teardown="stop", script=train)  # instances can only be terminated

    Instead:
        submit_job(platform="lambda", teardown="terminate", script=train)
        submit_job(platform="runpod", teardown="stop", script=train)

    """
    profile, verb = facts.profile, facts.spec.teardown
    if profile is not None and profile.meter.metered and getattr(profile.verbs, verb) is None:
        yield Found(f"{facts.spec.platform} does not support {verb}")
