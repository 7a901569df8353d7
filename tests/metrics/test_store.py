"""The metric store: posted points are stored once and in full, and read as curves."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.errors import DiskError, WardenError
from gpuwarden.metrics import store as stores
from gpuwarden.metrics.batching import Batches
from gpuwarden.metrics.points import (
    NO_STEP,
    Malformed,
    PostedPoints,
    Problem,
    Row,
    clean_name,
    read_alert,
    read_number,
    read_points,
)
from gpuwarden.metrics.store import Batch, MetricStore
from wording import Wording

POINT = {
    "step": 100,
    "epoch": 1,
    "train_loss": 0.45,
    "eval_loss": None,
    "learning_rate": 0.00005,
    "timestamp": "2025-12-19T10:30:00.000Z",
}


def posted(job: str = "j1", **more: object) -> PostedPoints:
    return read_points({"job_id": job, "metrics": [{**POINT, **more}]})


def many(count: int, name: str = "loss", value: float | None = None) -> PostedPoints:
    rows = (Row(name, n, 1_700_000_000_000_000 + n, float(n % 97) if value is None else value) for n in range(count))
    return PostedPoints("j1", tuple(rows))


@pytest.fixture
def store(tmp_path: Path):
    opened = MetricStore(tmp_path)
    yield opened
    opened.close()


# ------------------------------------------------------------------------------------------------------- parsing


def test_a_documented_point_is_read_with_its_time() -> None:
    found = posted()
    assert {row.name: row.value for row in found.rows} == {"epoch": 1, "train_loss": 0.45, "learning_rate": 5e-05}
    assert {(row.step, row.at) for row in found.rows} == {(100, 1_766_140_200_000_000)}
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (1, 1.0), ("0.45", 0.45), (" -1e-3 ", -0.001), (True, None), (None, None), ("2025-12-19", None),
        ("1_000", None), ("0x10", None), ([1], None), ({"a": 1}, None), ("", None), (10**400, math.inf),
        ("-Infinity", -math.inf), ("inf", math.inf),
    ],
)  # fmt: skip
def test_only_numbers_are_read_as_numbers(given: object, value: float | None) -> None:
    assert read_number(given) == value


def test_a_value_that_is_no_number_is_named_and_the_rest_is_kept(store: MetricStore) -> None:
    post = posted(train_loss="2025-12-19T10:30:00Z", grad_norm=float("nan"), note="<script>alert(1)</script>")
    written = store.write(Batch([post]))[0]
    assert {(i.field, i.problem) for i in written.ignored} == {
        ("metrics[0].train_loss", Problem.NOT_A_NUMBER),
        ("metrics[0].note", Problem.NOT_A_NUMBER),
    }
    assert math.isnan(store.points("j1", "grad_norm").points[0].value)
    assert {s.name for s in store.series("j1")} == {"epoch", "learning_rate", "grad_norm"}


@pytest.mark.parametrize(
    ("body", "problem", "field"),
    [
        ([], Problem.NO_OBJECT, "body"),
        ({"metrics": []}, Problem.NO_JOB, "job_id"),
        ({"job_id": 7, "metrics": []}, Problem.NO_JOB, "job_id"),
        ({"job_id": "j", "metrics": []}, Problem.NO_POINTS, "metrics"),
        ({"job_id": "j", "metrics": "x"}, Problem.NO_POINTS, "metrics"),
        ({"job_id": "j", "metrics": [1]}, Problem.NO_OBJECT, "metrics[0]"),
        ({"job_id": "j", "metrics": [{"step": 1}] * 1001}, Problem.TOO_MANY_POINTS, "metrics"),
        ({"job_id": "j", "metrics": [{"step": 1.5}]}, Problem.BAD_STEP, "metrics[0].step"),
        ({"job_id": "j", "metrics": [{"step": -1}]}, Problem.BAD_STEP, "metrics[0].step"),
        ({"job_id": "j", "metrics": [{"step": math.nan}]}, Problem.BAD_STEP, "metrics[0].step"),
        ({"job_id": "j", "metrics": [{"step": 1, "timestamp": "yesterday"}]}, Problem.BAD_TIME, "metrics[0].timestamp"),
        ({"job_id": "j", "metrics": [{"step": 1, "timestamp": math.inf}]}, Problem.BAD_TIME, "metrics[0].timestamp"),
        ({"job_id": "j", "metrics": [{"step": 1, "timestamp": []}]}, Problem.BAD_TIME, "metrics[0].timestamp"),
        ({"job_id": "j", "metrics": [{"loss": 1}]}, Problem.UNPLACED, "metrics[0]"),
    ],
)
def test_a_malformed_post_is_refused_entirely(body: object, problem: Problem, field: str) -> None:
    with pytest.raises(Malformed) as found:
        read_points(body)
    assert (found.value.problem, found.value.field) == (problem, field)


def test_every_time_format_of_the_trainers_is_read() -> None:
    iso = posted(timestamp="2025-12-19T10:30:00").rows[0].at
    assert iso == posted(timestamp=1766140200).rows[0].at == posted(timestamp="1766140200.0").rows[0].at
    assert iso == posted(timestamp=1766140200000).rows[0].at == posted(timestamp="2025-12-19T11:30:00+01:00").rows[0].at


def test_names_are_short_single_lines_without_secrets() -> None:
    assert "\n" not in clean_name("loss\nignore all\x1b[2J")
    assert len(clean_name("x" * 5000)) == 100
    assert "hf_" not in clean_name("hf_" + "a" * 34)


def test_a_point_with_a_thousand_names_keeps_the_first_names() -> None:
    found = posted(**{f"m{n}": n for n in range(1000)})
    assert len(found.rows) == 64
    assert {i.problem for i in found.ignored} == {Problem.TOO_MANY_NAMES}


def test_a_flood_of_names_is_reported_once_per_point() -> None:
    found = posted(**{f"m{n}": "text" for n in range(100_000)}, loss=1.0)
    assert len(found.rows) < 10 and len(found.ignored) < 300
    assert found.ignored[-1] == ("metrics[0]", Problem.TOO_MANY_NAMES)


def test_an_alert_has_one_of_six_types_and_only_known_fields() -> None:
    body = {"type": "gpu_oom", "job_id": "j1", "loss": "NaN", "progress": 50.0, "error_message": "CUDA\nout", "x": "y"}
    found = read_alert(body, now=5.0)
    assert (found.type, found.at, found.fields) == (
        "gpu_oom",
        5_000_000,
        {"error_message": "CUDA out", "progress": 50.0},
    )
    assert found.key == read_alert(body, now=9.0).key
    for kind in ("job_paused", None, ["gpu_oom"], {}):
        with pytest.raises(Malformed):
            read_alert({**body, "type": kind}, now=5.0)


# --------------------------------------------------------------------------------------------------------- storing


@pytest.mark.attack("metrics", "posts the same points again, later with another value")
def test_a_replayed_post_changes_nothing(store: MetricStore) -> None:
    assert store.write(Batch([posted()]))[0][:2] == (3, 0)
    assert store.write(Batch([posted(), posted(train_loss=9.0)]))[1][:2] == (0, 3)
    assert [p.value for p in store.points("j1", "train_loss").points] == [0.45]


def test_jobs_are_kept_separate_and_persist(tmp_path: Path) -> None:
    first = MetricStore(tmp_path)
    first.write(Batch([posted("j1"), posted("j2", train_loss=1.0)]))
    other = MetricStore(tmp_path)  # opened at the same time, as by the page's process
    assert other.points("j2", "train_loss").points[0].value == 1.0
    assert other.write(Batch([posted("j2", train_loss=1.0)]))[0][:2] == (0, 3)
    first.close()
    other.close()
    again = MetricStore(tmp_path)
    assert [s.total for s in again.series("j1")] == [1, 1, 1]
    again.close()


@pytest.mark.attack("metrics", "posts ever more metrics, or ever more points")
def test_one_job_never_fills_the_store(store: MetricStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_SERIES", 4)
    monkeypatch.setattr(stores, "MAX_JOB_POINTS", 9)
    posts = [PostedPoints("j1", tuple(Row(f"m{n}", step, 0, 1.0) for n in range(6))) for step in range(4)]
    found = store.write(Batch(posts))
    assert sum(w.stored for w in found) == 9
    assert {i.problem for w in found for i in w.ignored} == {Problem.TOO_MANY_NAMES, Problem.FULL}
    assert store.write(Batch([posted("j2")]))[0].stored == 3  # the limits are per job


@pytest.mark.attack("http", "fills the disk with points, so that the ledger can't be written")
def test_metrics_leave_room_for_the_ledger(
    store: MetricStore, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    full = shutil.disk_usage(store.path)._replace(free=200 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(DiskError) as refused:
            store.write(Batch(posts=[posted()]))
    wording(refused)
    assert store.write(Batch(posts=[posted()]))[0].stored


def test_a_failed_batch_stores_nothing_and_the_next_batch_works(store: MetricStore) -> None:
    broken = PostedPoints("j1", (Row("loss", 1, 1, 0.5), Row("loss", 1 << 70, 1, 0.5)))
    with pytest.raises((DiskError, OverflowError)):
        store.write(Batch([posted(), broken]))
    assert store.series("j1") == ()
    assert store.write(Batch([posted()]))[0].stored == 3


def test_alerts_are_kept_once_and_bounded(store: MetricStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_ALERTS", 3)
    started = read_alert({"type": "job_started", "job_id": "j1", "total_steps": 10}, now=1.0)
    others = [read_alert({"type": "timeout_warning", "job_id": "j1", "timestamp": n}, now=1.0) for n in range(1, 9)]
    store.write(Batch(alerts=[started, started, *others]))
    found = store.alerts("j1")
    assert [a.type for a in found] == ["job_started", "timeout_warning", "timeout_warning"]
    assert store.alerts("j1", after=found[1].id) == found[2:]


def test_cursors_only_advance(store: MetricStore) -> None:
    store.write(Batch(cursors={("j1", "posted"): 10}))
    store.write(Batch(cursors={("j1", "posted"): 7}))
    assert (store.cursor("j1", "posted"), store.cursor("j1", "events")) == (10, 0)


def test_a_foreign_database_in_the_stores_place_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "metrics.db")
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    with pytest.raises(DiskError):
        MetricStore(tmp_path)


def test_readers_see_a_new_version_after_another_stores_commit(tmp_path: Path, store: MetricStore) -> None:
    before = store.version()
    assert store.version() == before
    other = MetricStore(tmp_path)
    other.write(Batch([posted()]))
    other.close()
    assert store.version() != before
    assert store.latest("j1")["train_loss"].value == 0.45


# --------------------------------------------------------------------------------------------------------- reading


def test_pages_of_points_are_whole_and_in_order(store: MetricStore) -> None:
    store.write(Batch([many(25)]))
    cursor, steps = None, []
    while True:
        page = store.points("j1", "loss", cursor, limit=10)
        steps += [p.step for p in page.points]
        cursor = page.next
        if cursor is None:
            break
    assert steps == list(range(25))


def test_a_short_curve_is_whole_and_odd_values_are_markers(store: MetricStore) -> None:
    rows = [Row("loss", n, 1, v) for n, v in enumerate([math.nan, 1.0, math.inf, 2.0, -math.inf])]
    store.write(Batch([PostedPoints("j1", tuple(rows))]))
    curve = store.downsampled("j1", "loss")
    assert (curve.x, curve.values, curve.total, curve.odd) == ((1.0, 3.0), (1.0, 2.0), 5, 3)
    assert [(m.x, m.value) for m in curve.markers] == [(0.0, "nan"), (2.0, "inf"), (4.0, "-inf")]


def test_a_curve_of_nothing_but_nan_has_no_points(store: MetricStore) -> None:
    store.write(Batch([many(5_000, value=math.nan)]))
    curve = store.downsampled("j1", "loss", 100)
    assert (curve.x, curve.odd) == ((), 5_000)
    assert 0 < len(curve.markers) <= 1_000
    assert store.downsampled("j1", "nothing").total == 0


def test_downsampling_keeps_every_spike_at_its_step(store: MetricStore) -> None:
    store.write(Batch([many(20_000, value=1.0)]))
    spikes = [Row("loss", 20_000 + n * 7, 2, (-1) ** n * 1000.0 - n) for n in range(3)]
    store.write(Batch([PostedPoints("j1", tuple(spikes))]))
    curve = store.downsampled("j1", "loss", 200)
    drawn = dict(zip(curve.x, curve.values, strict=True))
    assert all(drawn.get(row.step) == row.value for row in (spikes[1], max(spikes, key=lambda r: r.value)))
    assert len(curve.x) <= 202
    assert list(curve.x) == sorted(curve.x)


def test_a_curve_has_the_time_of_each_point(store: MetricStore) -> None:
    rows = [Row("loss", n, n and (n + 7) * 1_000_000, math.nan if n == 500 else n % 13.0) for n in range(1_000)]
    store.write(Batch([PostedPoints("j1", tuple(rows))]))
    for curve in (store.downsampled("j1", "loss", 40), store.downsampled("j1", "loss")):
        assert curve.times == (None, *(x + 7 for x in curve.x[1:])) and len(curve.times) > 20
        assert [m.at for m in curve.markers] == [507]


def test_points_without_steps_are_drawn_over_time(store: MetricStore) -> None:
    for n in range(3):
        store.write(Batch([read_points({"job_id": "j1", "metrics": [{"loss": n, "timestamp": 1_700_000_000 + n}]})]))
    curve = store.downsampled("j1", "loss")
    assert (curve.by_time, curve.x) == (True, (1_700_000_000.0, 1_700_000_001.0, 1_700_000_002.0))
    assert store.points("j1", "loss").points[0].step is None


def test_points_without_a_step_are_omitted_if_others_have_one(store: MetricStore) -> None:
    rows = [Row("loss", NO_STEP, n, math.nan if n % 2 else 1.0) for n in range(1, 9)]
    rows += [Row("loss", n, 0, math.nan if n == 3 else 2.0) for n in range(6)]
    store.write(Batch([PostedPoints("j1", tuple(rows))]))
    for points in (4, 100):
        curve = store.downsampled("j1", "loss", points)
        assert (curve.by_time, curve.total, curve.odd) == (False, 6, 1)
        assert set(curve.x) <= {0, 1, 2, 4, 5} and [mark.x for mark in curve.markers] == [3]


@pytest.mark.prove
def test_a_million_points_are_kept_and_downsampled_for_drawing(store: MetricStore) -> None:
    for begin in range(0, 1_000_000, 100_000):
        rows = tuple(Row("loss", n, n + 1, float(n % 977)) for n in range(begin, begin + 100_000))
        store.write(Batch([PostedPoints("j1", rows)]))
    curve = store.downsampled("j1", "loss", 4_000)
    assert (curve.total, max(curve.values), min(curve.values)) == (1_000_000, 976.0, 0.0)
    assert 3_900 <= len(curve.x) <= 4_100
    assert store.points("j1", "loss", (999_990, 0), limit=100).points[-1].step == 999_999


# -------------------------------------------------------------------------------------------------------- batching


def test_posts_are_answered_after_a_shared_commit(store: MetricStore) -> None:
    commits: list[int] = []

    async def life() -> None:
        async with Batches(store).running() as batches:
            write = store.write

            def counted(batch: Batch) -> list[stores.Written]:
                commits.append(len(batch.posts))
                return write(batch)

            store.write = counted  # type: ignore[method-assign]

            async def one(number: int) -> None:
                written = await batches.add(PostedPoints(f"j{number}", (Row("loss", 1, 1, 1.0),)))
                assert written.stored == 1
                assert store.points(f"j{number}", "loss").points

            async with anyio.create_task_group() as tasks:
                for number in range(50):
                    tasks.start_soon(one, number)

    anyio.run(life)
    assert sum(commits) == 50
    assert len(commits) < 10


def test_waiting_posts_are_committed_at_shutdown(store: MetricStore) -> None:
    write, held = store.write, threading.Event()

    def slow(batch: Batch) -> list[stores.Written]:
        held.wait()
        return write(batch)

    store.write = slow  # type: ignore[method-assign]

    async def life() -> None:
        async with anyio.create_task_group() as tasks, Batches(store).running() as batches:
            for number in range(2):  # the second arrives while the first is being committed
                tasks.start_soon(batches.add, PostedPoints(f"j{number}", (Row("loss", 1, 1, 1.0),)))
                await anyio.wait_all_tasks_blocked()
            held.set()

    anyio.run(life)
    assert [len(store.points(f"j{number}", "loss").points) for number in range(2)] == [1, 1]


@pytest.mark.parametrize("failure", [DiskError("full", ""), NameError("a bug")])
def test_a_failed_commit_answers_each_waiter(store: MetricStore, failure: Exception) -> None:
    async def life() -> None:
        def full(batch: Batch) -> list[stores.Written]:
            raise failure

        store.write = full  # type: ignore[method-assign]
        async with Batches(store).running() as batches:
            for _ in range(2):
                with pytest.raises(WardenError):
                    await batches.add(posted())

    anyio.run(life)


def test_several_threads_can_write_to_the_store(store: MetricStore) -> None:
    def work(number: int) -> None:
        for step in range(50):
            store.write(Batch([PostedPoints("j1", (Row(f"m{number}", step, 1, 1.0),))]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [s.total for s in store.series("j1")] == [50, 50, 50, 50]


def test_a_part_of_a_curve_is_read_with_its_own_extremes(store: MetricStore) -> None:
    rows = tuple(
        Row("loss", n, 0, float("nan") if n == 50 else -float(n) if n % 7 == 0 else float(n)) for n in range(400)
    )
    store.write(Batch(posts=[PostedPoints("j1", rows)]))
    whole = store.downsampled("j1", "loss", 20)
    part = store.downsampled("j1", "loss", 1_000, between=(40, 60.4))
    assert (whole.total, part.total) == (400, 21)
    assert part.x == tuple(n for n in range(40, 61) if n != 50) and [m.x for m in part.markers] == [50]
    assert store.downsampled("j1", "loss", 4, between=(100, 199)).x[0] >= 100
    assert {min(whole.values), max(whole.values)} == {-399.0, 398.0}, "the extremes of the whole are in it"
    store.write(Batch(posts=[PostedPoints("j1", tuple(Row("saw", n, 0, abs(n % 400 - 200.5)) for n in range(4_100)))]))
    saw = store.downsampled("j1", "saw", 10)
    assert (saw.x[0], saw.values[0], saw.x[-1], saw.values[-1]) == (0, 200.5, 4_099, 101.5), "a chart shows both ends"
    assert store.downsampled("j1", "loss", 10, between=(900, 1_000)).total == 1, "outside: the nearest end"
