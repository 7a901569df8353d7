import posixpath
from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import HUB_OUTPUTS, SubmitFacts


@rule(
    "PF-OUT-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Save the model there, or declare the path where the script saves it.",
)
def outputs_written(facts: SubmitFacts) -> Iterator[Found]:
    """The script writes every output that the job declares.

    Why: declaring an output does not make the script write it. If the spec names a repo and the script never pushes,
    the model is lost without an error. The outputs are compared with the files that trainers save and with the calls
    that save or push. If code that can't be analyzed may also write the output, or if the script saves to another
    folder that survives the job, the finding is a warning instead of an error. A script without any calls, such as one
    with only a comment about its new location, writes no outputs. A save that may be skipped also counts as uncertain.

    Example:
        submit_job(script='torch.save(model.state_dict(), "results/model.pt")', outputs=["out"])

    Instead:
        submit_job(script='torch.save(model.state_dict(), "out/model.pt")', outputs=["out"])

    """
    uses = facts.uses
    if facts.script is None or facts.script.error or not (uses.trains or uses.empty):
        return
    for output in facts.spec.outputs:
        if output.startswith(HUB_OUTPUTS):
            yield from _pushed(facts, output)
        elif uses.typed is None:  # PF-OUT-003 checks a bundled trainer's output folder
            yield from _written(facts, output)


def _pushed(facts: SubmitFacts, output: str) -> Iterator[Found]:
    """Report a declared repo if the script does not push to it."""
    pushes = facts.uses.pushes
    wanted = "/".join(output.split("/")[3:5])
    if any(p.target == wanted and not p.maybe for p in pushes):
        return
    possible = [p for p in pushes if p.maybe or p.target in {None, "?", wanted} or "/" not in (p.target or "")]
    others = ", ".join(sorted({p.target for p in pushes if p.target and p.target != "?"}))
    message = f"nothing in the script pushes to {wanted}" + (f"; it pushes to {others}" if others else "")
    fix = f'Push to it: push_to_hub=True and hub_model_id="{wanted}", or model.push_to_hub("{wanted}").'
    if possible or facts.uses.configured:
        yield Found(f"it is unknown whether the script pushes to {wanted}", fix=fix, severity=Severity.WARNING)
    else:
        yield _judged(facts, message, fix)


def _written(facts: SubmitFacts, output: str) -> Iterator[Found]:
    """Report a declared file or folder if the script does not save to it."""
    writes = facts.uses.writes
    if any(w.path is not None and not w.maybe and _overlap(facts, w.path, output) for w in writes):
        return
    unclear = next((w for w in writes if w.path is None or _overlap(facts, w.path, output)), None)
    if unclear is not None:
        message = f"it is unknown whether the script saves to {output}: line {unclear.line} saves with {unclear.via}"
        yield Found(message, severity=Severity.INFO if unclear.path is None else Severity.WARNING)
        return
    elsewhere = sorted({w.path for w in writes if w.path})
    message = f"nothing in the script saves to {output}" + (
        f"; it saves to {', '.join(elsewhere)}" if elsewhere else ""
    )
    profile, durable = facts.profile, facts.spec.durable_storage
    if profile is not None and any(
        profile.survives(profile.place_of(path), "job_end", requested=durable) for path in elsewhere
    ):  # the teardown gate will report it as undeclared
        yield Found(message, severity=Severity.WARNING)
    else:
        yield _judged(facts, message)


def _judged(facts: SubmitFacts, message: str, fix: str = "") -> Found:
    """Return an error, or a warning if unanalyzed code may write the output or if the platform is not metered."""
    unseen = facts.uses.savers
    if unseen:
        return Found(f"{message}; {unseen[0]}, which is not analyzed, may do so", fix=fix, severity=Severity.WARNING)
    return Found(message, fix=fix, severity=None if facts.metered else Severity.WARNING)


def _overlap(facts: SubmitFacts, path: str, output: str) -> bool:
    """Return true if one of two paths, relative to the job's working folder, contains the other."""
    place = facts.profile.place_of if facts.profile is not None else str
    one, other = (PurePosixPath(posixpath.normpath(place(p))) for p in (path, output))
    return one.is_relative_to(other) or other.is_relative_to(one)
