from collections.abc import Iterator

from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-OUT-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Write to a path that outlives it, name an artifact store, or pull before it.",
)
def outputs_survive(facts: SubmitFacts) -> Iterator[Found]:
    """Outputs are written to paths that survive what will happen to the machine.

    Why: each platform wipes other paths at other moments. A path that dies although the same machine has one that lives
    is a mistake. Where every path dies with the teardown, pulling first is the only way, which the teardown gate will
    insist on. Where the platform itself ends the machine with the job, such as a managed job's, only an artifact store
    is left.

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
        yield Found(f"{output} is deleted when the job ends, before anybody can pull it")
    if spec.interruptible and not profile.survives(path, "preemption", requested=asked):
        held = Severity.WARNING if ends and spec.artifact_store else None  # it is uploaded as it is saved
        yield Found(f"{output} is deleted when the platform takes the machine back", severity=held)
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
            f"{output} is deleted by {spec.teardown}; {', '.join(better)} would outlive it",
            fix=f"Write it below {better[0]}.",
        )
    else:
        yield Found(
            f"{output} is deleted by {spec.teardown}, as is every path of this machine",
            fix="Nothing now: pull and verify it before teardown; the teardown gate waits for that.",
            severity=Severity.WARNING,
        )
