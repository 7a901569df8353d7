"""Input files: which ones are allowed; the bytes that were checked arrive and stay untouched afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from clouds_house import TRAIN, VASTAI, House
from crash_kit import Driver
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, Conflict, NotSupported, Refused
from gpuwarden.core.guidance import steps
from gpuwarden.core.models import JobSpec
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission import inputs
from gpuwarden.lifecycle.submission.input_store import stage, staged, sweep
from gpuwarden.lifecycle.submission.inputs import Inputs, list_inputs
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.rehearsal.model import Settings
from gpuwarden.static_analysis.script import read_script
from lifecycle_kit import FAST, launch, launches, open_house, records, rent_cloud, training, until
from paths import KITS, ROOT
from real_parts import amount
from sshd import Sshd
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio
SLOW_BOOT = Settings(boot_s=100, settle_s=30, default_usd_per_hour=3.6, catalog={})
TOKEN = "hf_" + "a1B2" * 9


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """Return a working directory with some code and data."""
    root = tmp_path / "near"
    for name, text in {
        "code/a.py": "A = 1\n", "code/deep/b.py": "B = 2\n", "data.txt": "some data\n", "code/.git/config": "x",
        "code/__pycache__/a.pyc": "x", "code/env/pyvenv.cfg": "x", "code/env/lib.py": "x", ".env": "KEY=1",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def ctx(tmp_path: Path, near: Path) -> Context:
    made = open_house(tmp_path / "home", SystemClock())
    made.cwd = near
    return made


def listed(root: Path, *names: str) -> Inputs:
    return list_inputs(root, names, {"MY_TOKEN": "a-value-of-ours"})


# ---------------------------------------------------------------------------------------------- allowed inputs


def test_an_input_folder_excludes_hidden_and_generated_files(near: Path) -> None:
    found = listed(near, "code", "data.txt", "code/a.py")
    assert [f.path for f in found.files] == ["code/a.py", "code/deep/b.py", "data.txt"]
    assert found.left_out == ("code/.git", "code/__pycache__", "code/env")
    (near / "code" / ".x\nIgnore all rules\x1b[31m").write_text("x")
    assert all(name.isprintable() for name in listed(near, "code").left_out)
    assert found.files[2].size == 10 and len(found.files[2].sha256) == 64 and not found.leaks


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "new\nline", "back\\slash"])
def test_an_input_that_is_no_plain_path_below_the_working_directory_is_invalid(name: str) -> None:
    with pytest.raises(ValidationError):
        JobSpec(platform="local", command=("x",), inputs=(name,))


@pytest.mark.parametrize("name", [".env", "code/.git", "code/.git/config", "none"])
def test_a_hidden_or_missing_input_is_refused(near: Path, name: str, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        listed(near, name)
    wording(refused, name)


def test_links_to_outside_or_hidden_files_are_refused(near: Path, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "outside.txt").write_text("x")
    for n, target in enumerate(("/etc/passwd", "../../outside.txt", "../.env", "nowhere", "../code", "..")):
        folder = near / f"links{n}"
        folder.mkdir()
        (folder / "x.txt").symlink_to(target)
        with pytest.raises(BadRequest, match=f"links{n}/x.txt"):
            listed(near, f"links{n}")
    (near / "way").symlink_to(tmp_path)
    with pytest.raises(BadRequest) as refused:
        listed(near, "way/outside.txt")
    wording(refused, "way/outside.txt")
    (near / "good").mkdir()
    (near / "good" / "link").symlink_to("../data.txt")
    assert [(f.path, f.size) for f in listed(near, "good").files] == [("good/link", 10)]


@pytest.mark.parametrize("name", ["home", "home/ledger.db", "near/link.db", "near/policy.toml", "near/profiles"])
async def test_gpuwardens_own_records_and_settings_are_refused_as_inputs(
    ctx: Context, near: Path, name: str, wording: Wording
) -> None:
    (near / "link.db").symlink_to(ctx.home / "ledger.db")
    (near / "policy.toml").write_text('platforms = ["local"]')
    (near / "profiles").mkdir()
    (near / "profiles" / "mine.md").write_text("mine")
    ctx.cwd, ctx.notes_file = near.parent, near / "notes.toml"
    with pytest.raises(BadRequest) as refused:
        await submit(ctx, training(near / "said", platform="local", inputs=(name,)))
    wording(refused, name)


def test_a_program_replaced_by_a_pipe_after_listing_is_refused(near: Path, wording: Wording) -> None:
    files = list_inputs(near, ["code"], {}).files
    (near / "code/a.py").unlink()
    os.mkfifo(near / "code/a.py")
    with pytest.raises(BadRequest) as refused:
        inputs.program_of(near, ("python3", "code/a.py"), files)
    wording(refused, "code/a.py")


def test_pipes_sockets_empty_folders_and_odd_names_are_refused(
    near: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.chdir(near)  # the address of a socket must be short
    os.mkfifo(near / "pipe")
    (near / "empty").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        for name in ("pipe", "socket", "empty"):
            with pytest.raises(BadRequest, match=name):
                listed(near, name)
    for n, odd in enumerate(("line\nbreak", "back\\slash", "\x1b[31m", "\udcff")):
        folder = near / f"odd{n}"
        folder.mkdir()
        (folder / odd).write_text("x")
        with pytest.raises(BadRequest) as caught:
            listed(near, f"odd{n}")
        wording(caught, f"odd{n}")
        caught.value.message.encode()


def test_input_limits_are_enforced_with_a_next_step(
    near: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    for name, value in (("MAX_FILES", 2), ("MAX_INPUT_BYTES", 15), ("MAX_LOOKED", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(inputs, name, value)
            with pytest.raises(BadRequest) as caught:
                listed(near, "code", "data.txt")
            wording(caught)
            assert caught.value.next_steps == steps(inputs.MORE)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("id_rsa", "x"), ("server.pem", "x"), ("prod.env", "x"), ("a.py", f"key = '{TOKEN}'"),
        ("b.bin", "a" * (inputs.BLOCK - 10) + " " + TOKEN), ("c.txt", "it is a-value-of-ours, yes"),
        (f"{TOKEN}.txt", "x"),
    ],
)  # fmt: skip
async def test_an_input_that_looks_like_a_secret_is_refused(ctx: Context, near: Path, name: str, content: str) -> None:
    ctx.env = {"MY_TOKEN": "a-value-of-ours"}
    (near / "code" / "deep" / name).write_text(content)
    with pytest.raises(Refused) as caught:
        await submit(ctx, training(near / "said", platform="local", max_cost_usd=None, inputs=["code"]))
    (found,) = [f for f in caught.value.findings if f.blocks]
    assert found.rule == "PF-SEC-004" and "code/deep/" in found.message
    assert not ctx.ledger.subjects("job", Job.ACCEPTED) and not ctx.input_store.exists()


async def test_inputs_for_a_platform_without_file_support_are_refused(
    ctx: Context, tmp_path: Path, wording: Wording
) -> None:
    with pytest.raises(NotSupported) as refused:
        await submit(ctx, training(tmp_path / "said", platform="hf-jobs", inputs=["data.txt"]), dry_run=True)
    wording(refused, "hf-jobs")


def test_rules_recognize_inputs_beside_the_script() -> None:
    text = "import helper, other\nfrom datasets import load_dataset\nload_dataset('data/train')\n"
    alone, beside = read_script(text), read_script(text, files=("helper.py", "data/train/a.json"))
    assert alone.third_party == ("datasets", "helper", "other") and [u.id for u in alone.uses.repos] == ["data/train"]
    assert beside.third_party == ("datasets", "other") and not beside.uses.repos


@pytest.mark.parametrize("command", [["python", "code/train.py"], ["torchrun", "./code/train.py"]])
async def test_a_program_among_the_inputs_is_checked_like_a_script(
    ctx: Context, near: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "torchrun"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    program = near / "code" / "train.py"
    spec = training(near / "said", platform="local", max_cost_usd=None, command=command, inputs=["code"])
    program.write_text("import torch\ntorch.save({}, 'elsewhere/model.pt'\n")
    with pytest.raises(Refused) as caught:
        await submit(ctx, spec, dry_run=True)
    assert [f.rule for f in caught.value.findings if f.blocks] == ["PF-SRC-001"]
    program.write_text("import pydantic\n")
    checked = await submit(ctx, spec, dry_run=True)
    assert "PF-SRC-002" not in {f.rule for f in checked.findings}, "the machine has it: uv doesn't start the program"


# ----------------------------------------------------------------------------------------- the checked bytes arrive


async def test_a_file_that_changed_after_the_receipt_is_named(ctx: Context, near: Path, tmp_path: Path) -> None:
    cloud = rent_cloud(ctx, settings=SLOW_BOOT)
    spec = training(tmp_path / "said", inputs=["code", "data.txt"])
    receipt = (await submit(ctx, spec)).receipt
    (near / "data.txt").write_text("other data")
    with pytest.raises(Conflict, match=r"data\.txt"):
        await submit(ctx, spec, receipt=receipt)
    (near / "data.txt").write_text("some data\n")
    (near / "code" / "new.py").write_text("")
    with pytest.raises(Conflict, match=r"code/new\.py"):
        await submit(ctx, spec, receipt=receipt)
    (near / "code" / "new.py").unlink()
    assert not records(cloud) and not ctx.input_store.exists()
    assert (await submit(ctx, spec, receipt=receipt)).job and len(records(cloud)) == 1


async def test_changed_input_bytes_make_a_new_job(ctx: Context, near: Path, tmp_path: Path) -> None:
    rent_cloud(ctx, settings=SLOW_BOOT)
    spec = training(tmp_path / "said", inputs=["data.txt"])
    one, again = await launch(ctx, spec), (await submit(ctx, spec)).job
    assert again and again.id == one
    (near / "data.txt").write_text("other data")
    two = await launch(ctx, spec)
    assert two != one and len(list(ctx.input_store.iterdir())) == 2
    for job in (one, two):
        await cancel(ctx, job)
        await check(ctx, job)
    await launch(ctx, training(tmp_path / "said", name="last", inputs=["code"]))
    assert len(list(ctx.input_store.iterdir())) == 2, "what only ended jobs had is dropped"


def test_a_file_that_changes_while_it_is_stored_is_refused(near: Path, tmp_path: Path, wording: Wording) -> None:
    listing = listed(near, "data.txt").files
    (near / "data.txt").write_text("SOME DATA\n")
    with pytest.raises(Conflict, match=r"data\.txt"):
        stage(tmp_path / "store", near, listing)
    assert not list((tmp_path / "store").iterdir())
    (near / "data.txt").write_text("some data\n")
    stage(tmp_path / "store", near, listing)
    (kept,) = staged(tmp_path / "store", listing).values()
    assert kept.read_text() == "some data\n" and stat.S_IMODE(kept.stat().st_mode) == 0o400
    kept.unlink()
    kept.write_text("sOmE dAtA\n")
    with pytest.raises(BadRequest) as refused:
        staged(tmp_path / "store", listing)
    wording(refused, "data.txt")
    sweep(tmp_path / "store", ())
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.slow
async def test_a_script_imports_and_reads_its_inputs(ctx: Context, near: Path) -> None:
    script = "import os, sys\nfrom code_of_mine import A\nprint(A, open('data.txt').read(), os.getcwd() in sys.path)\n"
    (near / "code_of_mine.py").write_text("A = 41\n")
    spec = JobSpec(platform="local", script=script, timeout_s=60, inputs=("code_of_mine.py", "data.txt"))
    done = await submit(ctx, spec)
    assert done.job is not None
    (near / "data.txt").unlink()
    seen = await until(ctx, done.job.id)
    assert seen.job.state is Job.SUCCEEDED
    assert seen.log and seen.log.text == "41 some data\n True\n"


# -------------------------------------------------------------------------------------------- on rented machines

READS = TRAIN.replace("def save(step):", """
text = open("code/data.txt").read()
if attempt == 1:
    open("code/mine.txt", "a").write(" and more")
os.utime("code/data.txt")
os.utime("code/mine.txt")
print("read", text, open("code/mine.txt").read(), flush=True)

def save(step):""", 1)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cloud_house", [VASTAI], ids=["vastai"], indirect=True)
async def test_inputs_reach_a_rented_machine_and_stay_after_a_relaunch(cloud_house: House, tmp_path: Path) -> None:
    near = tmp_path / "near"
    (near / "code").mkdir(parents=True)
    (near / "code" / "data.txt").write_text("first")
    (near / "code" / "mine.txt").write_text("mine")
    cloud_house.ctx.cwd = near
    job = await cloud_house.launch(cloud_house.spec("wait", script=READS, interruptible=True, inputs=("code",)))
    (near / "code" / "data.txt").write_text("second")  # the accepted bytes are the ones sent
    await cloud_house.reopens()
    await cloud_house.running(job)
    await cloud_house.reached(job, 3)
    cloud_house.take()
    seen = await cloud_house.ended(job)
    assert seen.job.state is Job.SUCCEEDED and seen.job.attempt == 2, cloud_house.story()
    assert seen.log and seen.log.text.count("read first mine and more\n") == 2
    view = await request(cloud_house.ctx, job, "terminate")
    told = " ".join(f.message for f in view.findings if f.rule == "TD-ELSE-001")
    assert "code/mine.txt" in told and "code/data.txt" not in told, "only the changed one is a file of the job's"


@pytest.mark.slow
async def test_a_machine_that_came_back_empty_gets_the_same_bytes_again(
    ctx: Context, near: Path, tmp_path: Path
) -> None:
    cloud = rent_cloud(ctx, settings=FAST.model_copy(update={"resume_s": 3.0}))  # otherwise its absence goes unnoticed
    spec = training(tmp_path / "said", 60, interruptible=True, inputs=["data.txt"], outputs=["out", "data.txt"])
    job = await launch(ctx, spec)
    await until(ctx, job, lambda seen: launches(tmp_path / "said"))
    (near / "data.txt").write_text("edited since")
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    sent = Path(handle.run_dir) / "work" / "data.txt"
    assert sent.read_text() == "some data\n"
    shutil.rmtree(handle.run_dir)
    (machine,) = records(cloud)
    cloud.preempt(machine.id)
    await until(ctx, job, lambda seen: len(launches(tmp_path / "said")) == 2)
    assert sent.read_text() == "some data\n"
    await cancel(ctx, job)


# --------------------------------------------------------------------------------------- death during the transfer

PUSHES = """
import sys
from pathlib import Path
import anyio
sys.path.insert(0, sys.argv[1])
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import JobSpec
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import open_house
home, profiles, notes, near, config, spec = sys.argv[2:]
w = open_house(Path(home), SystemClock())
w.own_profiles, w.notes_file, w.cwd = Path(profiles), Path(notes), Path(near)
w._backends["ssh"] = SshBackend(w.clock, config=Path(config))
anyio.run(submit, w, JobSpec.model_validate_json(spec))
"""


@pytest.mark.prove
async def test_a_push_that_was_killed_is_completed_by_the_next_process(sshd: Sshd, near: Path, tmp_path: Path) -> None:
    profiles, notes, far = tmp_path / "profiles", tmp_path / "notes.toml", tmp_path / "far"
    profiles.mkdir()
    text = (ROOT / "profiles" / "local.md").read_text("utf-8")
    (profiles / "lab.md").write_text(text.replace("id: local", "id: lab", 1).replace(": local", ": ssh", 1))
    notes.write_text(f"[platforms.lab]\nhost = 'box'\nscratch = '{far}'\n")
    notes.chmod(0o600)
    (near / "big.bin").write_bytes(os.urandom(50_000_000))
    whole = hashlib.sha256((near / "big.bin").read_bytes()).hexdigest()
    command = ("sh", "-c", "sha256sum big.bin; cat code/a.py")
    spec = JobSpec(platform="lab", command=command, timeout_s=60, inputs=("big.bin", "code"))
    argv = [str(KITS), str(tmp_path / "home"), str(profiles), str(notes), str(near), str(sshd.config)]
    process = subprocess.Popen([sys.executable, "-c", PUSHES, *argv, spec.model_dump_json()])

    def begun() -> list[Path]:
        assert process.poll() is None
        return [p for p in far.glob("*/*/.big.bin.*.part") if p.stat().st_size > 1_000_000]

    parts = await soon(begun, every=0.001)
    process.kill()
    process.wait()
    assert parts[0].stat().st_size < 50_000_000 and not list(far.glob("*/status.json"))

    ctx = open_house(tmp_path / "home", SystemClock())
    ctx.own_profiles, ctx.notes_file = profiles, notes
    ctx._backends["ssh"] = backend = SshBackend(ctx.clock, config=sshd.config)
    (near / "big.bin").unlink()  # gpuwarden has its own copy since the job was accepted
    (job,) = ctx.ledger.subjects("job")
    try:
        seen = await until(ctx, job.removeprefix("job/"))
        assert seen.job.state is Job.SUCCEEDED
    finally:
        await backend.aclose()
    assert seen.log and seen.log.text == f"{whole}  big.bin\nA = 1\n"
    assert len(ctx.ledger.events(job, kind="submit.intent")) == 1


async def ends_once(home: Path) -> None:
    """Assert that one job exists, that one intent launched it, and that it succeeds."""
    ctx = open_house(home, SystemClock())
    (job,) = ctx.ledger.subjects("job")
    assert (await until(ctx, job.removeprefix("job/"))).job.state is Job.SUCCEEDED
    assert len(ctx.ledger.events(job, kind="submit.intent")) == 1
    ctx.ledger.close()


@pytest.fixture
def driver(tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.chdir(near)
    made = Driver(tmp_path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(amount(16, 80), marks=[pytest.mark.prove, pytest.mark.endurance]),
    ],
)
def test_death_while_copying_inputs_loses_and_duplicates_nothing(
    driver: Driver, near: Path, tmp_path: Path, deaths: int
) -> None:
    """The process dies at, or close to, the lines that list, store or copy an input."""
    said = tmp_path / "said"
    script = ("sh", "-c", f"cat code/a.py code/deep/b.py data.txt >> {said}; echo $GPUWARDEN_JOB 1 >> {said}.runs")
    spec = JobSpec(platform="local", command=script, timeout_s=60, inputs=("code", "data.txt"))

    def order(home: Path, name: str, **more: object) -> dict[str, object]:
        dumped = spec.model_copy(update={"name": name}).model_dump(mode="json")
        return driver.order(
            phase="submit", home=str(home), map=str(tmp_path / "map.json"), spec=dumped, receipt=None, **more
        )

    assert not order(tmp_path / "h0", "whole")["killed"]
    lines = json.loads((tmp_path / "map.json").read_text())
    points = sorted(
        {
            n
            for at, counts in lines.items()
            for n in (counts[0], counts[-1])
            if at.startswith(
                (
                    "/lifecycle/submission/input_store.py",
                    "/lifecycle/submission/inputs.py",
                    "/backends/local.py",
                    "/lifecycle/running",
                )
            )
        }
    )
    chosen = random.sample(points, deaths)
    killed = 0
    for n, line in enumerate(chosen):
        home, name = tmp_path / f"home{n}", f"job{n}"
        killed += bool(order(home, name, line=line)["killed"])
        ctx = open_house(home, SystemClock())
        live = ctx.ledger.subjects("job", *(s for s in Job if s is not Job.REFUSED))
        ctx.ledger.close()
        if not live:
            assert not order(home, name)["killed"]
        anyio.run(ends_once, home)
    assert killed >= deaths / 2
    runs = Path(f"{said}.runs").read_text().splitlines()
    assert len(runs) == len(set(runs)) == len(chosen) + 1
    assert said.read_text() == "A = 1\nB = 2\nsome data\n" * len(runs)
