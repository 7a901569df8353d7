from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PUSH-002",
    gate="submit",
    severity=Severity.WARNING,
    fix='Set hub_model_id="owner/name".',
)
def target_named(facts: SubmitFacts) -> Iterator[Found]:
    """A push names its target repo.

    Why: without hub_model_id, the repo is named after output_dir, in the token owner's namespace. Two runs with the
    same output_dir then overwrite each other, and the result is hard to find.

    Example:
        SFTConfig(output_dir="out", push_to_hub=True)

    Instead:
        SFTConfig(output_dir="out", push_to_hub=True, hub_model_id="me/model")

    """
    for push in facts.uses.pushes:
        if push.target is None and not push.maybe and "**" not in facts.uses.settings:
            where = f"line {push.line}" if push.line else "the command line"
            yield Found(f"{where} pushes to the Hub without hub_model_id")
            return
