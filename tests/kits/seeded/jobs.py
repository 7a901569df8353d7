"""Run one case: the plain script without a gate, and the bundled trainer behind the submit gate."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import InputFile, Level, Verdict
from gpuwarden.core.rules import Finding, run_rules
from gpuwarden.rehearsal.hub.server import Fault, HubServer
from gpuwarden.rules.catalog import rules_of
from gpuwarden.static_analysis.ecosystem_tables import canonical_name, read_requirement
from gpuwarden.static_analysis.script import read_header, read_script
from hubserver import config, hub_server
from paths import KITS
from rulefacts import facts_for
from seeded import CORPUS, GATE, LOST, MACHINE, REHEARSAL, SURVIVES, WELL, Case
from seeded.machine import AGAIN
from seeded.supplies import EXPIRED, READER, STRANGER, TOKEN, lines, supply
from trainer_kit import Forking, rows_of, shipped

STEPS, HOURS = 8, 3
TOKENS = {"good": TOKEN, "reader": READER, "expired": EXPIRED, "stranger": STRANGER, "none": ""}
SPEC: dict[str, Any] = {
    "platform": "runpod",
    "gpu": "a10g-large",
    "timeout_s": 14_400,
    "estimate_s": HOURS * 3600,
    "outputs": ["out"],
    "secrets": ["HF_TOKEN"],
}
_TEXT = {"model": "lab/tiny-chat", "max-length": "128", "steps": str(STEPS), "save-steps": "2", "batch-size": "4"}
_ALL = {
    "micro-batch": "2",
    "logging-steps": "1",
    "cpu": True,
    "hub-model-id": "rehearsal/TARGET",
    "eval-fraction": "0.2",
}
ARGS: dict[str, dict[str, Any]] = {
    "sft": _TEXT | _ALL | {"dataset": "lab/chat"},
    "dpo": _TEXT | _ALL | {"dataset": "lab/pairs"},
    "cpt": _TEXT | _ALL | {"dataset": "lab/texts"},
    "grpo": _TEXT
    | _ALL
    | {"dataset": "lab/questions", "reward": "answer", "generations": "2", "max-completion-length": "8"},
    "image_classification": {k: v for k, v in _TEXT.items() if k != "max-length"}
    | _ALL
    | {"dataset": "lab/pictures", "model": "lab/tiny-vit"},
}
# Modules that a script's header may install; each is missing on the machine if the header does not list it.
WATCHED = ("peft", "PIL", "albumentations", "cv2", "datasets", "accelerate", "sentencepiece", "scipy", "pycocotools")

# Dependencies of header packages whose metadata is not installed here: torchvision 0.28, tensorboard 2.20.
ABSENT = {"torchvision": ("torch", "numpy", "pillow"), "tensorboard": ("numpy", "packaging", "pillow", "protobuf")}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job: whether it ended well, its kind, and the message that shows it."""

    how: str
    words: str = ""
    agrees: bool = True

    @property
    def well(self) -> bool:
        """Return whether the job survived, or was refused before a machine was paid for."""
        return self.how in WELL


class Jobs(Forking):
    """Job runs in one folder, against one Hub."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.folder, self.hub = folder, hub
        # An interrupted run leaves its job folders behind.
        self.numbers = (n for n in count() if not (folder / f"job-{n}").exists())
        self.known: dict[str, Outcome] = {}
        gone = ("HF_TOKEN", "HF_HUB_OFFLINE", "GPUWARDEN_METRICS")
        env = {k: v for k, v in os.environ.items() if k not in gone} | {
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": str(KITS), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip
        self.env = env
        self.program = [sys.executable, str(KITS / "seeded" / "machine.py")]
        super().__init__(self.program, env)

    # ---------------------------------------------------------------------------------------------- the two sides

    def plain(self, case: Case) -> Outcome:
        """Run the plain script with the fault, without the gate."""
        text = replaced((CORPUS / "plain" / f"{case.method}.py").read_text(encoding="utf-8"), case.fault.get("plain"))
        log, code, why = self.run(case.fault, text, [])
        return Outcome(LOST, f"exit {code}: {why or last_line(log)}") if code or why else Outcome(SURVIVES)

    def guarded(self, case: Case) -> Outcome:
        """Submit the bundled trainer with the fault; if it is refused, apply the fix and submit it again."""
        first = self.submitted(case, case.fault)
        agrees = first.how == case.expect.partition(" ")[0] and case.expect.partition(" ")[2] in first.words
        if first.how not in {GATE, REHEARSAL, MACHINE}:
            return replace(first, agrees=agrees)
        if not re.search(case.names, first.words):
            return Outcome(LOST, f"the fix is not named in: {first.words}", agrees=False)
        fixed = {n: v for n, v in {**case.fault, **case.fix}.items() if n not in {"plain", "cold"}}
        for part in ("args", "spec"):
            fixed[part] = {**case.fault.get(part, {}), **case.fix.get(part, {})}
        if granted := case.fix.get("grant"):
            self.grant(*granted)
        again = self.submitted(case, fixed)
        if again.how != SURVIVES:
            return Outcome(LOST, f"after the fix of {first.words[:80]}: {again.words}", agrees=False)
        return replace(first, agrees=agrees)

    def submitted(self, case: Case, fault: dict[str, Any]) -> Outcome:
        """Return the gate's refusal of the trainer, or, if it is accepted, the outcome of its run."""
        text = replaced(shipped(case.method), fault.get("text"))
        words = [*arguments(ARGS[case.method] | fault.get("args", {}))]
        if blocked := [f for f in self.gate(text, words, fault) if f.blocks]:
            said = "; ".join(f"{f.rule} {f.message} {[dict(step.parameters) for step in f.fix]}" for f in blocked)
            return Outcome(GATE, said)
        # A fix often results in a job that has already run, such as the one without a fault.
        changes = {n: v for n, v in fault.items() if n in {"machine", "hub", "restart", "cold"} and v}
        job = [text, sorted(words), SPEC | fault.get("spec", {}), fault.get("token", "good"), changes]
        same = json.dumps(job, sort_keys=True)
        if same in self.known:
            return self.known[same]
        log, code, why = self.run(fault, text, words)
        if not code and not why:
            self.known[same] = Outcome(SURVIVES)
            return Outcome(SURVIVES)
        named = [line for line in log.splitlines() if line.startswith(("ERROR", "FIX"))]
        if len(named) < 2 or why:
            return Outcome(LOST, f"exit {code}: {why or last_line(log)}")
        # A machine or Hub fault appears only there; any other fault appears when the command is rehearsed here.
        return Outcome(MACHINE if fault.get("machine") or fault.get("hub") else REHEARSAL, f"{code} {' '.join(named)}")

    def gate(self, text: str, words: list[str], fault: dict[str, Any]) -> list[Finding]:
        """Return the findings of the submit gate."""
        spec = SPEC | fault.get("spec", {})
        token = TOKENS[fault.get("token", "good")] or None
        platform = spec["platform"]
        given = {n: v for n, v in spec.items() if n not in {"platform", "inputs"}}
        facts = anyio.run(
            lambda: facts_for(text, hub=config(self.hub, token), platform=platform, args=tuple(words), **given)
        )
        if files := spec.get("inputs"):
            inputs = tuple(InputFile(path=name, size=1, sha256="0" * 64) for name in files)
            facts = replace(facts, inputs=inputs, script=read_script(text, {}, words, files))
        return run_rules(rules_of("submit"), facts)

    def grant(self, kind: str, name: str) -> None:
        """Give the account access to a gated repo, as its owner does once the terms are accepted."""
        repo = self.hub.store.get(kind, name)
        assert repo is not None
        repo.grants = ["rehearsal"]
        self.hub.store.save(repo)

    # --------------------------------------------------------------------------------------------------- one run

    def run(self, fault: dict[str, Any], text: str, words: list[str]) -> tuple[str, int, str]:
        """Run a script as a machine would; return its log, its exit code, and the problem with its result, if any."""
        number = next(self.numbers)
        home, spec = self.folder / f"job-{number}", SPEC | fault.get("spec", {})
        home.mkdir()
        for name in spec.get("inputs", ()):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(lines(rows_of("sft")))
        script, target = home / "train.py", f"t{number}"
        script.write_text(text.replace("rehearsal/TARGET", f"rehearsal/{target}"), encoding="utf-8")
        token = TOKENS[fault.get("token", "good")] if "HF_TOKEN" in spec["secrets"] else ""
        job = {
            "argv": [str(script), *(word.replace("TARGET", target) for word in words)],
            "cwd": str(home), "log": str(home / "log.txt"), "again": str(home / "again.json"),
            "steps": str(home / "steps.txt"), "env": {**spec.get("env", {}), **({"HF_TOKEN": token} if token else {})},
            "conditions": {"missing": missing(text), "steps": allowed(spec)} | fault.get("machine", {}),
        }  # fmt: skip
        self.hub.conditions.faults[:] = [Fault(**row) for row in fault.get("hub", ())]
        code = self.once(job, cold=bool(fault.get("cold")))
        if code and fault.get("restart"):
            code = self.once(job, cold=bool(fault.get("cold")))
        self.hub.conditions.clear()
        log = (home / "log.txt").read_text(errors="replace")
        return log, code, "" if code else self.why_bad(home, f"rehearsal/{target}")

    def once(self, job: dict[str, Any], *, cold: bool) -> int:
        """Run a job, and again if the process replaces itself; return its exit code."""
        code = self._cold(job) if cold else self.exit_code(job)
        if code != AGAIN:
            return code
        more = json.loads(Path(job["again"]).read_text())
        return self.exit_code({**job, "argv": more["argv"], "env": {**job["env"], **more["env"]}})

    def _cold(self, job: dict[str, Any]) -> int:
        file = Path(job["cwd"]) / "job.json"
        file.write_text(json.dumps(job))
        with Path(job["log"]).open("ab") as log:
            return subprocess.run(
                [*self.program, str(file)], stdout=log, stderr=log, env=self.env, check=False
            ).returncode

    def why_bad(self, home: Path, target: str) -> str:
        """Return the problem with a run that exited with 0, or an empty string if it ended well."""
        kept = sorted((home / "out").glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        if not kept:
            return "no checkpoint"
        state = json.loads((kept[-1] / "trainer_state.json").read_text())
        if state["global_step"] < STEPS:
            return f"{state['global_step']} of {STEPS} steps"
        norms = [entry["grad_norm"] for entry in state["log_history"] if "grad_norm" in entry]
        if not norms or not all(map(math.isfinite, norms)) or max(norms) == 0:
            return "nothing was learned: no gradient, or one that is not finite"
        if (said := verify(kept[-1], Level.RESUME)).verdict is not Verdict.PROVEN:
            return f"the last checkpoint is {said.verdict.name}: {said.reasons[:1]}"
        repo = self.hub.store.get("model", target)
        commit = repo.commit_of("main") if repo else None
        copy = home / "copy"
        for name, ref in commit.files.items() if commit else ():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(self.hub.store.blob(ref).read_bytes())
        if not list(copy.glob("*.safetensors")):
            return "nothing was kept outside the machine"
        said = verify(copy, Level.LOAD)
        return "" if said.verdict is Verdict.PROVEN else f"the pushed model is {said.verdict.name}: {said.reasons[:1]}"


@contextmanager
def jobs_in(folder: Path) -> Iterator[Jobs]:
    """Yield a `Jobs` for a folder, with its Hub."""
    with hub_server(folder / "hub", seeded=False, check=False) as hub:
        supply(hub.store)
        made = Jobs(folder, hub)
        try:
            yield made
        finally:
            made.close()


# ------------------------------------------------------------------------------------------------------- pieces


def replaced(text: str, changes: list[list[str]] | None) -> str:
    """Return a text with each replacement made. Raises AssertionError if one does not occur in it."""
    for old, new in changes or ():
        assert old in text, f"not in the script: {old}"
        text = text.replace(old, new)
    return text


def arguments(given: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a command line."""
    for name, value in given.items():
        if value is not None:
            yield from [f"--{name}"] if value is True else [f"--{name}", str(value)]


def allowed(spec: dict[str, Any]) -> int:
    """Return the step at whose end the timeout expires: the job takes three hours for its eight steps."""
    timeout = spec["timeout_s"] or (1800 if spec["platform"] == "hf-jobs" else 10**9)
    return int(STEPS * timeout / (HOURS * 3600)) + 1


def last_line(log: str) -> str:
    """Return the last informative line of a log."""
    return next((line.strip()[:200] for line in reversed(log.splitlines()) if line.strip()), "no output")


def missing(text: str) -> list[str]:
    """Return the watched modules that a script's header does not install."""
    try:
        header = read_header(text)
    except Exception:
        return []
    brought = closure(tuple(header.dependencies)) if header else frozenset()
    of = metadata.packages_distributions()
    return [name for name in WATCHED if not {canonical_name(d) for d in of.get(name, [])} & brought]


@cache
def closure(dependencies: tuple[str, ...]) -> frozenset[str]:
    """Return packages with all their dependencies, according to the metadata of the installed packages."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    todo = [canonical_name(r.name) for text in dependencies if (r := read_requirement(text))]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            todo += ABSENT.get(name, ())
            continue
        todo += [canonical_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return frozenset(found)
