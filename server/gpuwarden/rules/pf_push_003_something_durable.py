from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PUSH-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Push to the Hub (push_to_hub, hub_model_id and HF_TOKEN in secrets), write to a mounted bucket, "
    "or specify an artifact store.",
)
def something_durable(facts: SubmitFacts) -> Iterator[Found]:
    """On a platform that deletes the machine when the job ends, the job itself stores its results elsewhere.

    Why: after the job ends, no machine is left to pull from. A job that only writes to its disk succeeds and silently
    loses everything.

    Example:
        submit_job(platform="hf-jobs", script='trainer.save_model("out")', outputs=["out"])

    Instead:
        submit_job(platform="hf-jobs", script='model.push_to_hub("me/model")', secrets=["HF_TOKEN"])

    """
    profile, spec = facts.profile, facts.spec
    pushes = facts.uses.pushes
    if profile is None or profile.kind != "serverless" or spec.artifact_store or any(not p.maybe for p in pushes):
        return
    lives = [
        o for o in spec.outputs if profile.survives(profile.place_of(o), "job_end", requested=spec.durable_storage)
    ]
    if not lives:
        message = f"{spec.platform} deletes a job's files when the job ends, and no push to the Hub is certain"
        question = pushes or facts.uses.savers
        yield Found(message, severity=Severity.WARNING if question else None)
