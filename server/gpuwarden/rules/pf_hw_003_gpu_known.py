from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HW-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Name the GPU as the platform does; its profile lists the words.",
)
def gpu_known(facts: SubmitFacts) -> Iterator[Found]:
    """The GPU that is asked for is one we know.

    Why: nothing about memory or precision can be checked for a word that means nothing here. Whether the platform
    has it is for the quote to say.
    """
    word = facts.spec.gpu
    if word and facts.gpu is None and "cpu" not in word.lower():
        yield Found(f"{word!r} is no GPU that is known here, so what fits on it was not checked")
