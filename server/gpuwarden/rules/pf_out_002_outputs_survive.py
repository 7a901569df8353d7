from collections.abc import Iterator

from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-OUT-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Write to a path that survives, specify an artifact store, or pull the outputs in time.",
)
def outputs_survive(facts: SubmitFacts) -> Iterator[Found]:
    """Outputs are written to paths that survive the planned teardown, the job's end and interruptions.

    Why: each platform deletes different paths at different times. It is a mistake to choose a path that does not
    survive if another path on the same machine would. If no path survives the teardown, the outputs must be pulled
    first, which the teardown gate enforces. If the platform itself terminates the machine when the job ends, as it does
    for a managed job, the outputs can be kept only in an artifact store.

    Example:
        submit_job(platform="runpod", outputs=["/opt/out"], teardown="stop")  # a stop wipes /opt

    Instead:
        submit_job(platform="runpod", outputs=["/workspace/out"], teardown="stop")

    """
    if facts.profile is None:
        return
    for output in facts.spec.outputs:
        yield from _judge(facts, facts.profile, output)


def _judge(facts: SubmitFacts, profile: Profile, output: str) -> Iterator[Found]:
    spec, asked = facts.spec, facts.spec.durable_storage
    path = profile.place_of(output)
    ends = not profile.survives(path, "job_end", requested=asked)
    if ends and not spec.artifact_store:
        yield Found(f"{output} is deleted when the job ends, before it can be pulled")
    if spec.interruptible and not profile.survives(path, "preemption", requested=asked):
        held = Severity.WARNING if ends and spec.artifact_store else None  # uploaded right after each save
        yield Found(f"{output} is deleted when the platform reclaims the machine", severity=held)
    if ends and spec.artifact_store:
        return
    if not facts.metered or profile.survives(path, spec.teardown, requested=asked):
        return
    better = sorted(
        tier.path
        for tier in profile.tiers(requested=asked)
        if profile.survives(tier.path, spec.teardown, requested=asked)
    )
    if better:
        yield Found(
            f"{output} does not survive {spec.teardown}; {', '.join(better)} would",
            fix=f"Write it under {better[0]}.",
        )
    else:
        yield Found(
            f"{output} does not survive {spec.teardown}, and neither does any other path on this machine",
            fix="No change is needed now. Pull and verify it before the teardown, as the teardown gate requires.",
            severity=Severity.WARNING,
        )
