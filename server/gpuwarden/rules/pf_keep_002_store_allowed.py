from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-KEEP-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Name a store that the list covers, or ask the user to add a place to stores in the policy's [keep].",
)
def store_allowed(facts: SubmitFacts) -> Iterator[Found]:
    """The kept store is one that the user's list covers.

    Why: everything that a job saves is uploaded to the store that its arguments name, with credentials of the user.
    A list in the policy's [keep] says where such files may go: a place covers itself and everything below it, part by
    part, so `s3://runs/team` does not cover `s3://runs/team-b`. Without a list any store may be named.

    Example:
        submit_job(keep="s3://somebody-elses-bucket/x")  # [keep] stores = ["s3://training-runs/team-a"]

    Instead:
        submit_job(keep="s3://training-runs/team-a/llama")  # below a place of the list

    """
    if facts.spec.keep and not facts.policy.keep.allows(facts.spec.keep):
        listed = ", ".join(facts.policy.keep.stores[:5])
        yield Found(f"the user's policy does not let a job keep its outputs in {facts.spec.keep}; it lists {listed}")
