"""Log parts show no piece of a secret and add up to the whole log, wherever a reader cuts."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import FakeClock
from gpuwarden.core.models import Handle, LogChunk
from gpuwarden.core.safe_names import LOG_NAME
from gpuwarden.core.sanitize import HIDDEN, plain, redact, unfenced
from gpuwarden.interfaces import results
from gpuwarden.lifecycle.artifacts import local_copies
from gpuwarden.lifecycle.artifacts.local_copies import read_piece
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring import log_part as use_case
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.diagnose import TAIL, tail_of
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.remote.runner.log import Log, read_log
from lifecycle_kit import open_house, training
from pretend_machines import PretendBackend, Processes

SECRET, TOKEN = "Käse-4711-swordfish", "hf_" + "A1" * 16
PIECES = [
    SECRET, TOKEN, SECRET[:9] + "\x1b[36m" + SECRET[9:], "\x1b[1mstep\x1b[0m", "ä", "\U0001f680", "\r\n", "\r", "\n",
    "loss 0.5", b"\xff", b"\xf0\x9f", b"\x80\x80", b"\xe2\x82",
]  # fmt: skip
ROWS = st.lists(st.sampled_from([p.encode() if isinstance(p, str) else p for p in PIECES]), max_size=12)
LOGS = ROWS.map(lambda row: b" ".join([*row, b"\n"]))  # the runner holds back an incomplete character at the end
Read = Callable[[int, int], Awaitable[LogChunk | None]]


class Printing(PretendBackend):
    """A platform that keeps a job's output as printed."""

    raw = b""

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        return LogChunk.cut(self.raw, cursor, limit)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)  # the emulated machine's run root is relative
    ctx = open_house(tmp_path / "home", FakeClock())
    ctx.env = {"WANDB_API_KEY": SECRET}
    ctx._backends["local"] = Printing(Processes())
    return ctx


@pytest.fixture
def job(ctx: Context, tmp_path: Path) -> JobRecord:
    spec = training(tmp_path / "said", platform="local", secrets=("WANDB_API_KEY",))
    done = anyio.run(submit, ctx, spec)
    assert done.job is not None
    return read_job(ctx.ledger, done.job.id)


def sources(raw: bytes, folder: Path) -> list[Read]:
    """Return three readers of the same log: a complete text, a runner's folder, and a pulled copy."""
    folder.mkdir()
    (folder / "pulled").write_bytes(raw)
    writer = Log(str(folder), 1 << 20)
    writer.write(raw)
    os.close(writer.fd)

    async def whole(cursor: int, limit: int) -> LogChunk:
        return LogChunk.cut(raw, cursor, limit)

    async def runner(cursor: int, limit: int) -> LogChunk:
        return LogChunk.model_validate({k: v for k, v in read_log(str(folder), cursor, limit).items() if k != "ok"})

    async def pulled(cursor: int, limit: int) -> LogChunk | None:
        return read_piece(folder / "pulled", cursor, limit)

    return [whole, runner, pulled]


@pytest.mark.attack("secrets", "moves the log cursor byte by byte, so that every part ends inside a secret")
@pytest.mark.parametrize("limit", [1, 5])
def test_a_log_part_never_reveals_a_piece_of_a_secret(ctx: Context, job: JobRecord, limit: int) -> None:
    machine = ctx.backend("local")
    assert isinstance(machine, Printing)
    machine.raw = f"a {SECRET} {TOKEN} z".encode()

    async def shown(cursor: int | None, limit: int) -> results.CheckReply:
        found = await check(ctx, job.id, cursor=cursor, limit=limit)
        return results.checked(found, ctx.hidden(found.texts, job.spec.secrets))

    texts, cursor = [], 0
    while cursor < len(machine.raw):
        reply = anyio.run(shown, cursor, limit)
        assert reply.log_cursor is not None and cursor < reply.log_cursor <= cursor + limit
        texts.append(unfenced(reply.log))
        cursor = reply.log_cursor
    assert "".join(texts) == f"a {HIDDEN} {HIDDEN} z"
    for tail in range(1, len(machine.raw), 3):
        end = unfenced(anyio.run(shown, None, tail).log)
        assert set(end.replace(HIDDEN, "")) <= set("a z"), end


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(raw=LOGS, limit=st.integers(1, 40), tail=st.integers(1, 60))
def test_parts_add_up_to_the_redacted_log(
    ctx: Context, job: JobRecord, tmp_path_factory: pytest.TempPathFactory, raw: bytes, limit: int, tail: int
) -> None:
    whole = redact(plain(raw.decode("utf-8", "replace")), [SECRET])

    async def parts(read: Read) -> None:
        texts, cursor = [], 0
        while cursor < len(raw):
            found = await use_case.log_part(ctx, job, read, cursor, limit)
            assert found is not None and found.start == cursor < found.next <= cursor + limit
            texts.append(found.text)
            cursor = found.next
        assert "".join(texts) == whole
        end = await use_case.log_part(ctx, job, read, -tail, tail)
        same = await use_case.log_part(ctx, job, read, max(0, len(raw) - tail), tail)
        assert end is not None and same is not None and whole.endswith(end.text)
        # The runner omits continuation bytes at the start of a log's tail.
        assert end.text.lstrip("\ufffd") == same.text.lstrip("\ufffd")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(use_case, "MARGIN", 48)
        for read in sources(raw, tmp_path_factory.mktemp("log") / "run"):
            anyio.run(parts, read)


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize(("end", "rest", "whole"), [("\n", TAIL - 5, False), (" ", TAIL - 5, False), ("\n", 5, True)])
def test_the_tail_of_a_log_begins_with_a_whole_line_or_word(
    ctx: Context, job: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    reachable: bool, end: str, rest: int, whole: bool,
) -> None:  # fmt: skip
    machine = ctx.backend("local")
    assert isinstance(machine, Printing)
    raw = f"{SECRET}{end}{'x' * rest}"
    machine.raw = raw.encode() if reachable else b""
    (tmp_path / LOG_NAME).write_text(raw)
    monkeypatch.setattr(local_copies, "last_pull", lambda *_: SimpleNamespace(dest=str(tmp_path)))
    found = anyio.run(lambda: tail_of(ctx, job, reachable=reachable))
    assert found == (raw if whole else "x" * rest)


def test_a_cursor_beyond_a_new_log_follows_its_source(ctx: Context, job: JobRecord, tmp_path: Path) -> None:
    found = [anyio.run(use_case.log_part, ctx, job, read, 30, 10) for read in sources(b"a new log", tmp_path / "run")]
    assert [(f.start, f.text) for f in found if f] == [(9, ""), (0, "a new log"), (9, "")]


def test_a_cursor_moves_past_a_gap_and_stays_at_the_end_of_the_log(ctx: Context, job: JobRecord) -> None:
    async def gap(cursor: int, limit: int) -> LogChunk:  # bytes 15,000 to 20,000 are missing
        begin = cursor if cursor < 15_000 else max(cursor, 20_000)
        end = min(begin + limit, 15_000 if begin < 15_000 else 23_000)
        return LogChunk.of(b"x" * (end - begin), begin, 23_000)

    cursors = [0]
    while len(cursors) < 12:
        found = anyio.run(use_case.log_part, ctx, job, gap, cursors[-1], 4_000)
        assert found is not None
        cursors.append(found.next)
    assert cursors == sorted(cursors) and cursors[-1] == 23_000
