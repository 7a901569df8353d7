import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_FILES = ("dataset", "eval_dataset", "callback", "reward")
_SUFFIXES = re.compile(r"\.(jsonl?|csv|tsv|parquet|py|ya?ml)$")


@rule(
    "PF-IN-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add the file, or its folder, to inputs.",
)
def named_files_go_along(facts: SubmitFacts) -> Iterator[Found]:
    """Files named in a bundled trainer's settings are among the inputs.

    Why: the rented machine does not have this computer's files, so the trainer fails there immediately.

    Example:
        submit_job(script=sft, args=["--model", "Qwen/Qwen3-0.6B", "--dataset", "data/train.jsonl"])

    Instead:
        submit_job(script=sft, args=["--model", "Qwen/Qwen3-0.6B", "--dataset", "data/train.jsonl"], inputs=["data"])

    """
    typed = facts.uses.typed
    if typed is None or not facts.metered:
        return
    there = {PurePosixPath(file.path) for file in facts.inputs}
    named = {"config": typed.file, **{name: typed.text(name) for name in _FILES if name in typed.declared}}
    for name, value in named.items():
        for part in filter(None, value.split(",")):
            path = part.partition(".py:")[0] + ".py" if ".py:" in part else part
            if "://" in path or path.startswith("/") or not _SUFFIXES.search(path):
                continue
            if PurePosixPath(path) not in there:
                yield Found(f"--{name.replace('_', '-')} names {path}, which is not among the inputs")
