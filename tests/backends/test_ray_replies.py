"""Possible replies of Ray's dashboard, tested without Ray: other formats, other versions, and other users' jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.backends import _ray_options as options
from gpuwarden.backends._ray_api import address, is_here, last_line, read_limits, rows_of, submission_id
from gpuwarden.backends._slurm_observation import observation
from gpuwarden.backends.ray import RayBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.engine import UNLIMITED, EngineRequest
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Conflict, NotSupported, Unreachable
from gpuwarden.core.models import Handle, JobSpec, Place, StopResult, Unknown
from gpuwarden.core.policy import Local
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from wording import Wording

FOLDERS = {"gw-t": "/shared/gw-t"}
VERSION = (200, {"ray_version": "2.60.0"})


def cluster(kinds: object) -> tuple[int, Any]:
    report = {"activeNodes": {}, "nodeTypeMapping": kinds, "legacy": True}
    return 200, {"data": {"autoscalingStatus": "it says something", "clusterStatus": {"autoscalerReport": report}}}


FIXED = cluster({"0a": "node_0a", "1b": "node_1b"})


def row(attempt: int = 1, **changes: Any) -> dict[str, Any]:
    marks = {"gpuwarden_job": "gw-t", "gpuwarden_folder": "/shared/gw-t", "gpuwarden_attempt": str(attempt)}
    ident = submission_id("gw-t", attempt, "/shared/gw-t")
    given = {"type": "SUBMISSION", "submission_id": ident, "status": "RUNNING", "metadata": marks}
    return {**given, "message": "Job is currently running.", "error_type": None, "start_time": 5_000, **changes}


def nodes(*resources: dict[str, float], state: str = "ALIVE") -> tuple[int, Any]:
    return 200, {"data": {"result": {"result": [{"state": state, "resources_total": has} for has in resources]}}}


@pytest.mark.parametrize(
    "found",
    [{"welcome": "here"}, "<html>", None, [1], [{}], [row(status="DANCING")], [row(status=None)],
     [row(submission_id=None)], [row(submission_id=None, metadata={})]],
)  # fmt: skip
def test_a_malformed_list_is_not_read_as_empty(found: object) -> None:
    with pytest.raises(BadReply):
        rows_of(200, found, FOLDERS)


@pytest.mark.parametrize(
    ("status", "error"), [(500, Unreachable), (502, Unreachable), (404, BadReply), (302, BadReply)]
)
def test_an_unexpected_status_is_not_read_as_an_empty_list(status: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        rows_of(status, [], FOLDERS)


def test_foreign_jobs_are_ignored_in_any_form() -> None:
    theirs = [
        row(metadata=None),
        row(metadata={"gpuwarden_job": "gw-t", "gpuwarden_folder": "/elsewhere"}),
        row(type="DRIVER", submission_id=None, metadata={}),
        row(metadata={"gpuwarden_job": ["gw-t"]}, status="DANCING"),
        row(submission_id="gw-t-a1-copy", status="FAILED"),
        row(submission_id="raysubmit_1", status="DANCING"),
        row(metadata={"gpuwarden_job": "another", "gpuwarden_folder": ""}),
        *(
            row(metadata={**row()["metadata"], "gpuwarden_attempt": n})
            for n in ("x", "0", "-1", "9" * 5_000, "\u0661", "2")
        ),
    ]
    assert rows_of(200, theirs, FOLDERS) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["1", "gw-t", "RUNNING", "9" * 5_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "result", "a"]), inner),
    max_leaves=8,
)
FIELDS = ("type", "submission_id", "status", "metadata", "message", "error_type", "start_time", "end_time",
          "driver_exit_code", "driver_node_id")  # fmt: skip


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), JSON), JSON, st.integers(100, 599))
def test_any_job_list_is_read_or_refused(changes: dict[str, Any], odd: object, status: int) -> None:
    for found in ([{**row(), **changes}], [row(metadata={**row()["metadata"], "gpuwarden_attempt": odd})], [odd], odd):
        with suppress(BadReply, Unreachable):
            for ours in rows_of(status, found, FOLDERS).values():
                observation({"folder": "present", "now": 9.0}, ours)


@given(JSON, JSON, JSON)
def test_any_limits_reply_is_read_or_refused(version: object, listed: object, report: object) -> None:
    resources = {"resources_total": listed, "state": "ALIVE"}
    for named in ((200, version), (200, {"ray_version": version}), VERSION):
        for seen in ((200, listed), (200, {"data": {"result": {"result": [resources]}}})):
            with suppress(BadReply, NotSupported):
                read_limits(named, seen, cluster(report), EngineRequest())


def test_the_last_attempt_counts() -> None:
    second = row(2, status="PENDING", message="waits\n for CPUs")
    rows = rows_of(200, [second, row(status="STOPPED")], FOLDERS)
    assert (rows["gw-t"].attempt, rows["gw-t"].waits, rows["gw-t"].allocation.why) == (2, True, "for CPUs")


@pytest.mark.parametrize(
    ("changes", "state", "code"),
    [
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, Job.PREEMPTED, None),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}, Job.PREEMPTED, None),
        (
            {"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "x\nno such wheel"},
            Job.FAILED,
            None,
        ),
        ({"status": "FAILED", "driver_exit_code": 97, "message": "logs:\nnot on this node"}, Job.FAILED, 97),
        ({"status": "FAILED", "driver_exit_code": -9}, Job.FAILED, None),
        ({"status": "FAILED", "driver_exit_code": 10**30}, Job.FAILED, None),
        ({"status": "FAILED", "driver_exit_code": True}, Job.FAILED, None),
        ({"status": "STOPPED"}, Job.CANCELED, None),
    ],
)
def test_rays_status_decides_an_end_unseen_by_the_runner(changes: dict[str, Any], state: Job, code: int | None) -> None:
    seen = observation({"folder": "present", "now": 9.0}, rows_of(200, [row(**changes)], FOLDERS)["gw-t"])
    assert (seen.state, seen.exit_code, seen.meter) == (state, code, False)
    if "message" in changes:
        assert changes["message"].splitlines()[1] in seen.why


@pytest.mark.parametrize(
    ("wants", "started", "reason"),
    [
        ({"gpu": "any"}, False, Code.ENGINE_DROPPED),
        ({"options": {"resources": {"fast_disk": 1}}}, False, Code.ENGINE_DROPPED),
        ({"gpu": "any"}, True, Code.ENGINE_TOOK),
        ({}, False, Code.ENGINE_TOOK),
    ],
)
def test_a_supervisor_start_timeout_preempts_the_job(wants: dict[str, Any], started: bool, reason: Code) -> None:
    spec = JobSpec(platform="ray/x", command=("true",), **wants)
    marks = options.request(spec, "gw-t", 1, "/shared/gw-t", "runner.py")["metadata"]
    late = row(status="FAILED", error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT", metadata=marks)
    status = {"state": "running", "attempt": 1} if started else {}
    seen = observation({"folder": "present", "now": 9.0, **status}, rows_of(200, [late], FOLDERS)["gw-t"])
    assert (seen.state, seen.reason, seen.meter) == (Job.PREEMPTED, reason, False)


def test_a_success_not_reported_by_the_runner_is_unknown() -> None:
    found = rows_of(200, [row(status="SUCCEEDED", driver_exit_code=0)], FOLDERS)["gw-t"]
    seen = observation({"folder": "present", "now": 9.0}, found)
    assert (seen.state, seen.reason) == (Job.UNKNOWN, Code.ENGINE_DISAGREES)


def test_limits_are_the_maximum_of_any_single_node() -> None:
    big = {"CPU": 8.0, "memory": 64.0 * 2**30, "GPU": 4.0, "accelerator_type:H100": 1.0}
    found = read_limits(VERSION, nodes(big, {"CPU": 32.0, "memory": 2.0**30}), FIXED, EngineRequest())
    assert found.queue is not None and found.queue.gpus == {"h100": 4}
    assert (found.queue.cpus, found.queue.memory_mb, found.queue.nodes) == (32, 65_536, 2)
    assert (found.queue.max_s, found.version) == (UNLIMITED, "2.60.0")


@pytest.mark.parametrize(
    ("listed", "grows"),
    [
        (nodes({"CPU": 1.0}), cluster({"10.0.0.5": "ray.head.default"})),
        (nodes({"CPU": 1.0}), cluster({"0a": "node_0a", "1b": "gpu_worker"})),
        (nodes({"CPU": 1.0}), cluster({})),
        (nodes({"CPU": 1.0}), cluster(None)),
        (nodes({"CPU": 1.0}), (200, {"data": {"autoscalingStatus": None, "clusterStatus": None}})),
        (nodes({"CPU": 1.0}), (500, "x")),
        (nodes({"CPU": 1.0}), (200, {"other": 1})),
        ((404, "no state API"), FIXED),
        ((200, {"data": {}}), FIXED),
        (nodes({"CPU": 1.0}, state="DEAD"), FIXED),
        ((200, {"data": {"result": {"result": [nodes({"CPU": 1.0})[1], 7]}}}), FIXED),
    ],
)
def test_an_autoscaling_or_silent_cluster_has_no_known_limit(listed: Any, grows: Any) -> None:
    found = read_limits(VERSION, listed, grows, EngineRequest())
    assert found.queue is not None and (found.queue.cpus, found.queue.gpus, found.queue.nodes) == (None, None, None)


def test_an_invalid_amount_is_not_counted() -> None:
    odd: Any = {"CPU": "many", "memory": float("inf"), "GPU": [4], "accelerator_type:H100": 1.0}
    found = read_limits(VERSION, nodes(odd, {"CPU": 2.0}), FIXED, EngineRequest())
    assert found.queue is not None and (found.queue.cpus, found.queue.memory_mb, found.queue.gpus) == (2, None, {})


def test_an_old_or_unversioned_ray_is_refused() -> None:
    with pytest.raises(NotSupported):
        read_limits((200, {"ray_version": "2.7.1"}), nodes(), FIXED, EngineRequest())
    digits = "9" * 5_000
    named = ((200, {"ray_version": v}) for v in ("new", f"{digits}.1", "2.", 2))
    for odd in ((200, {}), (200, []), (404, "x"), *named):
        with pytest.raises(BadReply):
            read_limits(odd, nodes(), FIXED, EngineRequest())


@pytest.mark.parametrize(
    ("host", "where"),
    [(None, ("127.0.0.1", 8265)), ("head", ("head", 8265)), ("head:99", ("head", 99)), ("::1", ("::1", 8265)),
     ("10.0.0.5:443", ("10.0.0.5", 443)), ("head:0", ("head:0", 8265))],
)  # fmt: skip
def test_an_address_defaults_to_rays_port(host: str | None, where: tuple[str, int]) -> None:
    assert address(Place(platform="ray/x", host=host, run_root="/r")) == where


def test_this_machine_is_known_by_any_of_its_addresses() -> None:
    assert is_here("127.0.0.1") and is_here("127.9.9.9") and is_here("localhost")
    assert not is_here("192.0.2.1") and not is_here("no.such.host.invalid")
    assert not is_here("a" * 64) and not is_here("a..b"), "no such names are possible"


def test_a_request_carries_the_resources_and_packages() -> None:
    script = '# /// script\n# dependencies = ["trl==1.0"]\n# ///\nprint(1)\n'
    spec = JobSpec(
        platform="ray/x",
        script=script,
        gpu="h100",
        gpu_count=2,
        secrets=("TOKEN",),
        options={"cpus": 4, "memory_gb": 8},
    )
    body = options.request(spec, "gw-t", 3, "/shared/it's here", "/shared/it's here/runner.py")
    assert body["entrypoint_num_gpus"] == 2 and body["entrypoint_resources"] == {"accelerator_type:H100": 0.001}
    assert (body["entrypoint_num_cpus"], body["entrypoint_memory"]) == (4, 8 * 2**30)
    assert body["runtime_env"]["pip"]["packages"] == ["trl==1.0"]
    assert body["submission_id"].startswith("gw-t-a3-") and body["metadata"]["gpuwarden_folder"] == "/shared/it's here"
    assert body["submission_id"] != submission_id("gw-t", 3, "/shared/another")


def test_an_unknown_ray_option_is_refused() -> None:
    with pytest.raises(BadRequest, match="partition"):
        options.read_options(JobSpec(platform="ray/x", command=("true",), options={"partition": "a"}))


def test_the_last_line_of_a_traceback_names_the_cause(wording: Wording) -> None:
    assert last_line("Traceback:\n  File x\nValueError: it exists.\n.") == "ValueError: it exists."
    assert last_line(None) == last_line(" \n")
    wording(str(last_line(None)))


class Dashboard:
    """A server in place of Ray's dashboard. It closes the connection on a request for which it has no reply."""

    def __init__(self, folder: Path) -> None:
        self.replies: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.body: dict[str, Any] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()
        self.place = Place(
            platform="ray/x", host=f"127.0.0.1:{self.server.server_address[1]}", run_root=str(folder / "runs")
        )
        self.backend = RayBackend(SystemClock())
        self.backend.confine(lambda: Local(unsandboxed=True), [])

    def jobs(self, *rows: dict[str, Any]) -> None:
        self.replies["GET /api/jobs/"] = (200, json.dumps(rows))

    def _handler(dashboard) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Reply(BaseHTTPRequestHandler):
            def _reply(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                dashboard.body = json.loads(sent) if sent else dashboard.body
                asked = f"{self.command} {self.path}"
                dashboard.asked.append(asked)
                self.close_connection = True
                if (found := dashboard.replies.get(asked, dashboard.replies.get("*"))) is None:
                    return
                status, text = found
                self.send_response(status)
                self.send_header("Location", "/login")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = _reply  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Reply


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    found = Dashboard(tmp_path)
    yield found
    found.server.shutdown()
    found.server.server_close()


HTML = "<!doctype html><title>Sign in</title>"
JOB = JobSpec(platform="ray/x", command=("true",))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (None, Unreachable),
        ((200, HTML), BadReply),
        ((200, ""), BadReply),
        ((200, '[{"submission_id": "gw-t'), BadReply),
        ((200, '{"result": true}'), BadReply),
        ((200, "[" * 100_000), BadReply),
        ((302, HTML), BadReply),
        ((404, HTML), BadReply),
        ((401, HTML), AuthFailed),
        ((502, HTML), Unreachable),
    ],
)
async def test_a_reply_not_from_a_dashboard_is_unknown_and_gets_no_job(
    dashboard: Dashboard, reply: tuple[int, str] | None, error: type[Exception]
) -> None:
    backend, place = dashboard.backend, dashboard.place
    if reply is not None:
        dashboard.replies["*"] = reply
    handle = await backend.handle_of(place, "t")
    assert isinstance(await backend.find(place, "t"), Unknown)
    with pytest.raises(error):
        await backend.poll([handle])
    with pytest.raises(error):
        await backend.submit(JOB, place, "t", secrets={})
    with pytest.raises(error):
        await backend.stop(handle)
    with pytest.raises(Unreachable if reply is None else (AuthFailed, BadReply)):
        await backend.limits(JOB, place)
    assert not [asked for asked in dashboard.asked if asked.startswith("POST")]


@pytest.mark.anyio
async def test_a_stopped_dashboard_is_unknown(dashboard: Dashboard) -> None:
    dashboard.server.shutdown()
    dashboard.server.server_close()
    assert isinstance(await dashboard.backend.find(dashboard.place, "t"), Unknown)
    with pytest.raises(Unreachable):
        await dashboard.backend.limits(JOB, dashboard.place)


@pytest.mark.anyio
async def test_an_outdated_cluster_is_refused_with_its_version(dashboard: Dashboard) -> None:
    dashboard.replies = {"GET /api/version": (200, '{"ray_version": "2.7.1"}'), "*": (404, HTML)}
    with pytest.raises(NotSupported, match=r"2\.7\.1"):
        await dashboard.backend.limits(JOB, dashboard.place)


@pytest.mark.anyio
async def test_an_id_that_another_tool_used_is_a_conflict_and_leaves_no_secret(
    dashboard: Dashboard, wording: Wording
) -> None:
    backend, place = dashboard.backend, dashboard.place
    handle: Handle = await backend.handle_of(place, "t")
    theirs = row(submission_id=submission_id("gw-t", 1, handle.run_dir), metadata={"theirs": "1"})
    dashboard.jobs(theirs)
    dashboard.replies["POST /api/jobs/"] = (500, "Traceback\nValueError: it already exists")
    with pytest.raises(Conflict) as refused:
        await backend.submit(JOB, place, "t", secrets={"TOKEN": "hunter22"})
    wording(refused, theirs["submission_id"])
    assert not [f for f in Path(handle.run_dir).rglob("*") if f.is_file() and b"hunter22" in f.read_bytes()]
    dashboard.jobs()
    with pytest.raises(Unreachable, match="already exists"):
        await backend.submit(JOB, place, "t", secrets={})


@pytest.mark.anyio
async def test_a_job_that_never_reached_ray_leaves_no_secret(dashboard: Dashboard) -> None:
    backend, place = dashboard.backend, dashboard.place
    handle = await backend.handle_of(place, "t")

    def left() -> list[str]:
        return [f.name for f in Path(handle.run_dir).rglob("*") if f.is_file() and b"hunter22" in f.read_bytes()]

    dashboard.jobs()
    dashboard.replies["POST /api/jobs/"] = (401, HTML)  # as if the token had just been changed
    with pytest.raises(AuthFailed):
        await backend.submit(JOB, place, "t", secrets={"TOKEN": "hunter22"})
    assert not left(), "nothing was started"
    dashboard.replies["POST /api/jobs/"] = (503, HTML)
    with pytest.raises(Unreachable):
        await backend.submit(JOB, place, "t", secrets={"TOKEN": "hunter22"})
    assert left() == ["secrets.1.json"], "the job may be on its way"
    assert await backend.stop(handle) is StopResult.GONE
    assert not left()


@pytest.mark.anyio
@pytest.mark.parametrize("ident", ["raysubmit_another", "gw-t-a2-00000000", ""])
async def test_a_reply_about_another_job_confirms_nothing(dashboard: Dashboard, ident: str) -> None:
    dashboard.jobs()
    dashboard.replies["POST /api/jobs/"] = (200, json.dumps({"submission_id": ident}))
    with pytest.raises(Unreachable):
        await dashboard.backend.submit(JOB, dashboard.place, "t", secrets={})


@pytest.mark.anyio
async def test_a_job_cannot_hide_others_through_its_folder(dashboard: Dashboard) -> None:
    backend, place = dashboard.backend, dashboard.place
    handle = await backend.handle_of(place, "t")
    (Path(handle.run_dir) / "secrets.1.json/full").mkdir(parents=True)
    marks = {"gpuwarden_job": "gw-t", "gpuwarden_folder": handle.run_dir, "gpuwarden_attempt": "1"}
    dashboard.jobs(row(submission_id=submission_id("gw-t", 1, handle.run_dir), metadata=marks, status="FAILED"))
    assert (await backend.poll([handle]))["t"].state is Job.FAILED
    assert await backend.stop(handle) is StopResult.GONE


@pytest.mark.anyio
@pytest.mark.parametrize("output", ["/etc", "/work/../etc/x", "{root}/../private", "{root}"])
async def test_an_absolute_output_outside_the_shared_path_is_refused(dashboard: Dashboard, output: str) -> None:
    spec = JOB.model_copy(update={"outputs": (output.format(root=dashboard.place.run_root),)})
    dashboard.jobs()
    with pytest.raises(BadRequest):
        await dashboard.backend.submit(spec, dashboard.place, "t", secrets={})
    assert not [asked for asked in dashboard.asked if asked.startswith("POST")]


@pytest.mark.anyio
@pytest.mark.attack("files", "turns an output into a link to the files of the machine that copies it")
async def test_an_output_replaced_by_a_link_copies_no_local_file(dashboard: Dashboard, tmp_path: Path) -> None:
    handle = await dashboard.backend.handle_of(dashboard.place, "t")
    shared, private = tmp_path / "runs/shared", tmp_path / "private"
    for folder in (Path(handle.run_dir), shared, private):
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"here")
    good = await dashboard.backend.list_files(handle, [str(shared)])
    assert [file.path for file in good.files] == [f"{shared}/model.bin"]
    (shared / "model.bin").unlink()
    shared.rmdir()
    shared.symlink_to(private)
    found = await dashboard.backend.list_files(handle, [str(shared)])
    assert not found.files and len(found.skipped) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("kill", [False, True])
async def test_an_entrypoint_consumes_secrets_and_leaves_no_command_running(dashboard: Dashboard, kill: bool) -> None:
    backend, place = dashboard.backend, dashboard.place
    dashboard.jobs()
    run_dir = (await backend.handle_of(place, "t")).run_dir
    own = {"submission_id": submission_id("gw-t", 1, run_dir)}
    dashboard.replies["POST /api/jobs/"] = (200, json.dumps(own))
    text = "echo $$ > pid; echo $TOKEN; mv pid up; while [ ! -e go ]; do sleep 0.05; done"
    spec = JobSpec(platform="ray/x", command=("sh", "-c", text), secrets=("TOKEN",))
    handle = await backend.submit(spec, place, "t", secrets={"TOKEN": "hunter22-hunter22"})
    folder = Path(handle.run_dir)
    assert "hunter22" not in json.dumps(dashboard.body) and (folder / "secrets.1.json").exists()
    entry = subprocess.Popen(["sh", "-c", dashboard.body["entrypoint"]], cwd="/", start_new_session=True)
    while not (folder / "work/up").exists():
        await anyio.sleep(0.02)
    pid = int((folder / "work/up").read_text())
    assert not (folder / "secrets.1.json").exists()
    if kill:
        entry.kill()
    else:
        (folder / "work/go").touch()
    assert await anyio.to_thread.run_sync(entry.wait) == (-signal.SIGKILL if kill else 0)
    while _lives(pid):
        await anyio.sleep(0.02)
    known = {name: dashboard.body[name] for name in ("submission_id", "metadata")}
    dashboard.jobs(row(**known, status="SUCCEEDED", driver_exit_code=0))
    seen = (await backend.poll([handle]))["t"]
    assert seen.state is (Job.UNKNOWN if kill else Job.SUCCEEDED), "a success needs both words"
    if not kill:  # a killed runner may not have read it
        assert (await backend.logs(handle)).text == "***\n"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
