from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Use the new id.",
)
def repo_renamed(facts: SubmitFacts) -> Iterator[Found]:
    """Repos are referenced by their current ids.

    Why: an old id works through a redirect until a new repo is created under the old name. From then on, the job loads
    different weights or data under the same name, and its log does not show the difference.

    Example:
        AutoModel.from_pretrained("gpt2")
        load_dataset("squad", split="train")

    Instead:
        AutoModel.from_pretrained("openai-community/gpt2")
        load_dataset("rajpurkar/squad", split="train")

    """
    for fact in facts.hub.repos if facts.hub else ():
        if fact.repo.status == "renamed":
            yield Found(f"{fact.where} is now called {fact.repo.id_now}", fix=f"Use {named(fact.repo.id_now)}.")
