"""Facts for rule examples: a healthy job and teardown, with changes by the test."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gpuwarden.core.guidance import steps
from gpuwarden.core.models import (
    Disclosure,
    InputFile,
    Instance,
    InstanceState,
    JobSpec,
    Known,
    Manifest,
    Quote,
    Verdict,
)
from gpuwarden.core.policy import Policy, Secrets
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.states import Job
from gpuwarden.profiles import load_profile
from gpuwarden.rules.facts import OutputFile, SubmitFacts, TeardownFacts
from gpuwarden.static_analysis.script import read_script
from paths import TESTS

FOLDER = TESTS / "rule_examples"
RENTED = load_profile("vastai")
OWNED = load_profile("local")


def changed(profile: Profile, part: str, **values: Any) -> Profile:
    """Return a profile with one of its blocks changed."""
    return profile.model_copy(update={part: getattr(profile, part).model_copy(update=values)})


def submit(profile: Profile | None = RENTED, **given: Any) -> SubmitFacts:
    """Return the facts of a healthy job; `given` replaces fields of the spec or of the facts."""
    mine = {k: given.pop(k) for k in tuple(given) if k in SubmitFacts.__dataclass_fields__}
    spec = {"platform": "vastai", "command": ("train",), "outputs": ("out",), "timeout_s": 1_000, **given}
    return SubmitFacts(
        **{
            "spec": JobSpec.model_validate(spec),
            "policy": Policy(),
            "profile": profile,
            "platforms": ("local", "vastai"),
            "quote": Known(Quote(platform="vastai", price_usd_per_hour=2.0, source="test", at=0)),
            **mine,
        }
    )


def script(text: str) -> SubmitFacts:
    """Return the facts of a job with this script."""
    spec = JobSpec(platform="vastai", script=text, outputs=("out",), timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(text))


CODE = InputFile(path="code/a.py", size=3, sha256="0" * 64)


def file(path: str = "out/a.safetensors", **more: Any) -> OutputFile:
    """Return an output file that is deleted with the machine and has a copy."""
    return OutputFile(**{"path": path, "size": 10, "tier": "disk", "dies": True, "copied": True, **more})


MACHINE = Known(Instance(id="i1", state=InstanceState.RUNNING, meter=True))


def teardown(**given: Any) -> TeardownFacts:
    """Return the facts of a machine that may be terminated: the job succeeded, and its files are copied and proven."""
    whole = {
        "job_id": "j1",
        "job_state": Job.SUCCEEDED,
        "verb": "terminate",
        "profile": RENTED,
        "machine": MACHINE,
        "files": Known((file(),)),
        "manifest": Manifest(taken_at=0, files=()),
        "copy_verdict": Verdict.PROVEN,
        "disclosure": Known(Disclosure()),
    }
    return TeardownFacts(**{**whole, **given})


def looked(rule_id: str, severity: Severity = Severity.ERROR) -> SubmitFacts:
    return submit(
        looked=(Finding(rule=rule_id, severity=severity, message="it can't be written", fix=steps("Fix it.")),)
    )


GONE = {"machine": Known(None)}
HEADER = '# /// script\n# requires-python = ">=3.11"\n# dependencies = [{}]\n# ///\nimport torch\n'
MISPLACED = submit(load_profile("runpod"), outputs=("/root/out",), teardown="stop")
EVERY_SECRET = Policy(secrets=Secrets(allowed=("*",)))
ANYWHERE = changed(RENTED, "limits", default_timeout_s=1800)


def example_files(folder: Path = FOLDER) -> dict[str, Path]:
    """Return the example files, keyed by the rule id at the start of their names."""
    return {"-".join(path.stem.split("_")[:3]).upper(): path for path in sorted(folder.glob("[pt][fd]_*.py"))}


@cache
def examples_of(path: Path) -> tuple[list[Any], list[Any]]:
    """Return the facts that fire a rule and those that don't. Loaded on demand: they read a trainer many times."""
    kept = runpy.run_path(str(path))
    return kept["FIRES"], kept["SILENT"]
