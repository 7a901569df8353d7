"""Contract for backends that start many jobs as one array. The test of each such backend inherits it.

The test supplies the fixtures of `EngineContract`. Its `engine` is an `ArrayEngine` that can run four tasks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from contract_backend import ENGINE_S, Engine, ended, until
from gpuwarden.backends.base import ArrayBackend, ArrayTask
from gpuwarden.core.errors import BadReply, BadRequest, Unreachable, WardenError
from gpuwarden.core.models import Handle, Known, Place, StopResult, Unknown
from gpuwarden.core.states import Job
from waiting import soon

LIVE = {Job.RUNNING, Job.QUEUED}


class ArrayEngine(Engine, Protocol):
    """Test controls for an engine that supports arrays."""

    def array_limit(self) -> int:
        """Return the engine's maximum number of tasks in an array."""


def tasks(engine: Engine, text: str, tokens: Sequence[str], **fields: object) -> list[ArrayTask]:
    """Return one task per token; all run the same shell line."""
    return [ArrayTask(engine.job(text, env={"MINE": token}, **fields), token) for token in tokens]


async def states(backend: ArrayBackend, handles: Sequence[Handle]) -> list[Job]:
    """Return the current state of each job, in the order of the handles."""
    seen = await backend.poll(handles)
    return [seen[handle.token].state for handle in handles]


async def settled(backend: ArrayBackend, handles: Sequence[Handle], running: int) -> None:
    """Wait until `running` jobs are running; fail if there are ever more."""

    def good(found: list[Job]) -> bool:
        assert found.count(Job.RUNNING) <= running, found
        return found.count(Job.RUNNING) == running

    await soon(lambda: states(backend, handles), ENGINE_S, every=0.05, good=good)


class ArrayContract:
    """The promises of `gpuwarden.backends.base.ArrayBackend`."""

    async def test_the_backend_offers_arrays(self, backend: ArrayBackend) -> None:
        assert isinstance(backend, ArrayBackend)

    async def test_each_task_is_its_own_job(self, backend: ArrayBackend, place: Place, engine: ArrayEngine) -> None:
        names = ["r-one", "r-two", "r-three"]
        text = 'echo "$MINE"; test "$MINE" != r-two || exit 3'
        handles = await backend.submit_array(tasks(engine, text, names), place, "r-each", at_once=3)
        assert list(handles) == names and len({h.run_dir for h in handles.values()}) == 3
        seen = [await ended(backend, handles[name]) for name in names]
        assert [(o.state, o.exit_code) for o in seen] == [(Job.SUCCEEDED, 0), (Job.FAILED, 3), (Job.SUCCEEDED, 0)]
        assert [(await backend.logs(handles[name])).text for name in names] == [f"{name}\n" for name in names]
        assert [await backend.stop(handles[name]) for name in names] == [StopResult.GONE] * 3

    async def test_each_task_gets_its_own_secrets_and_inputs(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine, tmp_path: Path
    ) -> None:
        given = []
        for name in ("s-one", "s-two"):
            file = tmp_path / f"{name}.txt"
            file.write_text(f"{name}\n")
            text = 'test "$TOKEN" = "secret-of-$MINE" && cat in.txt && ! env | grep -q secret-of-s-t.*secret-of-s-o'
            spec = engine.job(text, env={"MINE": name}, secrets=["TOKEN"])
            given.append(ArrayTask(spec, name, {"TOKEN": f"secret-of-{name}"}, inputs={"in.txt": file}))
        handles = await backend.submit_array(given, place, "s-both", at_once=2)
        for name, handle in handles.items():
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
            assert (await backend.logs(handle)).text == f"{name}\n"

    async def test_a_repeated_array_starts_nothing(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine
    ) -> None:
        given = tasks(engine, "echo run", ["a-one", "a-two"])
        first = await backend.submit_array(given, place, "a-again", at_once=2)
        assert await backend.submit_array(given, place, "a-again", at_once=2) == first
        for handle in first.values():
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert await backend.submit_array(given[1:], place, "a-again", at_once=2) == {"a-two": first["a-two"]}
        assert await states(backend, list(first.values())) == [Job.SUCCEEDED] * 2, "nothing runs after a repetition"
        assert [(await backend.logs(h)).text for h in first.values()] == ["run\n"] * 2

    async def test_jobs_are_adopted_after_a_lost_reply(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine
    ) -> None:
        given = tasks(engine, "echo run", ["l-one", "l-two", "l-three"])
        with engine.cut(), suppress(WardenError):
            await backend.submit_array(given, place, "l-lost", at_once=2)
        found = [await backend.find(place, task.token) for task in given]
        handles = await backend.submit_array(given, place, "l-lost", at_once=2)
        for answer, handle in zip(found, handles.values(), strict=True):
            assert isinstance(answer, Known) and answer.value is not None and answer.value.run_dir == handle.run_dir
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
            assert (await backend.logs(handle)).text == "run\n"

    async def test_a_task_and_a_job_with_the_same_token_run_once(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine
    ) -> None:
        given = tasks(engine, "echo run", ["o-one", "o-two", "o-three"])
        alone = await backend.submit(given[1].spec, place, "o-two", secrets={})
        handles = await backend.submit_array(given, place, "o-all", at_once=3)
        assert handles["o-two"].run_dir == alone.run_dir
        late = await backend.submit(given[0].spec, place, "o-one", secrets={})
        assert handles["o-one"].run_dir == late.run_dir
        for handle in handles.values():
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
        await backend.submit(given[2].spec, place, "o-three", secrets={})
        assert await states(backend, list(handles.values())) == [Job.SUCCEEDED] * 3
        assert [(await backend.logs(h)).text for h in handles.values()] == ["run\n"] * 3

    async def test_a_later_attempt_of_a_task_is_its_own_job(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine
    ) -> None:
        given = tasks(engine, "exit 7", ["t-one", "t-two"])
        handles = await backend.submit_array(given, place, "t-tries", at_once=2)
        for handle in handles.values():
            assert (await ended(backend, handle)).exit_code == 7
        second = await backend.submit(given[0].spec, place, "t-one", secrets={}, attempt=2)
        await until(backend, second, lambda o: o.attempt == 2 and o.state is Job.FAILED)
        assert (await backend.poll([handles["t-two"]]))["t-two"].attempt == 1

    async def test_the_array_limit_holds_and_tasks_stop_individually(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine
    ) -> None:
        given = tasks(engine, "sleep 60", ["b-0", "b-1", "b-2", "b-3"])
        handles = list((await backend.submit_array(given, place, "b-bound", at_once=2)).values())
        await settled(backend, handles, 2)
        before = engine.questions()
        now = await states(backend, handles)
        assert engine.questions() - before == 1, "one question for all of them"
        assert sorted(now) == [Job.QUEUED] * 2 + [Job.RUNNING] * 2
        waiting = [h for h, state in zip(handles, now, strict=True) if state is Job.QUEUED]
        runs = [h for h, state in zip(handles, now, strict=True) if state is Job.RUNNING]
        assert await backend.stop(waiting[0], grace_s=1) in {StopResult.STOPPED, StopResult.PENDING}
        assert (await ended(backend, waiting[0])).state is Job.CANCELED
        assert await states(backend, runs) == [Job.RUNNING] * 2
        await backend.stop(runs[0], grace_s=1)
        assert (await ended(backend, runs[0])).state is Job.CANCELED
        await settled(backend, [runs[1], waiting[1]], 2)
        for handle in handles:
            await backend.stop(handle, grace_s=0.2)
        for handle in handles:
            assert (await ended(backend, handle)).state is Job.CANCELED
            assert await backend.stop(handle) is StopResult.GONE

    @pytest.mark.parametrize("wrong", ["none", "twice", "apart", "many"])
    async def test_an_invalid_array_is_refused_before_anything_is_sent(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine, wrong: str
    ) -> None:
        given = tasks(engine, "echo run", ["w-one", "w-two"])
        cases = {
            "none": [],
            "twice": [given[0], given[0]],
            "apart": [given[0], ArrayTask(engine.job("echo run", timeout_s=1_200), "w-two")],
            "many": tasks(engine, "echo run", ["w-one", *(f"w-{n}" for n in range(engine.array_limit()))]),
        }
        with pytest.raises(BadRequest):
            await backend.submit_array(cases[wrong], place, f"w-{wrong}", at_once=2)
        assert await backend.find(place, "w-one") == Known(None)

    @pytest.mark.parametrize("trouble", ["down", "odd"])
    async def test_submitting_an_array_to_a_failing_engine_starts_nothing(
        self, backend: ArrayBackend, place: Place, engine: ArrayEngine, trouble: str
    ) -> None:
        given = tasks(engine, "echo run", [f"d-{trouble}-1", f"d-{trouble}-2"])
        with getattr(engine, trouble)():
            with pytest.raises((Unreachable, BadReply)):
                await backend.submit_array(given, place, f"d-{trouble}", at_once=2)
            assert isinstance(await backend.find(place, given[0].token), Unknown)
        assert [await backend.find(place, task.token) for task in given] == [Known(None)] * 2
        handles = await backend.submit_array(given, place, f"d-{trouble}", at_once=2)
        for handle in handles.values():
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
            assert (await backend.logs(handle)).text == "run\n"
