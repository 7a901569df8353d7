"""Fixtures for the command-line tests: a home, in-process commands, and jobs in several states."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from doors import JOB, PLATFORM, TRAIN, environment, quick_warden
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.cli import main
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import request
from lifecycle_kit import until
from waiting import eventually


@pytest.fixture(name="home")
def home_fixture(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(name="ctx")
def w_fixture(home: Path) -> Context:
    return quick_warden(home)


def metering(ctx: Context) -> bool:
    return any(t.meter for t in ctx.provider(PLATFORM).cloud.truths().values())  # type: ignore[attr-defined]


class Cli:
    """Run commands in this process, which is faster. Other tests cover a separate process's output."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        for name in [n for n in os.environ if n.startswith("GPUWARDEN_")]:
            monkeypatch.delenv(name)
        for name, value in environment(home).items():
            monkeypatch.setenv(name, value)

    def __call__(self, *words: str) -> tuple[int, dict[str, Any]]:
        runs_program = words[:1] in {
            ("submit",),
            ("fan-out",),
            ("estimate",),
            ("rehearse",),
        }  # any option after the program is passed to the program
        code = main.run([words[0], "--json", *words[1:]] if runs_program else [*words, "--json"])
        out, err = self.capsys.readouterr()
        assert out.count("\n") == 1 and err == "", out + err
        body = json.loads(out)
        assert isinstance(body, dict) and isinstance(body["ok"], bool) and body["code"]
        if code:
            assert body["ok"] is False and body["message"] and body["hint"], body
        assert (code == 0) is body["ok"], (code, body)
        return code, body

    def shown(self, *words: str) -> tuple[int, str]:
        code = main.run(list(words))
        out, err = self.capsys.readouterr()
        return code, out + err


@pytest.fixture(name="run")
def run_fixture(ctx: Context, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(home, monkeypatch, capsys)


@pytest.fixture(name="train")
def train_fixture(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


OPTIONS = ("--platform", PLATFORM, "--output", "out", "--timeout", "600", "--estimate", "60", "--max-cost", "1")


def launched(run: Cli, train: Path, *more: str) -> str:
    code, checked = run("submit", *OPTIONS, *more, str(train))
    assert (code, checked["code"]) == (0, "checked")
    return str(run("submit", *OPTIONS, *more, "--receipt", checked["receipt"], str(train))[1]["job_id"])


def ended(run: Cli, job_id: str, *states: str) -> dict[str, Any]:
    good = states or ("succeeded",)
    return eventually(lambda: run("check", job_id)[1], every=0.05, good=lambda body: body["state"] in good)


def proven(run: Cli, train: Path) -> str:
    job_id = launched(run, train)
    ended(run, job_id)
    assert run("pull", job_id)[0] == 0 and run("verify", job_id)[0] == 0
    return job_id


class Life:
    """Bring a job to a state that needs the user, by calling the use cases directly."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    async def blocked(self) -> str:
        """Return the teardown ticket of a job that has ended but whose outputs are not copied yet."""
        spec = build(JobSpec, JOB)
        job = (await submit(self.ctx, spec, receipt=(await submit(self.ctx, spec)).receipt)).job
        assert job is not None
        await until(self.ctx, job.id, lambda seen: seen.job.state == "succeeded")
        self.job_id = job.id
        return (await request(self.ctx, job.id, "terminate")).record.id

    async def waiting(self) -> str:
        """Return the teardown ticket of a job whose copy is proven, so that only the approval is missing."""
        ticket = await self.blocked()
        await pull(self.ctx, self.job_id)
        await verify_job(self.ctx, self.job_id)
        return ticket


@pytest.fixture(name="life")
def life_fixture(ctx: Context) -> Life:
    return Life(ctx)
