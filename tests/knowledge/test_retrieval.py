"""Search, evaluated with queries that were written independently of the entries.

`corpus/queries.jsonl` was written before any score was known. Weights and wording were tuned on the open part only; the
part marked `held` was scored once, at the end. Queries of the kind `none` are off topic and should get no answer.

`corpus/issues.jsonl` paraphrases failures from public issues, in rounds. Each round was written before its score was
known, then scored, and only then were its misses examined and fixed. Only a round's first score therefore shows the
results for new users. The shares with the right answer first and in the first three: a 0.68 and 0.78, b 0.80 and 0.88,
c 0.67 and 0.73, d 0.68 and 0.80, e 0.73 and 0.87, f (a short one) 0.63 and 0.81.

For g, the titles and first lines of 210 reports were pasted unchanged; their texts aren't stored here. 46 of them,
scored before any change: 0.70 first and 0.83 in three, with reports that no entry answers counted as missed. 118 more,
each part scored before it was read: 0.59 and 0.75 (0.58 and 0.74 with the earlier search and entries). An error's own
line is therefore answered well, and a new user's prose less well than the sentences below. Some of both were then
paraphrased here. (The other 46 were read while entries were being written, so their scores, 0.83 and 0.89, mean
little.)
"""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.knowledge import Hit, search, shipped, track_record
from gpuwarden.knowledge.failure import Reading
from gpuwarden.knowledge.search import frequencies
from gpuwarden.knowledge.track_record import records, runtime_wordings
from paths import CORPUS, ROOT

_SPEC = importlib.util.spec_from_file_location("score_reports", ROOT / "tools" / "score_reports.py")
assert _SPEC is not None and _SPEC.loader is not None
score_reports = importlib.util.module_from_spec(_SPEC)
sys.modules["score_reports"] = score_reports
_SPEC.loader.exec_module(score_reports)
QUERIES = CORPUS / "queries.jsonl"


@cache
def queries() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in QUERIES.read_text(encoding="utf-8").splitlines())


def name(hit: Hit) -> str:
    return hit.id if hit.kind == "gotcha" else hit.page


def shares(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the shares of queries whose right answer comes first, and within the first three."""
    found = [[name(hit) for hit in search(shipped(), row["query"], 5)] for row in rows]
    first = sum(bool(names) and names[0] in row["want"] for row, names in zip(rows, found, strict=True))
    three = sum(bool(set(names[:3]) & set(row["want"])) for row, names in zip(rows, found, strict=True))
    return first / len(rows), three / len(rows)


def test_the_corpus_is_large_and_mixed_and_names_real_entries() -> None:
    asked = [row for row in queries() if row["want"]]
    assert len(asked) >= 150
    assert {row["kind"] for row in queries()} == {"plain", "page", "zh", "typo", "log", "none"}
    assert len({row["query"] for row in queries()}) == len(queries())
    told = [row for name in "abcdefg" for row in issues(name)]
    for want in {want for row in (*asked, *told) for want in row["want"]}:
        assert want in shipped().gotchas or want in shipped().pages, want


def test_entries_contain_no_copied_query() -> None:
    texts = [" . ".join((g.title, g.symptom, *g.aliases)).lower() for g in shipped().gotchas.values()]
    words = "\n".join(texts)
    ours = [r["query"] for r in queries() if r["kind"] in {"plain", "zh", "typo"}]
    told = [r["query"] for name in "abcdefg" for r in issues(name) if not any(c in r["query"] for c in ":[{(_'`")]
    copied = [query for query in (*ours, *told) if query.lower() in words]
    assert copied == []


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["open part", "held-out part"])
def test_the_right_entry_usually_comes_first(held: bool) -> None:
    first, three = shares([row for row in queries() if row["want"] and row["held"] is held])
    assert first >= 0.80, first
    assert three >= 0.92, three


def issues(round_: str) -> list[dict[str, Any]]:
    text = (QUERIES.parent / "issues.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if row["round"] == round_]


@pytest.mark.slow
@pytest.mark.parametrize("round_", ["a", "b", "c", "d", "e", "f", "g"])
def test_public_issues_find_their_entry(round_: str) -> None:
    rows = issues(round_)
    assert len(rows) >= 25
    first, three = shares(rows)
    assert first >= 0.80, first
    assert three >= 0.92, three


REPORTS = CORPUS / "reports"


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.jsonl")), ids=lambda p: p.stem)
def test_reports_are_well_formed_and_not_taken_from_the_references(path: Path) -> None:
    rows = score_reports.read(path)
    sources = {source for gotcha in shipped().gotchas.values() for source in gotcha.source}
    assert not {row.address.partition("#")[0] for row in rows} & sources
    assert len({row.address for row in rows}) == len(rows)


@pytest.mark.slow
def test_open_reports_usually_find_their_entry_and_match_the_track_records() -> None:
    found = []
    for path in sorted(REPORTS.glob("open-*.jsonl")):
        rows = list(score_reports.answers(score_reports.read(path)))
        assert sum(row.first for row in rows) >= 0.80 * len(rows), path.stem
        assert sum(row.in_three for row in rows) >= 0.92 * len(rows), path.stem
        likely = [row for row in rows if row.likely]
        assert sum(row.first for row in likely) >= 0.95 * len(likely), path.stem
        found += rows
    others = [*sorted(REPORTS.glob("judged-*.jsonl")), CORPUS / "issues.jsonl"]
    found += score_reports.answers(row for path in others for row in score_reports.read(path))
    assert score_reports.records(found) == records()


def test_entry_counts_match_the_open_reports() -> None:
    files = sorted(REPORTS.glob("open-*.jsonl"))
    counted = score_reports.frequencies(report for path in files for report in score_reports.read(path))
    assert dict(counted) == frequencies()
    assert set(counted) <= set(shipped().gotchas)


def test_a_signatures_track_record_decides_its_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    own, runtime = ("OOM-001", "CUDA out of memory"), ("HUB-040", "ModuleNotFoundError: No module named")
    assert runtime in runtime_wordings()
    assert own not in runtime_wordings()
    shares = {own: ((0, 0), (1, 1), (2, 2), (9, 10), (40, 41)), runtime: ((0, 0), (2, 2), (8, 8), (9, 9), (9, 10))}
    trust = {own: [False, False, True, False, True], runtime: [False, False, False, True, False]}
    for key, known in shares.items():
        found = []
        for share in known:
            monkeypatch.setattr(track_record, "records", lambda share=share, key=key: {key: share})
            found.append(track_record.trusted(*key))
        assert found == trust[key]


def test_generic_python_error_wordings_are_listed() -> None:
    for entry, signature in runtime_wordings():
        assert signature in shipped().gotchas[entry].signatures, (entry, signature)
    for wrong in (lambda: __import__("no_such"), lambda: Path("/no/such").read_text(), lambda: b"\xff".decode()):
        with pytest.raises((ImportError, OSError, ValueError)) as error:
            wrong()
        [hit, *_] = search(shipped(), f"{error.typename}: {error.value}")
        assert any(entry == hit.id for entry, _ in runtime_wordings()), error


def test_unrelated_queries_rarely_get_an_answer() -> None:
    rows = [row for row in queries() if not row["want"]]
    answered = [row["query"] for row in rows if search(shipped(), row["query"])]
    assert len(answered) <= len(rows) // 10, answered


@pytest.mark.parametrize("query", ["", "   ", "the of and", "?!", "\x00", "。。。", "a" * 100_000])
def test_a_query_without_content_gets_no_hits(query: str) -> None:
    assert search(shipped(), query) == ()


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=300), st.integers(1, 8))
def test_any_text_can_be_searched(query: str, limit: int) -> None:
    hits = search(shipped(), query, limit)
    assert len(hits) <= limit
    assert len({hit.id for hit in hits}) == len(hits)


def test_a_hit_for_a_log_line_quotes_it_as_evidence() -> None:
    [hit, *_] = search(shipped(), "RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error.")
    assert (hit.id, hit.how) == ("DATA-015", "signature")
    assert hit.lines[0].number == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("AttributeError: 'Accelerator' object has no attribute 'use_fp16'", "STK-001"),
        ("AttributeError: type object 'Trainer' has no attribute 'from_argparse_args'", "STK-042"),
    ],
)
def test_a_release_dependent_name_finds_the_release_entry(line: str, want: str) -> None:
    hit = search(shipped(), line)[0]
    assert (hit.id, hit.how, hit.lines[0].text) == (want, "signature", line)


def test_a_bare_assertion_is_matched_by_its_source_line() -> None:
    log = """
-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "speech/train.py", line 93, in run
    train_set = Loader(parameters.data)
  File "speech/data_utils.py", line 35, in __init__
    assert os.path.exists(self.names)
AssertionError
"""
    assert Reading(log).source == "assert os.path.exists(self.names)"
    assert Reading("ValueError: no frames here").source == ""
    assert search(shipped(), log)[0].id == "UNI-075"


@pytest.mark.parametrize(
    ("line", "want", "certainty"),
    [
        (
            "CalledProcessError: Command '['python', 'main.py', '--local_rank=0']' returned non-zero",
            "DIST-027",
            "possible",
        ),
        ("Given groups=1, weight of size [384, 80, 3], expected input[2, 128, 3000]", "STK-021", "possible"),
        (
            "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[2, 1, 64, 64]",
            "DATA-030",
            "possible",
        ),
        ("RuntimeError: CUDA error: out of memory", "OOM-003", "possible"),
        ("channel 2: open failed: connect failed: Connection refused", "UNI-089", "possible"),
        ("ModuleNotFoundError: No module named 'flux'", "HUB-040", "possible"),
        ("ModuleNotFoundError: No module named 'utils'", "STK-063", "likely"),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "UNI-028",
            "likely",
        ),
    ],
)
def test_a_lines_certainty_depends_on_its_possible_causes(line: str, want: str, certainty: str) -> None:
    hit = search(shipped(), line)[0]
    assert (hit.id, hit.certainty) == (want, certainty)


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ("| ep_len_mean | 9.4 |\n| ep_rew_mean | -203 |", "DOM-062"),
        (
            " Average Precision (AP) @[ IoU=0.50 | area= all ] = 0.000\n Average Recall (AR) @[ area= all ] = 0.000",
            "DOM-030",
        ),
    ],
)
def test_a_short_excerpt_without_a_step_finds_its_entry(lines: str, want: str) -> None:
    assert search(shipped(), lines)[0].id == want


def test_a_run_with_a_nan_evaluation_is_not_healthy() -> None:
    steps = [f"{{'loss': 1.{n}, 'epoch': 0.{n}}}" for n in range(1, 6)]
    assert search(shipped(), "\n".join(steps)) == ()
    steps.insert(3, "{'eval_loss': nan, 'epoch': 0.3}")
    assert search(shipped(), "\n".join(steps))[0].id == "PREC-011"


def test_lines_of_code_above_an_exception_are_not_searched() -> None:
    log = "    label_single_index = [l2i['l2i'][ls] for ls in label_single]\nKeyError: 'instruction'"
    assert search(shipped(), log)[0].id == "FMT-005"


def test_traceback_calls_supplement_a_vague_message() -> None:
    log = """
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/urllib3/connectionpool.py", line 700, in urlopen
    self._prepare_proxy(conn)
  File "/venv/lib/python3.11/site-packages/urllib3/connection.py", line 369, in _connect_tls_proxy
    return ssl_wrap_socket(sock)
OSError: 0
"""
    assert search(shipped(), log)[0].id == "UNI-052"


@pytest.mark.parametrize(
    ("query", "want"),
    [
        ("显存泄漏 训练越久占用越高", "OOM-023"),
        ("推理时模型像复读机 说个没完", "DOM-004"),
        ("服务器连不上外网 权重拉不下来", "UNI-051"),
        ("loss降不下来 停在2.3附近", "CONV-001"),
        ("全参微调 13B 四张卡还是超出显存", "OOM-014"),
    ],
)
def test_chinese_symptoms_find_their_entry(query: str, want: str) -> None:
    assert want in [hit.id for hit in search(shipped(), query, 3)]


def test_an_entry_is_found_by_its_own_id() -> None:
    for key in ("OOM-019", "PLAT-022"):
        assert search(shipped(), key)[0].id == key


@pytest.mark.slow
def test_answers_are_the_same_every_time() -> None:
    for row in queries()[:40]:
        assert search(shipped(), row["query"]) == search(shipped(), row["query"])
