from dataclasses import replace

from gpuwarden.core.models import JobSpec
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit
from trainer_kit import shipped

SFT = shipped("sft")


def trainer(*args: str, **env: str) -> SubmitFacts:
    """Return the facts of a job with the bundled trainer and these arguments besides the model."""
    words = ("--model", "owner/model", *args)
    spec = JobSpec(platform="vastai", script=SFT, args=words, env=env, outputs=("out",), timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(SFT, env, words))


DATA = ("--dataset", "owner/data")
FIRES = [
    trainer(),
    trainer(*DATA, "--learning-rat", "0.1"),
    trainer(*DATA, "--learning-rate", "3"),
    trainer(*DATA, "--steps", "ten"),
    trainer(*DATA, "--precision", "int8"),
    trainer(*DATA, "--report", "tensorboard,wandb"),
    trainer(*DATA, "--batch-size", "6", "--micro-batch", "4"),
]
SILENT = [
    submit(),
    trainer(*DATA),
    trainer(TRAIN_DATASET="owner/data"),
    trainer("--config", "run.yaml"),
    trainer("--smoke"),
    trainer(*DATA, "--no-fast"),
    trainer(*DATA, "--report", "tensorboard,trackio", "--learning-rate", "0.001", "--cpu"),
]
