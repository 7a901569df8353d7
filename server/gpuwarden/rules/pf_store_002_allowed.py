from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-STORE-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Specify a store that the policy allows, or ask the user to add this one to [artifact_stores] in the policy.",
)
def store_allowed(facts: SubmitFacts) -> Iterator[Found]:
    """The user's list of artifact stores covers the job's store.

    Why: a job's outputs are uploaded with the user's credentials to the store in the job's arguments. A list in the
    policy's [artifact_stores] limits the allowed stores. An entry covers its own address and everything under it.
    Addresses are compared by path component, so `s3://runs/team` does not cover `s3://runs/team-b`. Without a list, a
    job may use any store.

    Example:
        submit_job(artifact_store="s3://other-bucket/x")  # [artifact_stores] allowed = ["s3://training-runs/team-a"]

    Instead:
        submit_job(artifact_store="s3://training-runs/team-a/llama")  # under an entry of the list

    """
    if facts.spec.artifact_store and not facts.policy.artifact_stores.allows(facts.spec.artifact_store):
        listed = ", ".join(facts.policy.artifact_stores.allowed[:5])
        yield Found(
            f"the user's policy does not allow the artifact store {facts.spec.artifact_store}; it lists {listed}"
        )
