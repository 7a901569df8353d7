from dataclasses import replace

from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit
from trainer_kit import shipped

SFT = shipped("sft")
ROWS = InputFile(path="data/train.jsonl", size=3, sha256="0" * 64)


def trainer(*args: str, inputs: tuple[InputFile, ...] = ()) -> SubmitFacts:
    """Return the facts of a job with the bundled trainer, these arguments and these files."""
    spec = JobSpec(platform="vastai", script=SFT, args=args, outputs=("out",), timeout_s=1_000)
    read = read_script(SFT, {}, args, [file.path for file in inputs])
    return replace(submit(), spec=spec, script=read, inputs=inputs)


FIRES = [trainer("--dataset", "data/train.jsonl"), trainer("--callback", "mine.py:Logger")]
SILENT = [
    submit(),
    trainer("--dataset", "owner/data"),
    trainer("--dataset", "https://example.org/train.jsonl"),
    trainer("--dataset", "/mnt/data/train.jsonl"),
    trainer("--dataset", "data/train.jsonl", inputs=(ROWS,)),
]
