"""No sentence repeats a fact that has another home, neither in words nor as a number from a profile or the code.

The kit is `onehome.py`. Planted repeats prove that it finds them; ALLOWED lists accepted repeats, each with a reason.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from gpuwarden.interfaces.cli.knowledge import knowledge_check
from onehome import (
    Fact,
    Sentence,
    constant,
    policy_facts,
    profile_facts,
    quantities,
    repeats,
    restated,
    sentences,
    split,
)
from paths import ROOT

ALLOWED = {
    "nothing is torn down before a verified copy exists outside the blast radius": (
        "the Iron Law: each skill is loaded alone, and none may be without it"
    ),
}
MONTHS = next(p.default for p in knowledge_check.params if p.name == "months")


@cache
def shipped() -> list[Sentence]:
    return sentences(ROOT)


def facts() -> list[Fact]:
    return [
        *profile_facts(ROOT),
        *policy_facts(),
        constant("interfaces/cli/knowledge.py (--months)", "months", MONTHS, "verified"),
    ]


def allowed(sentence: Sentence) -> bool:
    return " ".join(re.findall(r"[a-z]+", sentence.text.lower())) in ALLOWED


def test_every_kind_of_page_is_read() -> None:
    files = {s.file for s in shipped()}
    wanted = {
        "README.md",
        "AGENTS.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/policy.md",
        "references/principles.md",
        "references/gotchas/platforms.md",
    }
    assert wanted | {"references/gotchas/platforms.md"} <= files
    assert {f"skills/{p.parent.name}/SKILL.md" for p in ROOT.glob("skills/*/SKILL.md")} <= files
    assert {f"profiles/{p.name}" for p in ROOT.glob("profiles/*.md")} <= files
    assert len(shipped()) > 2_500 and len(facts()) > 20


def test_sentences_are_never_repeated_elsewhere() -> None:
    found = [f"{a}\n    {b}" for a, b, _ in repeats(shipped()) if not (allowed(a) and allowed(b))]
    assert found == [], "two places say the same; keep one and point to it:\n" + "\n".join(found)


def test_numbers_are_stated_only_at_their_home() -> None:
    found = restated(shipped(), facts())
    assert found == [], "point to the home instead:\n" + "\n".join(found)


@pytest.mark.slow
def test_every_allowed_repeat_is_still_needed() -> None:
    used = {" ".join(re.findall(r"[a-z]+", s.text.lower())) for a, b, _ in repeats(shipped()) for s in (a, b)}
    assert used == set(ALLOWED)


# ------------------------------------------------------------------------------------- the test can fail


def with_planted(page: str, text: str) -> list[Sentence]:
    """Return all sentences, with a text added at the end of a page."""
    about = frozenset({Path(page).stem}) if page.startswith("profiles/") else frozenset[str]()
    return [*shipped(), *split(page, 10_000, text, about)]


SAID = "The interval between checkpoints follows a formula by Young and Daly, with the mean time between interruptions."


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("references/monitoring.md", SAID),
        ("skills/training-debug/SKILL.md", "By Young and Daly the interval between two checkpoints follows a formula."),
        (
            "references/hardware.md",
            "It combines two sets of principles: for jobs that start reliably, for machines that cost.",
        ),
        (
            "README.md",
            "A repository that is private, gated or doesn't exist fails in its first minute, image paid for.",
        ),
        (
            "profiles/runpod.md",
            "Pods with a network volume are stopped and Pods without one terminated, unrecoverable.",
        ),
    ],
)
def test_a_planted_repeat_is_found_with_both_places(page: str, text: str) -> None:
    fresh = [(a, b) for a, b, _ in repeats(with_planted(page, text)) if not (allowed(a) and allowed(b))]
    assert fresh, "the planted repeat was not seen"
    for pair in fresh:
        [_] = [s for s in pair if (s.file, s.line) == (page, 10_000)]
        assert all(str(s).startswith(f"{s.file}:{s.line}: ") for s in pair)


@pytest.mark.parametrize(
    ("page", "text", "home"),
    [
        ("references/monitoring.md", "AutoDL lets a parked box go after fifteen days.", "profiles/autodl.md"),
        ("skills/gpu-training/SKILL.md", "On AutoDL that happens after 360 hours.", "profiles/autodl.md"),
        (
            "references/preflight.md",
            "On hf-jobs that is after 30 min.",
            "profiles/hf-jobs.md",
        ),
        ("README.md", "Featurize keeps 30 GB for nothing.", "profiles/featurize.md"),
        ("profiles/autodl.md", "Unlike Vast.ai (vastai), where it is 48 hours.", "profiles/vastai.md"),
        ("references/lifecycle.md", "A receipt has a ttl of 30 minutes.", "core/policy.py (receipt_ttl_s)"),
        ("AGENTS.md", "A fact is stale when it was verified six months ago.", "interfaces/cli/knowledge.py (--months)"),
    ],
)
def test_a_planted_number_is_found_with_its_home(page: str, text: str, home: str) -> None:
    [found] = restated(with_planted(page, text), facts())
    assert found.startswith(f"{page}:") and found.endswith(f"of {home}")


def test_an_entry_may_not_carry_a_number_of_its_platform(tmp_path: Path) -> None:
    for folder in ("references", "profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    page = tmp_path / "references" / "gotchas" / "platforms.md"
    text = page.read_text("utf-8")
    planted = r"\1Powered off for 15 days, it is released."
    page.write_text(re.sub(r"(## PLAT-005 .*?\ncause: >-\n  )[^\n]+", planted, text, count=1, flags=re.DOTALL), "utf-8")
    [found] = restated(sentences(tmp_path), facts())
    assert "references/gotchas/platforms.md:" in found and "profiles/autodl.md" in found


def test_similar_sentence_is_not_a_repeat() -> None:
    found = with_planted("references/monitoring.md", "A checkpoint is worth what its load is worth. AutoDL has 3 days.")
    assert [(a, b) for a, b, _ in repeats(found) if not (allowed(a) and allowed(b))] == []
    assert restated(found, facts()) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15 days", 1_296_000), ("fifteen days", 1_296_000), ("48-hour", 172_800), ("30 min", 1800), ("1,800 s", 1_800)],
)
def test_durations_are_normalized_to_seconds(text: str, seconds: float) -> None:
    assert list(quantities(f"after {text} it ends")) == [("time", seconds)]
    assert quantities("version 15.2-beta of v30s, 8x3 files.txt") == {}
