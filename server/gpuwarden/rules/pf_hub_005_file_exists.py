from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use a file that exists in the repo.",
)
def file_exists(facts: SubmitFacts) -> Iterator[Found]:
    """The files that the script uses from a repo exist in the repo.

    Why: repos are reorganized, so a file name from an old example may no longer exist, and the download fails.

    Example:
        hf_hub_download("Qwen/Qwen3-0.6B", "pytorch_model.bin")  # the repo has model.safetensors

    Instead:
        hf_hub_download("Qwen/Qwen3-0.6B", "model.safetensors")

    """
    for fact in facts.hub.repos if facts.hub else ():
        wanted = fact.use.file
        if not wanted or wanted.startswith(("http", "hf:")) or fact.use.revision or not fact.repo.exists:
            continue
        if "revision" in fact.use.unknown:
            continue
        names = [f.path for f in fact.repo.files]
        if len(names) == fact.repo.file_count and not any(fnmatchcase(n, wanted) for n in names):
            suffix = "." + wanted.rpartition(".")[2]
            near = ", ".join(named(n) for n in [n for n in names if n.endswith(suffix)][:4])
            yield Found(
                f"{fact.where} has no file {wanted}",
                fix=f"The repo has {near}." if near else "",
                severity=None if fact.use.certain else Severity.WARNING,
            )
