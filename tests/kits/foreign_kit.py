"""Public training scripts for the submit gate: the list, their jobs, and a Hub with their repos."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gpuwarden.core.models import JobSpec, Known, Quote
from gpuwarden.core.policy import Policy, Secrets
from gpuwarden.core.repos import Column, Config, Repo, Split, Structure
from gpuwarden.core.rules import Finding, run_rules
from gpuwarden.hub.facts import Account, HubFacts, RepoFact
from gpuwarden.profiles import load_profile
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.hub_references import RepoUse
from gpuwarden.static_analysis.script import read_script
from paths import CORPUS

PLATFORMS = ("runpod", "hf-jobs")
REPO = "me/model"
DURABLE = f"/hub/models/{REPO}"
POLICY = Policy(secrets=Secrets(allowed=("*",)))


@dataclass(frozen=True)
class Script:
    """One public script, its job, and the correct refusals.

    `push` lists the arguments that make it push to `REPO`. `refused` lists the correct refusals on every platform, and
    `hub` those of a job that must push: the start of the rule's id, words from its message, and the reason. `note`
    explains why a second reader changed the arguments or the labels.
    """

    repo: str
    commit: str
    path: str
    unseen: bool = False
    args: tuple[str, ...] = ()
    push: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    refused: tuple[tuple[str, str, str], ...] = ()
    hub: tuple[tuple[str, str, str], ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """Return the repo and the path."""
        return f"{self.repo}/{self.path}"

    def right(self, finding: Finding, platform: str) -> bool:
        """Return whether the script's labels include a refusal."""
        labels = (*self.refused, *(self.hub if platform == "hf-jobs" else ()))
        return any(finding.rule.startswith(rule) and words in finding.message for rule, words, _ in labels)


@dataclass(frozen=True)
class Job:
    """A script's text and the job around it."""

    text: str
    args: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    secrets: tuple[str, ...] = ("HF_TOKEN", "WANDB_API_KEY", "TRACKIO_TOKEN")
    platform: str = "runpod"
    spec: dict[str, Any] = field(default_factory=dict)


def scripts() -> tuple[Script, ...]:
    """Return the listed scripts."""
    lines = (CORPUS / "foreign_scripts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Script(**{k: _tuples(v) for k, v in json.loads(line).items()}) for line in lines)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def fetch(cache_folder: Path, mirrors: Path | None, listed: Sequence[Script] | None = None) -> Iterator[str]:
    """Fetch scripts into a folder, by default the corpus; yield a line for each script that can't be fetched.

    They come from GitHub, or from `mirrors`, a folder of git directories named `owner+name`.
    """
    for script in scripts() if listed is None else listed:
        target = cache_folder / script.repo / script.path
        if target.exists():
            continue
        git_dir = cache_folder / ".git" / script.repo.replace("/", "+")
        if mirrors is not None:
            git_dir = mirrors / script.repo.replace("/", "+") / "repo"
        elif not git_dir.exists():
            _git("init", "--quiet", "--bare", str(git_dir))
        address = f"https://github.com/{script.repo}"
        if mirrors is None and _git(f"--git-dir={git_dir}", "cat-file", "-e", script.commit).returncode:
            _git(f"--git-dir={git_dir}", "fetch", "--quiet", "--depth=1", address, script.commit)
        shown = _git(f"--git-dir={git_dir}", "show", f"{script.commit}:{script.path}")
        if shown.returncode:
            yield f"{script.name}: {shown.stderr.decode(errors='replace').strip()}"
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(shown.stdout)


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], capture_output=True, check=False)


def job_of(script: Script, folder: Path, platform: str) -> Job:
    """Return a script's job. On a serverless platform the job must push; on others its folder is pulled."""
    text = (folder / script.repo / script.path).read_text(encoding="utf-8")
    if platform == "hf-jobs":
        return Job(text, (*script.args, *script.push), (DURABLE,), platform=platform)
    return Job(text, script.args, script.outputs, platform=platform)


def findings(job: Job) -> list[Finding]:
    """Return the submit gate's findings for a job."""
    read = read_script(job.text, {}, job.args)
    given = {"gpu": "a100", "timeout_s": 14_400, **job.spec}
    spec = JobSpec(
        name="t",
        platform=job.platform,
        script=job.text,
        args=job.args,
        outputs=job.outputs,
        secrets=job.secrets,
        **given,
    )
    facts = SubmitFacts(
        spec=spec,
        policy=POLICY,
        profile=load_profile(job.platform, None),
        platforms=PLATFORMS,
        script=read,
        quote=Known(Quote(platform=job.platform, price_usd_per_hour=1.5, source="test", at=0.0)),
        hub=hub_facts_of(read.uses.repos, bool(read.uses.pushes), job),
    )
    return run_rules(rules_of("submit"), facts)


def hub_facts_of(uses: Sequence[RepoUse], pushes: bool, job: Job) -> HubFacts | None:
    if not uses and not pushes:
        return None
    account = Known(Account(name="me", role="write"))
    return HubFacts(tuple(RepoFact(use, repo_of(use)) for use in uses), account, "HF_TOKEN" in job.secrets)


def repo_of(use: RepoUse) -> Repo:
    """Return a repo from the table of known repos; other repos do not exist."""
    known = _table()
    name = known["renamed"].get(use.id, use.id)
    moved: dict[str, Any] = {"status": "renamed", "id_now": name} if name != use.id else {"status": "ok"}
    if use.type == "dataset" and name in known["datasets"]:
        configs = tuple(
            Config(
                name=name,
                splits=tuple(Split(name=s, rows=n) for s, n in about["splits"].items()),
                columns=tuple(Column(name=c, type="") for c in about.get("columns", ())),
            )
            for name, about in known["datasets"][name].items()
        )
        structure = Structure(configs=configs) if configs else Structure(known=False, why="not in the table")
        return Repo(id=use.id, type="dataset", **moved, access=True, sha="0" * 40, file_count=1, structure=structure)
    if use.type != "dataset" and name in known["models"]:
        params = known["models"][name]
        return Repo(id=use.id, type=use.type, **moved, access=True, sha="0" * 40, file_count=1, params=params)
    return Repo(id=use.id, type=use.type, status="missing", why=f"the Hub has no {use.type} with this id")


@cache
def _table() -> dict[str, Any]:
    return json.loads((CORPUS / "foreign_hub.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def with_splits() -> frozenset[str]:
    """Return the datasets whose splits and columns are in the table."""
    return frozenset(name for name, configs in _table()["datasets"].items() if configs)


def blocking(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that refuse a job."""
    return [f for f in found if f.blocks]
