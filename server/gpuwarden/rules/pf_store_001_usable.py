from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-STORE-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Ask the user to fix the address, the permissions or the variables, "
    "or omit the artifact store and pull the outputs.",
)
def store_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The artifact store can be read from here, and the uploader's credentials are set.

    Why: a store that can't be read can't serve as proof at the teardown gate, and an upload without credentials fails
    on a billed machine. The uploader's credentials have separate names (GPUWARDEN_STORE_AWS_ACCESS_KEY_ID,
    GPUWARDEN_STORE_HF_TOKEN), so that a write-only key can be sent to the machine while the read key stays here.

    Example:
        submit_job(artifact_store="s3://runs/team-a")  # there is no such bucket, or no key for it

    Instead:
        submit_job(artifact_store="s3://training-runs/team-a")  # it exists, and both pairs of keys are set

    """
    if isinstance(facts.artifact_store, Unknown):
        yield Found(
            f"it is unknown whether {facts.spec.artifact_store} can be read: {facts.artifact_store.why}",
            severity=facts.could_not,
        )
    elif facts.artifact_store is not None and facts.artifact_store.value:
        yield Found(f"{facts.spec.artifact_store} can't be used: {facts.artifact_store.value}")
    for name in facts.unset_store_keys:
        yield Found(f"{name} is not set here; the machine needs it to upload to {facts.spec.artifact_store}")
