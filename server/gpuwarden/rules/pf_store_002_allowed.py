from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-STORE-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Name a store that the list covers, or ask the user to add one to [artifact_stores] of the policy.",
)
def store_allowed(facts: SubmitFacts) -> Iterator[Found]:
    """The artifact store is one that the user's list covers.

    Why: everything that a job saves is uploaded to the store that its arguments name, with credentials of the user. A
    list in the policy's [artifact_stores] says where such files may go: a place covers itself and everything below it,
    part by part, so `s3://runs/team` does not cover `s3://runs/team-b`. Without a list any store may be named.

    Example:
        submit_job(artifact_store="s3://somebody-elses-bucket/x")  # [artifact_stores] allowed = ["s3://training-runs/team-a"]

    Instead:
        submit_job(artifact_store="s3://training-runs/team-a/llama")  # below a place of the list

    """
    if facts.spec.artifact_store and not facts.policy.artifact_stores.allows(facts.spec.artifact_store):
        listed = ", ".join(facts.policy.artifact_stores.allowed[:5])
        yield Found(
            f"the user's policy does not let a job keep its outputs in {facts.spec.artifact_store}; it lists {listed}"
        )
