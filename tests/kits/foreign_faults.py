"""Twelve kinds of faults that are inserted into public training scripts automatically, and harmless changes.

Each kind changes one place in a script or its job, and skips scripts without a suitable place. A fault counts as
detected if the gate reports a finding that it does not report for the original script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreign_kit import Job, Script, job_of, with_splits

EACH = 10
CONTROLS = 30
Fault = Callable[[Job, ast.Module], "Job | None"]
_CONFIGURES = re.compile(r"\w*TrainingArguments|(SFT|DPO|GRPO|KTO|RLOO|Reward|ORPO|CPO|PRM|BCO|TPO|SDFT|XPO|GKD)Config")
_SAVES = frozenset(
    """save_pretrained save_model save_state save push_to_hub upload_folder save_lora_weights save_file
    save_pretrained_merged save_pretrained_gguf savefig save_image savez""".split()  # noqa: SIM905
)
_BROUGHT = frozenset({"torch", "transformers", "datasets", "accelerate", "huggingface_hub"})  # from other packages
_PUSHES = frozenset({"push_to_hub", "upload_folder"})


@dataclass(frozen=True)
class Seed:
    """A job with one fault, and a description of the change."""

    kind: str
    script: Script
    job: Job
    what: str = ""


def seeds(scripts: Sequence[Script], folder: Path) -> Iterator[Seed]:
    """Yield up to ten faults of each kind, spread over as many repositories as possible."""
    for kind, (platform, fault) in KINDS.items():
        yield from _some(kind, platform, fault, scripts, folder, EACH)


def controls(scripts: Sequence[Script], folder: Path) -> Iterator[Seed]:
    """Yield scripts with a harmless change."""
    yield from _some("control", "runpod", harmless, scripts, folder, CONTROLS)


def _some(kind: str, platform: str, fault: Fault, scripts: Sequence[Script], folder: Path, most: int) -> Iterator[Seed]:
    found = 0
    for script in in_turns(scripts):
        job = job_of(script, folder, platform)
        changed = fault(job, ast.parse(job.text))
        if changed is not None:
            yield Seed(kind, script, changed, difference(job, changed))
            found += 1
        if found == most:
            return


def in_turns(scripts: Sequence[Script]) -> Iterator[Script]:
    """Yield the scripts round-robin, one from each repository at a time."""
    by_repo: dict[str, list[Script]] = {}
    for script in scripts:
        by_repo.setdefault(script.repo, []).append(script)
    for n in range(max(map(len, by_repo.values()), default=0)):
        yield from (group[n] for group in by_repo.values() if n < len(group))


def difference(old: Job, new: Job) -> str:
    lines = set(old.text.splitlines())
    changed = [line.strip() for line in new.text.splitlines() if line not in lines]
    return "; ".join(changed[:2])[:160] or f"{new.args} {new.outputs} {new.secrets} {new.spec}"[:160]


def _replaced(job: Job, node: ast.expr | ast.stmt | ast.keyword | ast.alias, new: str) -> Job:
    """Return the job with one node of its script replaced."""
    lines = job.text.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: node.lineno - 1]) + node.col_offset
    end = sum(len(line.encode()) for line in lines[: (node.end_lineno or node.lineno) - 1]) + (node.end_col_offset or 0)
    raw = "".join(lines).encode()
    return replace(job, text=(raw[:start] + new.encode() + raw[end:]).decode())


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node


def keyword_typo(job: Job, tree: ast.Module) -> Job | None:
    for name, call in _calls(tree):
        for keyword in call.keywords if _CONFIGURES.fullmatch(name) else ():
            if keyword.arg in {"learning_rate", "per_device_train_batch_size", "logging_steps", "num_train_epochs"}:
                old = ast.get_source_segment(job.text, keyword) or ""
                return _replaced(job, keyword, old.replace("_", "__", 1))
    return None


def flag_typo(job: Job, tree: ast.Module) -> Job | None:
    if "--output_dir" not in job.args or not any(name.startswith("parse_") for name, _ in _calls(tree)):
        return None
    return replace(job, args=(*job.args, "--lerning_rat", "1e-5"))


def nothing_saved(job: Job, tree: ast.Module) -> Job | None:
    """Remove every statement that saves or pushes, and disable a trainer's saving.

    Skips scripts in which another call still saves, such as the assignment `best = saver.save_checkpoint(...)`.
    """
    statements = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and _called(n.value) in _SAVES
    ]
    configs = [call for name, call in _calls(tree) if _CONFIGURES.fullmatch(name)]
    if not statements and not configs:
        return None
    if any(name.endswith("Parser") for name, _ in _calls(tree)) and "--output_dir" in job.args:
        job = replace(job, args=(*job.args, "--save_strategy", "no"))
    for node in sorted(statements, key=lambda n: -n.lineno):
        job = _replaced(job, node, "pass")
    if any(name in _SAVES | {"save_checkpoint", "_save"} for name, _ in _calls(ast.parse(job.text))):
        return None
    for call in sorted(
        (c for _, c in _calls(ast.parse(job.text)) if _CONFIGURES.fullmatch(_called(c))), key=lambda c: -c.lineno
    ):
        given = {k.arg: k for k in call.keywords}
        if (old := given.get("save_strategy")) is not None:
            job = _replaced(job, old, 'save_strategy="no"')
        elif call.args or call.keywords:
            job = _added(job, call, 'save_strategy="no"')
    return job


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _added(job: Job, call: ast.Call, words: str) -> Job:
    """Return the job with a keyword added to a call, after its last argument and before any comment."""
    last = max((*call.args, *call.keywords), key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0))
    return _replaced(job, last, f"{ast.get_source_segment(job.text, last)}, {words}")


def wrong_repo(job: Job, tree: ast.Module) -> Job | None:
    for name, call in _calls(tree):
        if name in {"from_pretrained", "load_dataset"} and call.args:
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and "/" in first.value:
                return _replaced(job, first, repr(first.value + "-v9x"))
    if "--model_name_or_path" in job.args:
        at = job.args.index("--model_name_or_path") + 1
        return replace(job, args=(*job.args[:at], job.args[at] + "-v9x", *job.args[at + 1 :]))
    return None


def wrong_column(job: Job, tree: ast.Module) -> Job | None:
    """Give a preference or reward script rows with other columns, or misspell a column that a row function reads.

    Skips scripts without a dataset from the table of columns, because their rows could have the misspelled column.
    """
    if not any(name in job.text or name in job.args for name in with_splits()):
        return None
    if "trl-lib/ultrafeedback_binarized" in job.args:
        return replace(
            job, args=tuple("tatsu-lab/alpaca" if a == "trl-lib/ultrafeedback_binarized" else a for a in job.args)
        )
    rows = {n.args.args[0].arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda) and n.args.args}
    names = {"question", "answer", "problem", "instruction", "sentence1", "solution", "prompt", "quote"}
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)) as constant) if (
                name in rows and key in names and isinstance(node.ctx, ast.Load)
            ):
                return _replaced(job, constant, repr(key + "s_x"))
    return None


def missing_dependency(job: Job, tree: ast.Module) -> Job | None:
    roots = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    roots |= {n.module.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    for line in re.findall(r'(?m)^#\s+"[^"]+",?\s*$', job.text):
        package = re.sub(
            r"[^a-z0-9]", "_", line.lower().split('"')[1].split("[")[0].split(">")[0].split("=")[0].strip()
        )
        if package in roots and package not in _BROUGHT:
            return replace(job, text=job.text.replace(line + "\n", "", 1))
    return None


def no_token(job: Job, tree: ast.Module) -> Job | None:
    pushes = any(name in _PUSHES for name, _ in _calls(tree)) and "--push_to_hub" in job.args
    return replace(job, secrets=()) if pushes else None


def wrong_split(job: Job, tree: ast.Module) -> Job | None:
    for name, call in _calls(tree):
        for keyword in call.keywords if name == "load_dataset" and call.args else ():
            first = call.args[0]
            value = keyword.value
            if (
                isinstance(first, ast.Constant)
                and first.value in with_splits()
                and keyword.arg == "split"
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                wrong = re.sub("train|test|validation|dev", lambda part: f"{part[0]}s", value.value, count=1)
                return _replaced(job, value, repr(wrong)) if wrong != value.value else None
    return None


def removed_argument(job: Job, tree: ast.Module) -> Job | None:
    """Pass an argument that newer releases removed. Skip scripts without a header, whose releases are unknown."""
    if "unsloth" in job.text or "# /// script" not in job.text:
        return None
    for name, call in _calls(tree):
        if (
            _CONFIGURES.fullmatch(name)
            and call.keywords
            and "evaluation_strategy" not in {k.arg for k in call.keywords}
        ):
            return _added(job, call, 'evaluation_strategy="steps"')
    return None


def import_that_is_not_there(job: Job, tree: ast.Module) -> Job | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"trl", "transformers", "peft"}:
            alias = node.names[0]
            return _replaced(job, alias, f"{alias.name}s2 as {alias.asname or alias.name}")
    return None


def dying_disk(job: Job, tree: ast.Module) -> Job | None:
    if "out" not in job.args:
        return None
    args = tuple("/root/out" if a == "out" else a for a in job.args)
    return replace(job, args=args, outputs=("/root/out",), spec={**job.spec, "teardown": "stop"})


def short_timeout(job: Job, tree: ast.Module) -> Job | None:
    return replace(job, spec={**job.spec, "timeout_s": 60}) if "Trainer" in job.text else None


def harmless(job: Job, tree: ast.Module) -> Job | None:
    """Add code that never runs, and a comment."""
    text = job.text + (
        "\n\n# Sharing the model is a matter for another day.\n"
        "if False:\n    model.push_to_hub('somebody/else')\n    load_dataset('nobody/nothing', split='never')\n"
    )
    return replace(job, text=text)


KINDS: dict[str, tuple[str, Fault]] = {
    "keyword that does not exist": ("runpod", keyword_typo),
    "flag with a typo": ("runpod", flag_typo),
    "nothing saved": ("runpod", nothing_saved),
    "repo that does not exist": ("runpod", wrong_repo),
    "column that does not exist": ("runpod", wrong_column),
    "missing dependency": ("runpod", missing_dependency),
    "push without a token": ("hf-jobs", no_token),
    "split that does not exist": ("runpod", wrong_split),
    "argument that was removed": ("runpod", removed_argument),
    "import that does not exist": ("runpod", import_that_is_not_there),
    "output on a disk that dies": ("runpod", dying_disk),
    "timeout too short": ("runpod", short_timeout),
}
