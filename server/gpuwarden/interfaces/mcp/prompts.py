"""Three beginnings of a conversation that a person picks in a client. They name tools; the tools enforce the rules."""

from __future__ import annotations

from gpuwarden.core.sanitize import line

LIMIT = 2_000


def start_training_run(goal: str, platform: str = "") -> str:
    """Check, quote and launch a training run."""
    place = f"on the platform {line(platform, 80)}" if platform else "on a platform that we choose together"
    return f"""\
I want to start a training run {place}: {line(goal, LIMIT)}

Read skill://gpu-training/SKILL.md first, then gpuwarden://references/preflight.md and the platform's profile
(gpuwarden://profiles/<platform>.md). Then:

1. Check model and dataset with hub_repo_details; search with dataset_search when a name fails. Never guess a name.
2. Take a template that fits, unchanged: gpuwarden://templates/sft and its like, in the skill's table. Only where none
   fits, write the script, with its outputs, its checkpoints and where it resumes from, and let me see it.
3. Call submit_job with dry_run. Fix every finding. Show me the price, the worst cost, and what the platform deletes
   and goes on billing for.
4. After my word call submit_job with nothing but its receipt.
5. Call check_job within the first minute. The run has started when a first step is seen, not before.
"""


def debug_run(job_id: str) -> str:
    """Find out why a run failed or stalls."""
    return f"""\
The job {line(job_id, 64)} failed, stalls or gives odd numbers. Find out why.

Read skill://training-debug/SKILL.md first. Then:

1. Call check_job. Its diagnoses are possible causes with the lines that say so; look at those lines in the log, and
   read further back with log_cursor. The first error counts, not the last.
2. Look what is still unexplained up with search_references, with the raw line.
3. State the cause, the evidence for it and how certain you are, before you change anything. If several causes fit,
   name the observation that would decide between them.
4. Change one thing and submit it as a new job. Memory, NaN, code and digest faults are not retried unchanged.

The machine may be billing all the while: say so, with the cost so far. Nothing is torn down for being broken; what it
saved may be all there is.
"""


def finish_run(job_id: str) -> str:
    """Bring a run's results home, prove them, and end its machine."""
    return f"""\
Bring the job {line(job_id, 64)} to its end without losing work or leaving a meter running.

Read skill://checkpoint-and-teardown/SKILL.md first. Then:

1. Call check_job: has it ended, and what did it write last?
2. Call pull_artifacts until nothing is missing, then verify_checkpoint. Report numbers only from the pulled files.
3. Ask me whether to stop or to terminate, and say what the profile keeps and goes on billing for after each.
4. Call teardown_request. Show me what it lists as it is. I approve it; nothing that you pass does.
5. Call list_instances until the machine is seen gone or stopped, then name what still bills.
"""
