from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-NODE-001",
    gate="submit",
    severity=Severity.WARNING,
    fix="Load the last complete checkpoint at every start, and test this by killing one worker.",
)
def restart_restores_state(facts: SubmitFacts) -> Iterator[Found]:
    """If the launcher restarts workers, the script loads its last checkpoint.

    Why: after a failure, torchrun re-forms the group and runs the script from the beginning. If the script loads no
    checkpoint, each restart begins at step 0, although the run looks healthy.

    Example:
        submit_job(command=["torchrun", "--nnodes=2", "--max-restarts=3", "train.py"], inputs=["train.py"])

    Instead:
        submit_job(command=["torchrun", "--nnodes=2", "--max-restarts=3", "train.py", "--resume"], inputs=["train.py"])

    """
    launch = facts.launch
    if launch.restarts and launch.restores is False:
        yield Found(f"workers are restarted up to {launch.restarts} times, but the script loads no saved state")
    elif launch.restarts and launch.restores is None:
        yield Found(
            f"workers are restarted up to {launch.restarts} times; it is unknown whether they load their saved state",
            severity=Severity.INFO,
        )
    if launch.fewest is not None and launch.workers is not None and launch.fewest >= launch.workers:
        yield Found(f"all {launch.workers} workers are required: if one is lost, the job pauses and then fails")
