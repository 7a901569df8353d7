"""`gpuwarden search` and `gpuwarden knowledge`: one JSON object or plain lines, exit codes, and no file changed."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from datetime import date
from pathlib import Path

import pytest

from doors import answer, in_process
from gpuwarden.core.errors import BadRequest
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import parse_yaml
from gpuwarden.interfaces.cli import main
from gpuwarden.interfaces.cli.knowledge_maintenance import check_references
from wording import Wording

LESSON = (
    "--page", "training/oom-memory.md", "--title", "The frobnicator runs out of beans",
    "--symptom", "It stops with a frobnicator error.", "--cause", "The bean pool is fixed at start.",
    "--fix", "Set FROB_BEANS to twice the batch.", "--scope", "torch", "--source", "https://example.org/frob",
    "--line", "RuntimeError: frobnicator out of beans: wanted 4096, has 12",
)  # fmt: skip
BAR = ("--root-caused", "--reproduced", "--general")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def references() -> str:
    """Return a digest of all references."""
    files = sorted(data_dir("references").rglob("*.md"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


@pytest.mark.parametrize("words", [("-",), ()])
def test_search_reads_standard_input(home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    log = b"step 1 loss 2.5\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    body = answer(in_process(home, "search", *words, "--json"))
    assert body["hits"][0]["id"] == "OOM-001"


def test_search_without_words_at_a_terminal_is_wrong_usage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.StringIO()
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", typed)
    done = in_process(home, "search", "--json")
    assert (done.returncode, answer(done)["code"]) == (2, "bad_request")


@pytest.mark.slow
def test_search_on_the_command_line(home: Path, wording: Wording) -> None:
    done = in_process(home, "search", "CUDA out of memory.", "Tried to allocate 2.00 GiB", "--limit", "2", "--json")
    body = answer(done)
    assert done.returncode == 0 and body["hits"][0]["id"] == "OOM-001" and len(body["hits"]) <= 2
    assert not (home / "ledger.db").exists(), "a search needs no ledger"
    shown = in_process(home, "search", "CKPT-002")
    assert shown.returncode == 0 and shown.stdout.startswith("CKPT-002 "), "an id alone shows the entry whole"
    assert {"symptom", "cause", "fix", "source"} <= {line.split(" ")[0] for line in shown.stdout.splitlines()}
    assert ">-" not in shown.stdout and "```" not in shown.stdout, "a page for people, not the file's text"
    whole = answer(in_process(home, "search", "gpuwarden://entries/ckpt-002", "--json"))
    assert whole["id"] == "CKPT-002" and whole["cause"] and all(whole["see"].values())
    assert "gpuwarden search ID" in body["hint"] and "cause" not in body
    nothing = in_process(home, "search", "plum cake recipe")
    assert nothing.returncode == 0
    wording(" ".join(nothing.stdout.split()))
    assert not answer(in_process(home, "search", "plum cake recipe", "--json")).get("hits")
    assert answer(in_process(home, "search", " ", "--json"))["code"] == "bad_request"


@pytest.mark.slow
def test_diagnose_on_the_command_line(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1/9 loss 1.0\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n")
    body = answer(in_process(home, "diagnose", str(log), "--json"))
    assert body["failure"]["outcome"] == "failed" and body["diagnoses"][0]["id"] == "OOM-001"
    shown = in_process(home, "diagnose", str(log), "--exit-code", "1").stdout
    assert "OOM-001" in shown and "step 1/9 loss 1.0" in shown
    log.write_text("ZorkError: the flux is gone\n")
    unknown = answer(in_process(home, "diagnose", str(log), "--json"))
    assert not any(row["certainty"] == "likely" for row in unknown.get("diagnoses", []))
    assert unknown["query"] == "ZorkError: the flux is gone" and unknown["collect"]
    log.write_text("step 1/9 loss 1.0\nstep 2/9 loss 0.9\nstep 3/9 loss 0.8\n")
    assert answer(in_process(home, "diagnose", str(log), "--json"))["code"] == "nothing_failed"


@pytest.mark.slow
def test_stale_references_depend_on_the_date() -> None:
    fresh, old = check_references(date(2026, 11, 21), 6), check_references(date(2028, 1, 1), 6)
    assert fresh.ok and fresh.issues == [], [f"{i.file}:{i.line} {i.message}" for i in fresh.issues[:5]]
    assert not old.ok and len(old.issues) > 400
    urgent = [i.urgent for i in old.issues]
    assert urgent[0] and urgent == sorted(urgent, reverse=True), "money and destruction first"
    assert {i.file.split("/")[0] for i in old.issues} >= {"profiles", "training", "gotchas"}
    with pytest.raises(BadRequest):
        check_references(date(2026, 11, 21), -1)


@pytest.mark.slow
def test_knowledge_check_sets_its_exit_code(home: Path) -> None:
    done = in_process(home, "knowledge", "check", "--months", "1200", "--json")
    assert done.returncode == 0 and answer(done)["issues"] == []
    assert in_process(home, "knowledge", "check", "--months", "-1", "--json").returncode == 2
    now = in_process(home, "knowledge", "check", "--months", "0", "--json")
    assert now.returncode == (1 if answer(now)["issues"] else 0)


def test_a_proposal_is_shown_and_nothing_is_written(home: Path) -> None:
    before = references()
    done = in_process(home, "knowledge", "propose", *LESSON, *BAR, "--json")
    body = answer(done)
    assert done.returncode == 0 and body["page"] == "training/oom-memory.md" and body["known"] == []
    head, _, rest = body["text"].partition("```yaml gotcha\n")
    block = parse_yaml(rest.partition("```")[0], name="draft").value
    assert head.startswith("## OOM-") and "frobnicator out of beans" in block["signatures"][0]
    assert block["source"] == ["https://example.org/frob"] and len(block["verified"]) == 7
    assert "frobnicator" in in_process(home, "knowledge", "propose", *LESSON, *BAR).stdout
    assert references() == before


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*LESSON, "--reproduced", "--general"), id="no cause"),
        pytest.param((*LESSON, "--root-caused", "--general"), id="not reproduced"),
        pytest.param((*LESSON, "--root-caused", "--mechanistic"), id="not general"),
        pytest.param((*LESSON, *BAR, "--line", "KeyError: 3"), id="a common line"),
        pytest.param(("--page", "../../etc/passwd", *LESSON[2:], *BAR), id="no page"),
    ],
)
def test_a_proposal_below_the_bar_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    before = references()
    assert main.run(["knowledge", "propose", *words, "--json"]) != 0
    assert references() == before
    wording(json.loads(capsys.readouterr().out)["message"])


def test_proposal_with_a_plain_http_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    before = references()
    assert main.run(["knowledge", "propose", *LESSON, *BAR, "--source", "http://plain.example", "--json"]) != 0
    assert "source.1" in json.loads(capsys.readouterr().out)["message"] and references() == before


def test_known_line_in_a_proposal_is_reported(home: Path) -> None:
    known = ("--line", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    body = answer(in_process(home, "knowledge", "propose", *LESSON, *BAR, *known, "--json"))
    assert "OOM-001" in body["known"] and "OOM-001" in body["message"]
