from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_KEYS = {"wandb": ("WANDB_API_KEY", "WANDB_MODE"), "comet_ml": ("COMET_API_KEY",), "swanlab": ("SWANLAB_API_KEY",)}


@rule(
    "PF-ENV-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Add the key to secrets, or report to another tracker.",
)
def tracker_key(facts: SubmitFacts) -> Iterator[Found]:
    """A job whose tracker needs a key gets the key.

    Why: a job has no terminal where a key could be entered, so the run ends at the tracker's first call.

    Example:
        TrainingArguments(output_dir="out", report_to="wandb")  # submit_job(secrets=[])

    Instead:
        TrainingArguments(output_dir="out", report_to="trackio")  # or submit_job(secrets=["WANDB_API_KEY"])

    """
    given = {*facts.spec.env, *facts.spec.secrets}
    reports = facts.uses.setting("report_to")
    for name in reports if isinstance(reports, list) else [reports]:
        keys = _KEYS.get(name, ()) if isinstance(name, str) else ()
        if keys and not given & set(keys):
            yield Found(f"the run reports to {name}, but {keys[0]} is not among the secrets")
