"""A job's secrets stay out of the output of later processes, even though these never had the values."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import lines_run
from fakes import FakeClock
from gpuwarden.core.errors import DiskError
from gpuwarden.core.models import Handle, LogChunk, Observation, RunnerAlert
from gpuwarden.core.sanitize import redact
from gpuwarden.core.secret_digests import SecretDigest, found_in
from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.tools.base import answer
from gpuwarden.interfaces.results import checked
from gpuwarden.known_secrets import FILE, KnownSecrets
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import open_house, training
from pretend_machines import PretendBackend, Processes

KEY = b"k" * 32
SECRET = "Correct-Horse_Battery.9000"


def digests(*values: str) -> list[SecretDigest]:
    return [SecretDigest.of(KEY, value) for value in values]


@given(st.text(max_size=60), st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=40), st.text())
def test_a_secret_is_found_anywhere_in_a_text(before: str, secret: str, after: str) -> None:
    found = found_in(before + secret + after, KEY, digests(secret))
    assert secret in found and secret not in redact(before + secret + after, found).replace("[secret removed]", "")


def test_similar_text_is_not_taken_for_a_secret() -> None:
    known = digests(SECRET, "opensesame", "two words")
    assert not found_in("an ordinary log line, loss=0.25 opensesam two  words " + SECRET[:-1], KEY, known)
    assert not found_in(SECRET, b"another key", known)


def test_the_search_is_linear_in_the_text_length() -> None:
    known = digests(SECRET, "opensesame")
    few, many = (lines_run(lambda n=n: found_in("a" * n, KEY, known)) for n in (1 << 14, 1 << 16))
    assert many < 4.1 * few


def test_secret_values_are_never_stored_and_files_are_private(tmp_path: Path) -> None:
    known = KnownSecrets(tmp_path / "home")
    known.remember([SECRET, "line one of a key\nline two of it", "tiny"])
    known.remember([SECRET])
    stored = (tmp_path / "home" / FILE).read_text()
    assert SECRET not in stored and "line" not in stored and len(stored.splitlines()) == 4
    assert [json.loads(line)[0] for line in stored.splitlines()].count(4) == 0, "a short word is no secret"
    assert all(not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in tmp_path.rglob("*"))
    later = KnownSecrets(tmp_path / "home")
    assert later.found_in({f"metric_{SECRET}": ["x line two of it y"]}) == (SECRET, "line two of it")


def test_secrets_of_another_process_are_found_despite_a_torn_line(tmp_path: Path) -> None:
    mine, other = KnownSecrets(tmp_path), KnownSecrets(tmp_path)
    assert mine.found_in([SECRET]) == ()
    other.remember([SECRET])
    with (tmp_path / FILE).open("a") as file:
        file.write("[12, false, 7")
    assert mine.found_in([SECRET]) == (SECRET,)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_failure_to_remember_a_secret_raises(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError):
        KnownSecrets(tmp_path / "home").remember([SECRET])


class Leaky(PretendBackend):
    """A machine whose job writes its secret everywhere that a job can write."""

    def _observe(self, handle: Handle) -> Observation:
        return Observation(
            state=Job.RUNNING,
            why=f"it said {SECRET}",
            metrics={"m" * 50 + SECRET: 1.0},
            alerts=(RunnerAlert(kind="odd", text=f"!{SECRET}"),),
        )

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        return LogChunk(text=f"key={SECRET}\n", next=1, size=1)


@pytest.mark.slow
@pytest.mark.attack("secrets", "names a metric after a secret and reads it in a later process")
@pytest.mark.anyio
async def test_a_later_process_without_the_value_never_shows_or_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the pretend machine's run root is relative
    first = open_house(tmp_path / "home", FakeClock())
    first.env = {"WANDB_API_KEY": SECRET}
    first._backends["local"] = Leaky(Processes())
    job = (await submit(first, training(tmp_path / "said", platform="local", secrets=("WANDB_API_KEY",)))).job
    assert job is not None

    later = open_house(tmp_path / "home", FakeClock())
    later._backends["local"] = Leaky(Processes())
    result = await check(later, job.id)
    reply = answer(later, checked(result, later.hidden(result.texts)))
    shown = reply.model_dump_json()
    assert "[secret removed]" in shown
    assert not [part for part in (SECRET, SECRET[:12], SECRET[-12:]) if part in shown], shown
    assert not any(SECRET in json.dumps(event.body) for event in later.ledger.events())
