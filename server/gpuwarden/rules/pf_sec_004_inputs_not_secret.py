from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-004",
    gate="submit",
    severity=Severity.ERROR,
    fix="Leave the file out, and pass the secret by listing its variable's name in secrets.",
)
def inputs_not_secret(facts: SubmitFacts) -> Iterator[Found]:
    """No input looks like a secret, by its name or by its content.

    Why: inputs are copied to someone else's machine and stay on its disk. A key in a code folder is copied with the
    folder, even though no argument names the key. Both file names and contents are checked against the patterns that
    are also used for logs.

    Example:
        submit_job(inputs=["code", "id_ed25519"], script=train)

    Instead:
        submit_job(inputs=["code"], secrets=["HF_TOKEN"], script=train)

    """
    for leak in facts.input_leaks[:10]:
        yield Found(f"the input {leak.where} looks like {leak.looks_like}")
    if len(facts.input_leaks) > 10:
        yield Found(f"{len(facts.input_leaks) - 10} more inputs look like secrets")
