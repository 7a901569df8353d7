from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-KEEP-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Ask the user to fix the address, the rights or the variables, or leave keep out and pull the outputs.",
)
def store_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The kept store can be read from here, and the uploader's credentials are set.

    Why: a store that nobody can read proves nothing at the teardown gate, and an upload without credentials fails on a
    machine that bills. The uploader's credentials have names of their own (GPUWARDEN_KEEP_AWS_ACCESS_KEY_ID,
    GPUWARDEN_KEEP_HF_TOKEN), so that a key that may only write goes to the machine, and the one that reads stays here.

    Example:
        submit_job(keep="s3://runs/team-a")  # there is no such bucket, or GPUWARDEN_KEEP_AWS_ACCESS_KEY_ID is not set

    Instead:
        submit_job(keep="s3://training-runs/team-a")  # it exists, and both pairs of keys are set

    """
    if isinstance(facts.keep, Unknown):
        yield Found(f"whether {facts.spec.keep} can be read is unknown: {facts.keep.why}", severity=facts.could_not)
    elif facts.keep is not None and facts.keep.value:
        yield Found(f"{facts.spec.keep} can't be used: {facts.keep.value}")
    for name in facts.unset_keep:
        yield Found(f"{name} has no value here; the machine needs it to upload to {facts.spec.keep}")
