"""Contract for every backend. A backend's test inherits one of two classes.

`EngineContract` applies to any engine. The test supplies three fixtures: `backend`, the backend under test; `place`, a
fresh place that can run a POSIX shell; and `engine`, an `Engine` that injects faults. `BackendContract` adds the
promises of our runner, for backends that start jobs with it, and supplies `engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest

from gpuwarden.backends._runner import RunnerBackend
from gpuwarden.backends.base import Backend, ExaminingBackend
from gpuwarden.core.errors import BadReply, Unreachable, WardenError
from gpuwarden.core.models import Artifact, Handle, JobSpec, Known, Level, Observation, Place, StopResult, Unknown
from gpuwarden.core.states import Job
from waiting import soon

ENGINE_S = 100.0
"""Time limit for waits: operations that take seconds can take minutes while other tests load the machine."""


def shell(text: str, **fields: object) -> JobSpec:
    """Return the spec of a job that runs a shell line."""
    return JobSpec.model_validate({"platform": "local", "command": ["sh", "-c", text], "timeout_s": 1800, **fields})


async def until(backend: Backend, handle: Handle, good: Callable[[Observation], bool]) -> Observation:
    """Poll until `good` accepts the observation; fail with the last observation after ENGINE_S."""

    async def look() -> Observation:
        return (await backend.poll([handle]))[handle.token]

    return await soon(look, ENGINE_S, every=0.2, good=good)


async def ended(backend: Backend, handle: Handle) -> Observation:
    """Poll until the job has ended; return the last observation."""
    return await until(backend, handle, lambda o: o.state not in {Job.RUNNING, Job.QUEUED})


class Engine(Protocol):
    """Test controls for a backend's engine: drop or distort its replies, and count its queries."""

    def job(self, text: str, **fields: object) -> JobSpec:
        """Return a job that runs a shell line on the engine."""

    def cut(self) -> AbstractContextManager[None]:
        """Carry out the next submit but drop its reply."""

    def down(self) -> AbstractContextManager[None]:
        """Leave every request unanswered."""

    def odd(self) -> AbstractContextManager[None]:
        """Answer every request in an unknown format."""

    def questions(self) -> int:
        """Return the number of job state queries that the engine received."""


class EngineContract:
    """The promises of `gpuwarden.backends.base.Backend` that hold for any engine."""

    async def test_the_log_is_read_by_a_cursor(self, backend: Backend, place: Place, engine: Engine) -> None:
        handle = await backend.submit(engine.job("echo hello; echo bye"), place, "e-log", secrets={})
        seen = await ended(backend, handle)
        assert (seen.state, seen.exit_code, seen.attempt) == (Job.SUCCEEDED, 0, 1)
        chunk = await backend.logs(handle)
        assert chunk.text == "hello\nbye\n" and chunk.next == chunk.size == 10
        assert (await backend.logs(handle, 3, 4)).text == "lo\nb"
        assert (await backend.logs(handle, -4)).text == "bye\n"
        assert (await backend.logs(handle, chunk.next)).text == ""

    async def test_resubmitting_starts_nothing_but_a_later_attempt_does(
        self, backend: Backend, place: Place, engine: Engine
    ) -> None:
        spec = engine.job("exit 7")
        first = await backend.submit(spec, place, "e-once", secrets={})
        again = await backend.submit(spec, place, "e-once", secrets={})
        assert first.run_dir == again.run_dir
        seen = await ended(backend, first)
        assert (seen.state, seen.exit_code) == (Job.FAILED, 7)
        await backend.submit(spec, place, "e-once", secrets={})
        assert (await backend.poll([first]))["e-once"].state is Job.FAILED, "nothing runs after a late repetition"
        second = await backend.submit(spec, place, "e-once", secrets={}, attempt=2)
        assert (await until(backend, second, lambda o: o.attempt == 2 and o.state is Job.FAILED)).exit_code == 7

    async def test_jobs_are_adopted_after_a_lost_reply(self, backend: Backend, place: Place, engine: Engine) -> None:
        spec = engine.job("echo run")
        with engine.cut(), suppress(WardenError):
            await backend.submit(spec, place, "e-lost", secrets={})
        found = await backend.find(place, "e-lost")
        assert isinstance(found, Known) and found.value is not None
        handle = await backend.submit(spec, place, "e-lost", secrets={})
        assert handle.run_dir == found.value.run_dir
        assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert (await backend.logs(handle)).text == "run\n"

    async def test_a_job_never_submitted_is_not_found(self, backend: Backend, place: Place, engine: Engine) -> None:
        assert await backend.find(place, "e-never") == Known(None)
        await backend.submit(engine.job("true"), place, "e-other", secrets={})
        assert await backend.find(place, "e-never") == Known(None)

    async def test_many_jobs_are_polled_in_one_request(self, backend: Backend, place: Place, engine: Engine) -> None:
        names = ["e-p1", "e-p2", "e-p3", "e-p4"]
        handles = [await backend.submit(engine.job("sleep 1800"), place, name, secrets={}) for name in names]
        for handle in handles:
            await until(backend, handle, lambda o: o.state in {Job.RUNNING, Job.QUEUED})
        before = engine.questions()
        seen = await backend.poll(handles)
        assert engine.questions() - before == 1
        assert sorted(seen) == names and all(o.state in {Job.RUNNING, Job.QUEUED} for o in seen.values())
        for handle in handles:
            await backend.stop(handle, grace_s=0.2)

    async def test_stop_ends_a_job_and_a_second_stop_returns_gone(
        self, backend: Backend, place: Place, engine: Engine
    ) -> None:
        handle = await backend.submit(engine.job("sleep 1800"), place, "e-stop", secrets={})
        assert await backend.stop(handle, grace_s=1) in {StopResult.STOPPED, StopResult.PENDING}
        assert (await ended(backend, handle)).state is Job.CANCELED
        assert await backend.stop(handle, grace_s=1) is StopResult.GONE

    @pytest.mark.parametrize("trouble", ["down", "odd"])
    async def test_a_failing_engine_is_never_read_as_empty(
        self, backend: Backend, place: Place, engine: Engine, trouble: str
    ) -> None:
        handle = await backend.submit(engine.job("sleep 1800"), place, "e-trouble", secrets={})
        await until(backend, handle, lambda o: o.state in {Job.RUNNING, Job.QUEUED})
        with getattr(engine, trouble)():
            assert isinstance(await backend.find(place, "e-trouble"), Unknown)
            assert isinstance(await backend.find(place, "e-nothing"), Unknown)
            with pytest.raises((Unreachable, BadReply)):
                await backend.poll([handle])
            with pytest.raises((Unreachable, BadReply)):
                await backend.submit(engine.job("true"), place, "e-new", secrets={})
            with pytest.raises(WardenError):
                await backend.stop(handle)
        assert (await backend.poll([handle]))["e-trouble"].state in {Job.RUNNING, Job.QUEUED}
        assert await backend.find(place, "e-new") == Known(None), "nothing was started in the dark"
        await backend.stop(handle, grace_s=0.2)


class RunnerEngine:
    """The runner as an engine, with faults injected into calls to it."""

    def __init__(self, backend: RunnerBackend, patch: pytest.MonkeyPatch) -> None:
        self.backend, self.patch, self.polls = backend, patch, 0
        self.plain = backend.ask_lines
        patch.setattr(backend, "ask_lines", self.counted)

    async def counted(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float
    ) -> list[dict[str, Any]]:
        self.polls += verb == "poll"
        return await self.plain(place, verb, run_dir, request, silence_s=silence_s)

    def job(self, text: str, **fields: object) -> JobSpec:
        return shell(text, **fields)

    @contextmanager
    def _instead(self, way: Any) -> Iterator[None]:
        with self.patch.context() as patch:
            patch.setattr(self.backend, "ask_lines", way)
            yield

    def cut(self) -> AbstractContextManager[None]:
        async def lost(place: Place, verb: str, *rest: Any, silence_s: float) -> Any:
            await self.plain(place, verb, *rest, silence_s=silence_s)
            raise Unreachable("the reply was lost")

        return self._instead(lost)

    def down(self) -> AbstractContextManager[None]:
        async def silent(*_: Any, silence_s: float) -> Any:
            raise Unreachable("nobody answers")

        return self._instead(silent)

    def odd(self) -> AbstractContextManager[None]:
        async def nonsense(*_: Any, silence_s: float) -> Any:
            return [{"ok": True, "welcome": "to this machine"}]

        return self._instead(nonsense)

    def questions(self) -> int:
        return self.polls


class BackendContract(EngineContract):
    """The promises of a backend that starts jobs with our runner."""

    @pytest.fixture
    def engine(self, backend: RunnerBackend, monkeypatch: pytest.MonkeyPatch) -> Engine:
        return RunnerEngine(backend, monkeypatch)

    async def test_a_job_runs_to_success_and_its_log_can_be_read(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("echo hello; echo oops >&2"), place, "t-ok", secrets={})
        seen = await ended(backend, handle)
        assert (seen.state, seen.exit_code, seen.attempt) == (Job.SUCCEEDED, 0, 1)
        assert seen.started_at is not None and seen.ended_at is not None and seen.ended_at >= seen.started_at
        chunk = await backend.logs(handle)
        assert chunk.text == "hello\noops\n"
        assert chunk.next == chunk.size == seen.log_bytes == 11
        assert (await backend.logs(handle, chunk.next)).text == ""
        assert (await backend.logs(handle, -5)).text == "oops\n"

    async def test_a_failed_job_reports_its_exit_code(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("exit 7"), place, "t-fail", secrets={})
        seen = await ended(backend, handle)
        assert (seen.state, seen.exit_code) == (Job.FAILED, 7)

    async def test_a_script_gets_its_arguments_unchanged(self, backend: Backend, place: Place) -> None:
        words = ("a b", "$HOME", "'\"", "", "ü", "-x", "*", "line\nline")
        spec = JobSpec(platform="local", script="import sys\nprint(ascii(sys.argv[1:]))\n", args=words)
        handle = await backend.submit(spec, place, "t-args", secrets={})
        assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert (await backend.logs(handle)).text == f"{list(words)!a}\n"

    async def test_repeated_submits_launch_once(self, backend: Backend, place: Place) -> None:
        spec = shell("echo run >> count; sleep 0.3; cat count")
        handles: list[Handle] = []

        async def go() -> None:
            handles.append(await backend.submit(spec, place, "t-once", secrets={}))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(go)
        assert len({h.run_dir for h in handles}) == 1
        await ended(backend, handles[0])
        await backend.submit(spec, place, "t-once", secrets={})
        assert (await backend.logs(handles[0])).text == "run\n"

    async def test_a_later_attempt_runs_in_the_same_folder(self, backend: Backend, place: Place) -> None:
        spec = shell("echo attempt $GPUWARDEN_ATTEMPT; ls; touch saved")
        handle = await backend.submit(spec, place, "t-again", secrets={})
        await ended(backend, handle)
        await backend.submit(spec, place, "t-again", secrets={}, attempt=2)
        seen = await until(backend, handle, lambda o: o.attempt == 2 and o.state is Job.SUCCEEDED)
        assert seen.state is Job.SUCCEEDED
        await backend.submit(spec, place, "t-again", secrets={}, attempt=1)  # a late retry launches nothing
        assert (await backend.logs(handle)).text == "attempt 1\nattempt 2\nsaved\n"

    async def test_inputs_exist_before_the_start_and_then_belong_to_the_job(
        self, backend: Backend, place: Place, tmp_path: Path
    ) -> None:
        if not backend.takes_inputs:
            pytest.skip("this backend takes no files")
        near = tmp_path / "kept"
        near.mkdir()
        names = ["one.txt", "-rf", "a b/'q' $(touch canary) \"d\"/ü.txt", "a b/none", "deep/er/x.bin"]
        inputs = {}
        for n, name in enumerate(names):
            inputs[name] = near / str(n)
            inputs[name].write_bytes(b"" if name == "a b/none" else os.urandom(10_000) if n == 4 else name.encode())
        spec = shell("ls -A; cat ./*/*/ü.txt; wc -c < deep/er/x.bin; cat one.txt; echo mine > one.txt")
        handle = await backend.submit(spec, place, "t-in", secrets={}, inputs=inputs)
        await ended(backend, handle)
        first = (await backend.logs(handle)).text
        assert first.replace(" ", "") == "-rf\nab\ndeep\none.txt\n" + names[2].replace(" ", "") + "10000\none.txt"
        assert not (await backend.disclose(handle)).files[1:], "only what the job wrote is fresh"
        await backend.submit(spec, place, "t-in", secrets={}, attempt=2, inputs=inputs)
        await until(backend, handle, lambda o: o.attempt == 2 and o.state is Job.SUCCEEDED)
        assert (await backend.logs(handle)).text.endswith("mine\n"), "a relaunch leaves what the job made of it"
        assert inputs["one.txt"].read_bytes() == b"one.txt"

    async def test_checkpoints_are_examined_on_the_machine(self, backend: Backend, place: Place) -> None:
        if not isinstance(backend, ExaminingBackend):
            pytest.skip("this backend can't look at files where they lie")
        made = "mkdir out; printf '%s' '{\"a\": 1}' > out/a.json; printf '{' > out/b.json; printf x > lone.txt"
        handle = await backend.submit(shell(made), place, "t-look", secrets={})
        await ended(backend, handle)
        for _ in range(2):
            found = await backend.examine(handle, ["out", "lone.txt", "none"], level=Level.CONTENT, seconds=30)
            verdicts = {f["path"]: f["verdict"] for f in found["out"]["files"]}
            assert verdicts == {"a.json": "proven", "b.json": "refuted"}
            assert [f["path"] for f in found["lone.txt"]["files"]] == ["lone.txt"]
            assert "path" in found["none"]["error"]
            (archive,) = Path(handle.run_dir).glob("gpuwarden-checkpoints-*.pyz")
            archive.write_bytes(b"raise SystemExit")  # jobs may write here; a changed file is uploaded again

    async def test_find_returns_only_launched_jobs(self, backend: Backend, place: Place) -> None:
        assert await backend.find(place, "t-find") == Known(None)
        handle = await backend.submit(shell("true"), place, "t-find", secrets={})
        where = handle.model_copy(update={"supervisor": None})  # only the launch returns the supervisor
        assert await backend.find(place, "t-find") == Known(where)
        await ended(backend, handle)
        assert await backend.find(place, "t-find") == Known(where)

    async def test_one_poll_reports_several_jobs(self, backend: Backend, place: Place) -> None:
        first = await backend.submit(shell("exit 0"), place, "t-a", secrets={})
        second = await backend.submit(shell("exit 1"), place, "t-b", secrets={})
        for handle in (first, second):
            await ended(backend, handle)
        seen = await backend.poll([first, second])
        assert {k: o.state for k, o in seen.items()} == {"t-a": Job.SUCCEEDED, "t-b": Job.FAILED}

    async def test_a_missing_job_is_unknown(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("true"), place, "t-real", secrets={})
        ghost = handle.model_copy(update={"token": "t-ghost", "run_dir": handle.run_dir + "-ghost"})
        assert (await backend.poll([ghost]))["t-ghost"].state is Job.UNKNOWN
        assert await backend.stop(ghost) is StopResult.GONE

    async def test_stop_ends_the_process_group_and_a_second_stop_returns_gone(
        self, backend: Backend, place: Place
    ) -> None:
        handle = await backend.submit(shell("sleep 1800 & sleep 1800 & wait"), place, "t-stop", secrets={})
        assert await backend.stop(handle, grace_s=2) in {StopResult.STOPPED, StopResult.PENDING}
        assert (await ended(backend, handle)).state is Job.CANCELED
        assert await backend.stop(handle, grace_s=2) is StopResult.GONE

    async def test_a_job_ignoring_sigterm_is_killed_after_the_grace(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("trap '' TERM; echo ready; sleep 1800"), place, "t-deaf", secrets={})
        await until(backend, handle, lambda o: o.log_bytes > 0)
        assert await backend.stop(handle, grace_s=0.3) in {StopResult.STOPPED, StopResult.PENDING}
        assert (await ended(backend, handle)).state is Job.CANCELED

    async def test_a_secret_reaches_the_job_and_not_the_log(self, backend: Backend, place: Place) -> None:
        spec = shell('echo "token=$TOKEN"; test "$TOKEN" = s3cret-value', secrets=["TOKEN"])
        handle = await backend.submit(spec, place, "t-secret", secrets={"TOKEN": "s3cret-value"})
        assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert (await backend.logs(handle)).text == "token=***\n"

    async def test_the_manifest_lists_files_missing_and_skipped_paths(self, backend: Backend, place: Place) -> None:
        text = "mkdir -p out/deep; printf abc > out/deep/a; ln -s /etc/passwd out/link; mkfifo out/pipe; printf x > one"
        handle = await backend.submit(shell(text), place, "t-files", secrets={})
        await ended(backend, handle)
        listing = await backend.manifest(handle, ["out", "one", "none"])
        assert [(f.path, f.size) for f in listing.files] == [("out/deep/a", 3), ("one", 1)]
        assert listing.files[0].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert listing.missing == ("none",)
        assert [s.partition(":")[0] for s in listing.skipped] == ["out/link", "out/pipe"]
        listed = await backend.list_files(handle, ["out"])
        assert [(f.path, f.sha256) for f in listed.files] == [("out/deep/a", None)]

    async def test_a_file_streams_from_any_offset(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(
            shell("head -c 700000 /dev/zero > z; printf end >> z"), place, "t-read", secrets={}
        )
        await ended(backend, handle)
        artifact = Artifact(path="z", size=700_003)
        for offset in (0, 699_999, 700_003):
            data = b"".join([part async for part in backend.read(handle, artifact, offset)])
            assert data == (b"\0" * 700_000 + b"end")[offset:]

    async def test_files_outside_the_run_folder_are_never_read(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("ln -s /etc/passwd link; mkfifo pipe"), place, "t-out", secrets={})
        await ended(backend, handle)
        for path in ("../status.json", "/etc/passwd", "link", "none", "pipe"):
            with pytest.raises(WardenError):
                async for _ in backend.read(handle, Artifact(path=path, size=1)):
                    pytest.fail("a byte came")

    async def test_undeclared_fresh_files_are_disclosed(self, backend: Backend, place: Place) -> None:
        handle = await backend.submit(shell("touch mine; touch other", outputs=["mine"]), place, "t-dis", secrets={})
        await ended(backend, handle)
        assert [f.path for f in (await backend.disclose(handle)).files] == ["other"]
