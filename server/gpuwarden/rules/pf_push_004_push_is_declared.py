from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

HUB_PATH = "/hub/models/"


@rule(
    "PF-PUSH-004",
    gate="submit",
    severity=Severity.WARNING,
    fix=do(Action.SET_ARGUMENT, "to include the repo, so that the repo is verified", name="outputs"),
)
def push_is_declared(facts: SubmitFacts) -> Iterator[Found]:
    """A serverless job that pushes to a repo declares the repo as an output.

    Why: only declared outputs are verified. A partial push looks like success in the log.

    Example:
        submit_job(platform="hf-jobs", script='model.push_to_hub("me/model")', outputs=["out"])

    Instead:
        submit_job(platform="hf-jobs", script='model.push_to_hub("me/model")', outputs=["/hub/models/me/model"])

    """
    if facts.profile is None or facts.profile.runner:
        return
    for target in sorted({p.target for p in facts.uses.pushes if p.target and "/" in p.target}):
        if not any(o.rstrip("/").endswith(f"/{target}") for o in facts.spec.outputs):
            yield Found(
                f"the job pushes to {target}, which is not a declared output",
                fix=do(Action.SET_ARGUMENT, name="outputs", add=f"{HUB_PATH}{target}"),
            )
