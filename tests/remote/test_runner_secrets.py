"""Secrets reach the job's environment and nothing else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.remote.runner.redact import Redactor
from runner_kit import call, log, sh, until

SECRET = "hf_Zx9-very secret/value"


def test_a_secret_is_only_in_the_environment(folder: Path) -> None:
    text = 'test -n "$KEY" && echo "$KEY" | tee /dev/stderr; printf "%s" "${KEY%alue}"; sleep 0.1; echo alue; sleep 30'
    call("start", folder, sh(text, secrets={"KEY": SECRET}, env={"PLAIN": "1"}))
    seen = until(folder, lambda s: s["log_bytes"] >= len("***\n***\n***\n"))
    assert log(folder) == "***\n***\n***\n"
    assert seen["state"] == "running"
    held = [p for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert held == []
    for pid in (seen["pid"], seen["child_pid"]):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert SECRET.encode() not in Path(f"/proc/{seen['pid']}/environ").read_bytes()


texts = st.text(alphabet="abc\n", max_size=60)


@given(
    secrets=st.lists(st.text(alphabet="abc", min_size=4, max_size=8), max_size=4),
    text=texts,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    spliced=st.lists(st.integers(0, 3), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_masking_does_not_depend_on_how_the_stream_is_cut(
    secrets: list[str], text: str, cuts: list[int], spliced: list[int]
) -> None:
    for n in spliced:
        text += secrets[n % len(secrets)] if secrets else ""
    data = text.encode()
    whole = Redactor(secrets)
    expected = whole.feed(data) + whole.finish()
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    cut = Redactor(secrets)
    pieces = [cut.feed(data[a:b]) for a, b in pairwise(edges)]
    assert b"".join(pieces) + cut.finish() == expected
    assert not [s for s in secrets if s.encode() in expected]
