"""CONTRIBUTING.md, followed to the letter: each block is written to its file, and the result is run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Verdict
from gpuwarden.rules.catalog import rules_of
from paths import ROOT
from plugin_kit import Packages

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCK = re.compile(r"^( *)```\w+ (>> )?(\S+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COPIED = ("server", "profiles", "references", "skills", "tests", "pyproject.toml", "README.md")
RECIPES = [
    "A rule", "A checkpoint format", "A layout", "A backend", "A provider", "A profile", "An MCP tool", "A command",
    "An eval case", "A plug-in in a package of your own",
]  # fmt: skip
# Chosen for their short run time; `test_recipe_plugins_pass_the_contract_tests` runs whole contracts.
NODES = {
    "tests/rules/test_rules.py": (
        "test_a_rule_fires_only_on_its_firing_examples[PF-DISK-001]",
        "test_every_rule_has_firing_and_silent_examples",
        "test_the_page_matches_the_generated_rules_page",
        "test_every_documented_example_is_python",
    ),
    "tests/checkpoints/test_wav.py": ("test_a_sound_is_proven_and_a_cut_one_refuted",),
    "tests/checkpoints/test_sentence_transformer.py": ("test_a_part_that_is_gone_is_missed",),
    "tests/backends/test_nice.py": ("TestNice::test_a_job_has_the_lowest_priority",),
    "tests/providers/test_contract.py": (
        "TestClouds::test_a_lost_create_reply_is_unknown_and_the_instance_is_found[mycloud]",
        "TestClouds::test_the_key_is_one_that_no_job_is_given[mycloud]",
    ),
    "tests/package/test_profiles.py": (
        "test_every_profile_has_its_expectations",
        "test_profiles_and_providers_refer_to_each_other",
        "test_the_generated_blocks_are_up_to_date[mycloud]",
        "test_the_prose_has_its_sections_and_every_block[mycloud]",
        "test_each_verb_has_the_expected_effect_on_the_bill[mycloud]",
        "test_paths_survive_the_expected_events[mycloud:/home/ubuntu/x]",
    ),
}
# Commands that a user types, and a client's call of the new tool; the answers come back as one JSON object.
COMMANDS = """
import contextlib, io, json, sys
from pathlib import Path
from gpuwarden.interfaces.cli.main import run

answers = {}
for words in (["rules", "--write"], ["profiles", "--write"], ["formats", "--json"], ["--help"], ["doctor", "--json"]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        answers[" ".join(words)] = [run(words), out.getvalue()]

import anyio
from mcp import Client
from gpuwarden.app import open_context
from gpuwarden.interfaces.mcp.server import make_server

async def call():
    async with Client(make_server(open_context("test"))) as client:
        return (await client.call_tool("list_formats", {})).structured_content

answers["tool"] = anyio.run(call)

sys.path.insert(0, "tests/kits")
from guard_kit import spellings, verdict
for n in ("hasty", "innocent"):
    answers[n] = [[s, verdict(s)] for s in spellings(n) if s.startswith("mycloud ")]
from clouds.platform import platforms
answers["platforms"] = [p.name for p in platforms()]
print(json.dumps(answers))
"""


def blocks(page: str = PAGE) -> list[tuple[str, bool, str]]:
    """Return the path of each block, whether it is appended, and its text."""
    return [(path, bool(more), textwrap.dedent(text)) for _, more, path, text in BLOCK.findall(page)]


def block(path: str) -> str:
    (text,) = (text for there, _, text in blocks() if there == path)
    return text


def follow(root: Path) -> None:
    """Copy the repository and write every block of the page into the copy."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("corpus", ".hypothesis")
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / name)
    for indent, more, path, text in BLOCK.findall(PAGE):
        file = root / path
        if path == "pyproject.toml":  # belongs to a separate package
            continue
        assert file.exists() is bool(more), path
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (line.removeprefix(indent) for line in text.splitlines())
        with file.open("a", encoding="utf-8") as target:
            target.write("\n".join(lines) + "\n")


def run_in(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    env |= {
        "PYTHONPATH": f"{root / 'server'}{os.pathsep}{root / 'tests' / 'kits'}",
        "GPUWARDEN_HOME": str(root / "home"),
    }
    return subprocess.run([sys.executable, *argv], cwd=root, env=env, capture_output=True, text=True, check=False)


def passed(root: Path, *nodes: str) -> dict[str, int]:
    """Run tests in the copy; return the number of passed tests per file. Fail if any test fails."""
    done = run_in(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=seen.xml", *nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, int] = {}
    for case in ET.parse(root / "seen.xml").iter("testcase"):
        file = f"{re.sub(r'[.]Test.*', '', case.attrib['classname']).replace('.', '/')}.py"
        found[file] = found.get(file, 0) + (case.find("skipped") is None)
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository to which the whole page was applied."""
    root = tmp_path_factory.mktemp("copy")
    follow(root)
    return root


@pytest.fixture(scope="module")
def answers(copy: Path) -> dict[str, Any]:
    """Return the answers of the commands and the tool, which also wrote the pages that tests compare."""
    done = run_in(copy, "-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def seen(copy: Path, answers: dict[str, Any]) -> dict[str, int]:
    """Return the number of passed tests per recipe."""
    return passed(copy, *(f"{file}::{name}" for file, names in NODES.items() for name in names))


def test_page_has_every_recipe() -> None:
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == RECIPES
    named = {path for path, _, _ in blocks()}
    existing = {"tests/rules/test_rules.py", "tests/providers/test_contract.py", "tests/package/test_profiles.py"}
    assert set(NODES) - named == existing
    assert len(re.findall(r"^ *```\w", PAGE, re.MULTILINE)) == len(blocks()), "a block without a file is not tested"


@pytest.mark.prove
@pytest.mark.parametrize("file", NODES)
def test_the_recipe_passes_its_test(seen: dict[str, int], file: str) -> None:
    assert seen.get(file, 0) == len(NODES[file])


@pytest.mark.slow
def test_the_rule_and_the_plugins_are_found(answers: dict[str, Any]) -> None:
    assert answers["rules --write"] == [0, "1 file changed\n"]
    assert answers["profiles --write"] == [0, "1 file changed\n"]
    checks = {c["what"]: c for c in json.loads(answers["doctor --json"][1])["checks"]}
    assert checks["plug-ins"]["ok"] and [w for w in checks if w.startswith(("rule ", "provider "))] == []


@pytest.mark.slow
def test_recipe_command_and_tool_list_the_formats(answers: dict[str, Any]) -> None:
    code, text = answers["formats --json"]
    formats = json.loads(text)["formats"]
    assert code == 0 and {"wav", "safetensors"} <= set(formats)
    assert re.search(r"(?s)Reference:.*\n  formats .*Knowledge and notes:", answers["--help"][1])
    assert answers["tool"]["ok"] and answers["tool"]["message"].split(", ") == formats


@pytest.mark.slow
def test_emulator_is_among_the_lifecycle_test_platforms(answers: dict[str, Any]) -> None:
    assert {"mycloud", "runpod"} <= set(answers["platforms"])


@pytest.mark.slow
def test_guard_recognizes_how_the_new_platform_ends_machines(answers: dict[str, Any]) -> None:
    ((_, stopped),), ((_, passing),) = answers["hasty"], answers["innocent"]
    assert stopped and passing is None


def test_eval_recipe_names_its_test() -> None:
    page = (ROOT / "evals" / "README.md").read_text("utf-8")
    assert "## Add a case" in page and "tests/evals/test_readme.py" in page


def test_a_package_of_your_own_brings_the_same_plugins(packages: Packages, tmp_path: Path) -> None:
    project = tomllib.loads(block("pyproject.toml"))["project"]
    files = {
        "gpuwarden_sounds_wav.py": block("server/gpuwarden/checkpoints/formats/wav.py"),
        "gpuwarden_sounds_disk.py": block("server/gpuwarden/rules/pf_disk_001_disk_big_enough.py"),
    }
    packages.add(project["name"], project["entry-points"], files)
    (tmp_path / "a.wav").write_bytes(b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd")
    assert verify(tmp_path / "a.wav", Level.LOAD).verdict is Verdict.PROVEN
    assert "PF-DISK-001" in {r.id for r in rules_of("submit")}


@pytest.mark.long
@pytest.mark.prove
def test_recipe_plugins_pass_the_contract_tests(copy: Path, answers: dict[str, Any]) -> None:
    life = "tests/lifecycle/test_clouds.py"
    found = passed(
        copy, "tests/backends/test_nice.py", "tests/providers/test_contract.py",
        f"{life}::test_the_whole_life_of_a_job", "-k", "nice or mycloud",
    )  # fmt: skip
    assert found.pop(life) == 1
    assert len(found) == 2 and min(found.values()) > 10
