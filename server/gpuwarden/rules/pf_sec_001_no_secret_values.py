from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Remove the value, add its variable to secrets, and revoke the value if it was disclosed.",
)
def no_secret_values(facts: SubmitFacts) -> Iterator[Found]:
    """The command, the script and the environment contain no secret values.

    Why: arguments are visible to every process on the machine, and specs are stored in the ledger. Secrets are passed
    by name only; their values come from the user's environment and reach the job through a pipe. Revoke any value that
    was passed in an argument or a spec.

    Example:
        submit_job(env={"HF_TOKEN": "hf_..."}, script=train)  # the value itself
        submit_job(command=["train", "--token", "hf_..."])

    Instead:
        submit_job(secrets=["HF_TOKEN"], script=train)  # the name; the value is read from the environment
        submit_job(secrets=["HF_TOKEN"], command=["train"])

    """
    for leak in facts.leaks:
        yield Found(f"{leak.where} seems to contain {leak.looks_like}")
