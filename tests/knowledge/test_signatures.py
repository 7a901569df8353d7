"""Signatures match their failures, match nothing in healthy logs, and never take long."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.knowledge import diagnose, shipped
from gpuwarden.knowledge.log_lines import MAX_LINE, MAX_LOG
from gpuwarden.knowledge.signatures import compiled_signature, complaint, literal_of
from hostile_lines import PAIRS, hostile_lines
from paths import CORPUS

HEALTHY = sorted((CORPUS / "logs" / "healthy").glob("*.log"))
EXAMPLES = [(g.id, line) for g in shipped().gotchas.values() for line in g.examples]


def test_there_are_enough_healthy_logs() -> None:
    assert len(HEALTHY) >= 40


@pytest.mark.parametrize("path", HEALTHY, ids=lambda p: p.stem)
def test_a_healthy_log_has_no_diagnosis(path: Path) -> None:
    found = diagnose(shipped(), path.read_bytes().decode(), exit_code=0, limit=50)
    assert [(d.id, d.lines[0].text) for d in found] == []


@pytest.mark.parametrize(("key", "line"), EXAMPLES, ids=[f"{i}-{n}" for n, (i, _) in enumerate(EXAMPLES)])
def test_an_example_inside_a_log_leads_to_its_entry(key: str, line: str) -> None:
    times = shipped().gotcha(key).least_lines
    repeated = "".join(f"{line}{' ' if n else ''}{n or ''}\n" for n in range(times))
    log = f"step 10 loss 1.21\n2026-11-21 10:00:00 INFO all well\n{repeated}last words\n"
    found = {d.id: d for d in diagnose(shipped(), log, limit=50)}
    assert key in found
    assert (found[key].lines[0].number, found[key].lines[0].text) == (3, line.strip())
    if times > 1:
        once = f"step 10\n{line}\nstep 11\n"
        assert key not in {d.id for d in diagnose(shipped(), once, limit=50)}
        assert key in {d.id for d in diagnose(shipped(), once, limit=50, excerpt=True)}


@pytest.mark.parametrize(("gotcha", "signature"), PAIRS, ids=[f"{g.id}-{n}" for n, (g, _) in enumerate(PAIRS)])
def test_every_match_contains_the_literal(gotcha: object, signature: str) -> None:
    regex = compiled_signature(signature)
    matched = [line for line in gotcha.examples if regex.search(line)]  # type: ignore[attr-defined]
    assert matched
    assert all(literal_of(signature) in m.group().lower() for m in map(regex.search, matched) if m)


@pytest.mark.slow
def test_every_signature_terminates_on_oversized_hostile_lines() -> None:
    """Together they take seconds; one signature with cubic cost in a line's length would take an hour."""
    for _, signature in PAIRS:
        regex = compiled_signature(signature)
        for line in hostile_lines(signature, 4 * MAX_LINE):
            match = regex.search(line)
            assert match is None or literal_of(signature) in match.group().lower()


@pytest.mark.parametrize(
    "bad",
    ["(a+)+b and", "(?:ab*)*cde", "x.*yyy", "(?!no)yes", "(abc)\\1", "a{2,}(b|c)+ddd", "abc.{0,9999}d", r"\w+ failed"],
)
def test_dangerous_patterns_are_refused(bad: str) -> None:
    assert complaint(bad) is not None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abc()[]{}|.*+?\\^$:!=,0123456789 -", max_size=40), st.text(alphabet="abc 012", max_size=60))
def test_every_match_of_an_accepted_pattern_contains_its_literal(pattern: str, line: str) -> None:
    if complaint(pattern) is None:
        match = compiled_signature(pattern).search(line)
        assert match is None or literal_of(pattern) in match.group().lower()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=3000), st.one_of(st.none(), st.integers(-300, 300)))
def test_any_text_can_be_diagnosed(log: str, code: int | None) -> None:
    for found in diagnose(shipped(), log, exit_code=code):
        assert found.lines
        assert all(len(line.text) <= 400 for line in found.lines)


@pytest.mark.prove
def test_a_flooded_log_has_bounded_cost_and_its_end_counts() -> None:
    rng = random.Random(7)
    noise = "".join(f"step {n} CUDA worker loss {rng.random():.6f} Error none\n" for n in range(60_000))
    assert len(noise) > 2 * MAX_LOG
    log = noise + "ValueError: Attempting to unscale FP16 gradients.\n"
    assert lines_run(lambda: diagnose(shipped(), 3 * noise + log)) < 1.1 * lines_run(lambda: diagnose(shipped(), log))
    [found] = diagnose(shipped(), log, limit=1)
    assert found.id == "PREC-005"
    assert found.lines[0].number == 60_001


def test_an_enormous_line_is_read_at_both_ends() -> None:
    line = (
        "CUDA out of memory"
        + "x" * 500_000
        + "Attempting to unscale FP16 gradients"
        + "x" * 400_000
        + "Read-only file system"
    )
    assert [d.id for d in diagnose(shipped(), line)] == ["UNI-047"]


def test_redrawn_bars_and_colours_do_not_hide_a_line() -> None:
    log = "train: 1%\rtrain: 2%\r\x1b[31mRuntimeError: CUDA error: device-side assert triggered\x1b[0m\n"
    found = diagnose(shipped(), log)
    assert {d.id: d.certainty for d in found} == {"CONV-016": "possible", "DOM-008": "possible"}, (
        "a bare assert has two"
    )


def test_a_follow_up_line_is_only_possible_and_comes_after_the_cause() -> None:
    log = (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    found = diagnose(shipped(), log, limit=5)
    assert [(d.id, d.certainty) for d in found] == [
        ("OOM-001", "likely"),
        ("DIST-025", "possible"),
        ("DIST-027", "possible"),
    ]


def test_two_explanations_of_a_line_are_both_only_possible() -> None:
    found = diagnose(shipped(), "OSError: [Errno 28] No space left on device\n")
    assert {d.id: d.certainty for d in found} == {"CKPT-004": "possible", "UNI-007": "possible"}
    found = diagnose(shipped(), "OSError: [Errno 28] No space left on device\ndisk: inodes 100 % used on /data\n")
    assert found[0].id == "UNI-007"


def test_the_exit_code_is_evidence_without_a_line() -> None:
    [found] = diagnose(shipped(), "step 1\nstep 2\n", exit_code=137)
    assert (found.id, found.lines[0].number, found.lines[0].text) == ("OOM-004", 0, "exit code 137")
    assert found.certainty == "possible"
    assert diagnose(shipped(), "Killed\n", exit_code=137)[0].certainty == "likely"
    assert diagnose(shipped(), "step 1\n", exit_code=1) == ()


def test_every_entry_has_a_signature_or_a_sign_or_a_reason_for_neither() -> None:
    for gotcha in shipped().gotchas.values():
        assert (gotcha.unsigned is None) == bool(gotcha.signatures or gotcha.signs), gotcha.id


def test_every_source_is_a_page_or_a_file() -> None:
    """Not a bare domain, a repository's front page, or a folder that Hugging Face's skills no longer have."""
    bare = re.compile(r"https://(?:[^/]+/?|github\.com/[^/]+/[^/]+/?)")
    for gotcha in shipped().gotchas.values():
        for source in gotcha.source:
            assert not bare.fullmatch(source), (gotcha.id, source)
            assert "huggingface/skills/blob/main/" not in source or "/main/skills/" in source, (gotcha.id, source)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("TypeError: unsupported operand type(s) for |: 'float' and 'bool'", "STK-015"),
        ("ERROR: HTTP error 403 Forbidden while getting https://example.org/simple/x", "HUB-022"),
        (
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://api.example.org/v1",
            "HUB-021",
        ),
        ("ValueError: Column to remove ['my_text'] not in the dataset. Current columns: ['a']", "STK-037"),
        ("403 Client Error: Forbidden for url: https://huggingface.co/org/x/resolve/main/config.json", "HUB-022"),
    ],
)
def test_an_unrelated_line_does_not_match_the_entry(line: str, wrong: str) -> None:
    assert wrong not in {found.id for found in diagnose(shipped(), line)}


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/api/repos/create", "HUB-022"),
        ("403 Client Error: Forbidden for url: https://hf.co/api/models/org/x/commit/main", "HUB-022"),
        ("403 Client Error: Forbidden for url: https://huggingface.co/org/x/resolve/main/config.json", "HUB-023"),
        ("TypeError: length_reward() missing 1 required positional argument: 'target'", "DOM-023"),
        ("/venv/libbitsandbytes_cpu.so: undefined symbol: cquantize_blockwise_fp16", "HUB-044"),
        ("torchrun_train.py: error: unrecognized arguments: --epochs 3 --local-rank=1", "DIST-069"),
        ("ValueError: Token must be specified for push to hub", "HUB-021"),
        ("There are no longer any instances available with the requested specifications. Please refresh", "PLAT-020"),
        ("    size mismatch for conv_out.bias: copying a param with shape torch.Size([19]) from", "CONV-020"),
        ("size mismatch for lm_head.weight: copying a param with shape torch.Size([3, 2]) from checkpoint", "CKPT-012"),
        ("KeyError: 'eval_bleu-4'", "CKPT-029"),
        ("The server socket has failed to bind to [node-0]:29500 (errno: 99 - Cannot assign it).", "DIST-032"),
        ("OSError: Not enough disk space. Needed: 231.74 GiB (download: 88.29 GiB, generated: 143.45 GiB)", "STK-036"),
    ],
)  # fmt: skip
def test_formerly_missed_lines_find_the_right_entry(line: str, right: str) -> None:
    assert diagnose(shipped(), line)[0].id == right
