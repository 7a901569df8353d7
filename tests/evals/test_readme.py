"""The README's instructions for adding a case, followed literally."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from evals.environments.stage import stages
from evals.harness.runner import agents
from evals.harness.skill_pack import ARMS
from evals.scoring import surface
from evals.scoring.cases import load_cases
from evals.scoring.checks import load_kinds
from evals.scoring.matching import OPERATORS
from evals.selftest.run import selftest
from evals.transcripts.loaders import formats

PAGE = (surface.HERE / "README.md").read_text("utf-8")
BLOCK = re.compile(r"```json (\S+)\n(.*?)```", re.DOTALL)


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    for name in ("cases.jsonl", "invariants.jsonl"):
        shutil.copy(surface.HERE / name, tmp_path / name)
    (tmp_path / "reference_transcripts").mkdir()
    blocks = BLOCK.findall(PAGE)
    assert [name for name, _ in blocks] == [
        "cases.jsonl",
        "reference_transcripts/token-set.jsonl",
        "reference_transcripts/token-unset.jsonl",
    ]
    for name, text in blocks:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(text)
    cases = load_cases(tmp_path / "cases.jsonl", tmp_path / "invariants.jsonl")
    assert "HF_TOKEN" in cases["token-unset"].scenario.hidden
    mine = {name: cases[name] for name in ("token-set", "token-unset")}
    report = selftest(mine, tmp_path / "reference_transcripts")
    assert report.faults == []
    assert report.mutants > 50


def test_readme_names_every_kind_operator_agent_stage_and_arm() -> None:
    section = PAGE.partition("\n## Checks\n")[2].partition("\n## ")[0]
    kinds = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(kinds) == set(load_kinds())
    assert len(load_kinds()) == 12
    assert not [name for name in OPERATORS if name not in PAGE]
    assert len(formats()) == 11
    assert not [name for name in (*agents(), *stages(), *ARMS) if f"`{name}`" not in PAGE]
