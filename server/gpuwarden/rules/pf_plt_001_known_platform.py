import difflib
from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLT-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use a platform that has a profile.",
)
def known_platform(facts: SubmitFacts) -> Iterator[Found]:
    """The platform has a profile.

    Why: without a profile, the effects of a stop on files and billing are unknown, so outputs can't be protected.

    Example:
        submit_job(platform="runpood", script=train)

    Instead:
        submit_job(platform="runpod", script=train)

    """
    if facts.profile is None:
        real = [name for name in facts.platforms if not name.startswith("rehearsal/")]
        near = difflib.get_close_matches(facts.spec.platform, facts.platforms, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        there = f"{', '.join(real)}, and rehearsal/NAME for a rented platform"
        yield Found(f"unknown platform {facts.spec.platform!r}{meant}; known platforms: {there}")
