"""Seeded faults: the cases are well formed, and some of each kind run. `tools/seeded_faults.py` runs them all."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator

import pytest

from gpuwarden.rules.catalog import rules_of
from real_parts import need
from seeded import CORPUS, GATE, LOST, MACHINE, REHEARSAL, SURVIVES, Case, cases
from seeded.jobs import ARGS, Jobs, jobs_in, missing, replaced
from trainer_kit import shipped

CASES = {case.name: case for case in cases()}
# Two that the gate refuses, one that the trainer refuses, and one that the trainer survives.
SOME = ["dataset name with a typo", "evaluation_strategy", "data without rows", "killed in mid-run"]
MANY = bool(os.environ.get("GPUWARDEN_SEEDED_FAULTS"))
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks after PyTorch was imported")


def test_cases_are_numerous_varied_and_about_a_third_unseen() -> None:
    assert len(CASES) == len(cases()) >= 60
    assert len({case.kind for case in CASES.values()}) >= 6
    assert 0.2 < sum(case.unseen for case in CASES.values()) / len(CASES) < 0.47


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_has_a_valid_expected_outcome(case: Case) -> None:
    how, _, what = case.expect.partition(" ")
    assert how in {GATE, REHEARSAL, MACHINE, SURVIVES}
    assert how == SURVIVES or case.fix, "a refusal asks for a change"
    assert how != GATE or what in {rule.id for rule in rules_of("submit")}
    re.compile(case.names)
    assert case.source.startswith("https://github.com/") or (CORPUS.parents[1] / case.source).is_file()
    plain = (CORPUS / "plain" / f"{case.method}.py").read_text(encoding="utf-8")
    for side, text in (("plain", plain), ("text", shipped(case.method))):
        assert not case.fault.get(side) or replaced(text, case.fault[side]) != text
    changed = {part for part in ("args", "spec", "text", "token", "machine", "hub") if case.fault.get(part)}
    assert changed or case.fault.get("plain"), "the fault is put into the plain script at least"


@pytest.mark.slow
def test_packages_absent_from_a_header_are_missing_on_the_machine() -> None:
    text = (CORPUS / "plain" / "sft.py").read_text(encoding="utf-8")
    need("peft", importlib.util.find_spec("peft") is not None)
    assert "peft" not in missing(text)
    assert "peft" in missing(replaced(text, [['#   "peft>=0.21",\n', ""]]))


@pytest.mark.slow
def test_dependencies_of_uninstalled_packages_are_on_the_machine() -> None:
    need("pillow", importlib.util.find_spec("PIL") is not None)
    text = shipped("image_classification")
    without = replaced(text, [['#   "pillow>=11,<14",  # reads pictures\n', ""]])
    assert "PIL" not in missing(without), "torchvision brings pillow"
    bringers = tuple(f'#   "{name}' for name in ("torchvision", "tensorboard", "trackio"))
    others = [line for line in without.splitlines(keepends=True) if line.startswith(bringers)]
    assert len(others) == 3
    need("PIL", importlib.util.find_spec("PIL") is not None)
    assert "PIL" in missing(replaced(without, [[line, ""] for line in others]))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    for name in ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "albumentations"):
        need(name, importlib.util.find_spec(name) is not None)
    with jobs_in(tmp_path_factory.mktemp("seeded")) as made:
        yield made


@linux
@pytest.mark.prove
def test_a_job_without_a_fault_ends_well_on_both_sides(jobs: Jobs) -> None:
    for method in ARGS if MANY else ("sft",):
        case = Case("no fault", "control", method, "", {}, SURVIVES)
        assert (jobs.plain(case).how, jobs.guarded(case).how) == (SURVIVES, SURVIVES)


@linux
@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in CASES if MANY or name in SOME])
def test_a_fault_has_its_expected_outcome(jobs: Jobs, name: str) -> None:
    """If GPUWARDEN_SEEDED_FAULTS is set, every case runs, which takes half an hour."""
    guarded = jobs.guarded(CASES[name])
    assert guarded.agrees and guarded.how == CASES[name].expect.partition(" ")[0], guarded.words
    if not MANY:
        assert jobs.plain(CASES[name]).how == LOST


def test_the_page_has_figures_for_sixty_cases_including_unseen_cases() -> None:
    page = (CORPUS.parents[1] / "docs" / "seeded-faults.md").read_text(encoding="utf-8")
    table = page.partition("<!-- generated:seeded-faults -->")[2].partition("<!-- /generated -->")[0]
    measured = {name for name in CASES if f": {name} |" in table}
    assert any(CASES[name].unseen for name in measured)
    [shares] = re.findall(r"\| \*\*all\*\* \| (\d+) \| \d+ \((\d+)%\) \| \d+ \((\d+)%\) \|", table)
    assert int(shares[0]) == len(measured) >= 60
    assert int(shares[2]) >= 95 > int(shares[1])
