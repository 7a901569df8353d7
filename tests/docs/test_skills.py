"""The skills: valid, short, and without broken references."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from gpuwarden.data import data_dir
from gpuwarden.frontmatter import read_front_matter
from gpuwarden.knowledge.freshness import check
from wording import Wording

SKILLS = sorted(path.parent for path in data_dir("skills").glob("*/SKILL.md"))
SCRIPTS = sorted(path for path in data_dir("skills").glob("*/scripts/*") if path.is_file())
ALLOWED = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}


def test_expected_skills_exist() -> None:
    assert {s.name for s in SKILLS} == {
        "gpu-training",
        "training-debug",
        "checkpoint-and-teardown",
        "dataset-preflight",
    }


@pytest.mark.parametrize("skill", SKILLS, ids=lambda s: s.name)
def test_front_matter_has_the_required_form(skill: Path) -> None:
    text = (skill / "SKILL.md").read_text(encoding="utf-8")
    data = read_front_matter(text, name=skill.name).data
    assert set(data) <= ALLOWED
    assert data["name"] == skill.name
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", data["name"])
    assert 100 <= len(data["description"]) <= 1024
    assert "---" not in data["description"]
    assert len(text.splitlines()) < 150
    assert "\r" not in text


@pytest.mark.parametrize("skill", SKILLS, ids=lambda s: s.name)
def test_reference_validator_accepts_each_skill(skill: Path) -> None:
    program = Path(sys.executable).parent / "agentskills"
    if not program.exists():
        pytest.skip("skills-ref is not installed here")
    done = subprocess.run([program, "validate", skill], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_references_in_pages_and_skills_resolve() -> None:
    issues = check(data_dir("references"), today=date(2026, 11, 21), more=(data_dir("skills"), data_dir("profiles")))
    assert [str(i) for i in issues if i.kind != "stale"] == []


@pytest.mark.parametrize("skill", SKILLS, ids=lambda s: s.name)
def test_every_script_is_mentioned_and_every_mention_exists(skill: Path) -> None:
    text = (skill / "SKILL.md").read_text(encoding="utf-8")
    mentioned = set(re.findall(r"scripts/([\w.]+)", text))
    assert mentioned == {path.name for path in (skill / "scripts").glob("*") if path.name != "__pycache__"}


def test_router_skill_states_the_law_and_names_the_expected_tools(wording: Wording) -> None:
    text = (data_dir("skills") / "gpu-training" / "SKILL.md").read_text(encoding="utf-8")
    (law,) = re.findall(r"^\*\*(.+)\*\*$", text, re.MULTILINE)
    wording(law)
    tools = {
        "hub_repo_details", "dataset_search", "submit_job", "check_job", "cancel_job", "pull_artifacts",
        "verify_checkpoint", "teardown_request", "list_instances", "search_references",
    }  # fmt: skip
    named = {word for word in re.findall(r"`([a-z]+_[a-z_]+)`", text) if word != "dry_run"}
    assert named == tools


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_stand_alone(script: Path, need_program: Callable[[str], str]) -> None:
    assert script.stat().st_mode & 0o111
    text = script.read_text(encoding="utf-8")
    assert "\r" not in text
    if script.suffix == ".sh":
        found = subprocess.run([need_program("shellcheck"), script], capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stdout
        return
    if "# /// script" in text:
        return  # its header declares its libraries: `trainers/test_trainers.py`
    tree = ast.parse(text, feature_version=(3, 8))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
