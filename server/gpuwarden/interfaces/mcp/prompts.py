"""Three prompts that the user can select in a client. They only name tools; the tools enforce the rules."""

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

1. Check the model and the dataset with hub_repo_details. If a name is not found, search with dataset_search. Never
   guess a name.
2. Use a matching template unchanged, such as gpuwarden://templates/sft; the skill's table lists them. Only if no
   template matches, write the script, with its outputs, its checkpoints and its resume path, and show it to me.
3. Call submit_job with dry_run. Fix every finding. Show me the price, the worst-case cost, the storage that the
   platform deletes, and the storage that it keeps billing.
4. After my approval, call submit_job with only its receipt.
5. Call check_job within the first minute. The run has started only once check_job reports a first step.
"""


def debug_run(job_id: str) -> str:
    """Find out why a run failed or stalled."""
    return f"""\
The job {line(job_id, 64)} failed, stalled or reported implausible numbers. Find out why.

Read skill://training-debug/SKILL.md first. Then:

1. Call check_job. Its diagnoses are possible causes with their log lines; check those lines in the log, and
   read further back with log_cursor. The first error matters, not the last.
2. Search for each unexplained line with search_references; pass the raw line.
3. State the cause, the evidence for it and how certain you are, before you change anything. If several causes fit,
   name the observation that would distinguish between them.
4. Change one thing and submit it as a new job. Do not retry a memory, NaN, code or digest fault without a change.

The machine may still be billed: report this, with the cost so far. Do not tear down a machine because its run is
broken; its saved files may be the only copy.
"""


def finish_run(job_id: str) -> str:
    """Copy a run's results, verify them, and tear down its machine."""
    return f"""\
Finish the job {line(job_id, 64)} without losing work or leaving a billed machine behind.

Read skill://checkpoint-and-teardown/SKILL.md first. Then:

1. Call check_job: has it ended, and what did it write last?
2. Call pull_artifacts until nothing is missing, then verify_checkpoint. Report numbers only from the pulled files.
3. Ask me whether to stop or to terminate, and name the storage that the platform keeps and bills after each.
4. Call teardown_request. Show me its list unchanged. Only I can approve it; no argument does.
5. Call list_instances until the machine is gone or stopped, then name everything that is still billed.
"""
