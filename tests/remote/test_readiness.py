"""Check whether a place can start a job: on this machine, and on a real OpenSSH server that may be sent uv."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import counted_lines
from fakes import FakeClock
from gpuwarden.backends.local import LocalBackend
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, NotSupported, Refused, Unreachable
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.core.policy import Hosts
from gpuwarden.core.readiness import Needs, Readiness, Uv
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.data import data_dir
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.submission.submit import check_spec, submit
from gpuwarden.remote.host import start_agent, uv_wheel
from gpuwarden.remote.host.interpreter import readiness, request_of
from gpuwarden.static_analysis.command_files import named_files, started_file
from lifecycle_kit import WEALTHY, open_house
from real_parts import need
from sshd import Sshd
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio
HERE = ".".join(map(str, sys.version_info[:3]))


def header(*dependencies: str, python: str = ">=3.11", body: str = "print('started')") -> str:
    return f'# /// script\n# requires-python = "{python}"\n# dependencies = {json.dumps(dependencies)}\n# ///\n{body}\n'


# ---------------------------------------------------------------------------------------------------- the agent


def look(**request: Any) -> dict[str, Any]:
    return start_agent.look(request)


def test_the_agent_runs_as_a_single_program() -> None:
    source = Path(start_agent.__file__).read_bytes()
    asked = json.dumps({"names": ["pydantic", "no-such-thing"], "program": "sh", "files": ["/", "/no/such"]})
    done = subprocess.run(
        [sys.executable, "-I", "-", asked], input=source, capture_output=True, check=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert found["python"] == HERE and set(found["packages"]) >= {"pydantic"}
    assert "no-such-thing" not in found["packages"]
    assert (found["program"], found["files"]) == (True, ["/no/such"])


def test_the_agent_checks_modules_with_the_commands_python(tmp_path: Path, wording: Wording) -> None:
    assert look(program=sys.executable, modules=["json", "pydantic", "nosuch"])["modules"] == ["nosuch"]
    (tmp_path / "mine.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path)}
    assert look(program=sys.executable, modules=["mine"], env=env)["modules"] == []
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    why = look(program=str(tmp_path / "python"), modules=["json"])["modules_why"]
    wording(why.rpartition(":")[2], 3)
    assert look(program="no-such-program", modules=["json"])["program"] is False


def smi(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_gpus_are_listed_absent_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    assert look(gpu=True, path=smi(tmp_path, "echo 'NVIDIA L4'; echo 'NVIDIA L4'"))["gpus"] == {
        "list": ["NVIDIA L4"] * 2
    }
    assert look(gpu=True, path=smi(tmp_path, "echo 'No devices were found'; exit 6"))["gpus"] == {"list": []}
    wording(look(gpu=True, path=smi(tmp_path, "exit 9"))["gpus"]["why"], 9)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/kfd")
    assert "/dev/kfd" in look(gpu=True, path="/nowhere")["gpus"]["why"]
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert look(gpu=True, path="/nowhere")["gpus"] == {"list": []}


# ------------------------------------------------------------------------------------------- comparing with a header

FAR = {
    "python": "3.10.4", "uv": False,
    "markers": {**start_agent.markers(), "python_version": "3.10", "python_full_version": "3.10.4"},
    "packages": {
        "torch": {"version": "2.6.0+cu124"},
        "trl": {"version": "1.2.0", "requires": ["peft>=0.18; extra == 'peft'", "accelerate>=1; python_version < '3'"]},
        "Peft": {"version": "0.17.0"},
        "odd": {"version": "not a version"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("python", "dependencies", "lacking"),
    [
        ("", ("torch>=2.5", "trl"), ()),
        (">=3.11", ("torch",), ("Python >=3.11",)),
        ("", ("torch>=2.8",), ("torch>=2.8",)),
        ("", ("trl[peft]",), ("trl[peft]",)),  # peft is installed, but in an older release than the extra requires
        ("", ("PEFT",), ()),
        ("", ("transformers; python_version >= '3.11'",), ()),
        ("", ("transformers; python_version < '3.11'",), ("transformers; python_version < '3.11'",)),
        ("", ("torch @ https://example.org/torch.whl",), ("torch @ https://example.org/torch.whl",)),
        ("", ("odd", "odd>=1"), ("odd>=1",)),
    ],
)
def test_a_header_is_compared_with_the_installed_packages(
    python: str, dependencies: tuple[str, ...], lacking: tuple[str, ...]
) -> None:
    found = readiness(Needs(python, dependencies), FAR)
    assert (found.unmet, found.trouble, found.uv) == (lacking, "", Uv.MISSING)


def test_an_unreadable_header_is_trouble_and_a_malformed_answer_a_bad_reply() -> None:
    assert "a b c" in readiness(Needs("", ("a b c",)), FAR).trouble
    for broken in ({}, {**FAR, "python": 3}, {**FAR, "packages": ["torch"]}, {**FAR, "markers": None}):
        with pytest.raises(BadReply):
            readiness(Needs("", ("torch",)), broken)


@given(
    st.dictionaries(st.sampled_from([*FAR, "files", "modules", "gpus"]), st.none() | st.text() | st.lists(st.text()))
)
def test_arbitrary_machine_answers_never_break_the_comparison(changes: dict[str, Any]) -> None:
    try:
        found = readiness(Needs(">=3.8", ("torch", "trl[peft]"), files=("/a",)), {**FAR, **changes})
    except BadReply:
        return
    assert set(found.no_files) <= {"/a"}


def package(*requires: str) -> dict[str, Any]:
    return {"version": "1", "requires": requires}


@pytest.mark.parametrize(
    "packages",
    [
        {f"p{n}": package(f"p{n + 1}[x]>=0", f"p{n + 1}[x]<9", f"p{n + 1}[x]") for n in range(60)} | {"p60": package()},
        {f"p{n}": package(f"p{n + 1}[x]") for n in range(3_000)} | {"p3000": package()},
        {"p0": package(*(f"p0[x{n}]" for n in range(300)), *(f"a; extra == 'y{n}'" for n in range(4_000)))},
        {"p0": package("a; " + "(" * 20_000)},
        {"p0": package("not a requirement (>dev)")},
    ],
)
def test_hostile_package_requirements_never_stall_the_gate(packages: dict[str, Any]) -> None:
    needs, answer = Needs("", ("p0[x]",)), {**FAR, "packages": packages}
    with counted_lines() as lines:
        assert readiness(needs, answer).trouble == ""
    assert lines() < 10_000_000


def test_a_python_from_a_checkout_has_its_version() -> None:
    assert readiness(Needs(">=3.10"), {**FAR, "python": "3.13.0+"}).unmet == ()


def test_uv_without_a_network_starts_nothing() -> None:
    lacking = {"unmet": ("torch",)}
    assert not Readiness(**lacking, uv=Uv.MISSING).starts_header
    assert not Readiness(**lacking, uv=Uv.THERE, network=False).starts_header
    assert Readiness(**lacking, uv=Uv.BROUGHT).starts_header and Readiness(network=False).starts_header


def test_the_request_names_packages_and_the_gpu() -> None:
    asked = request_of(Needs("", ("trl[peft]>=1", "torch", "!broken"), gpu=True))
    assert asked["names"] == ["torch", "trl"] and asked["gpu"] is True


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/opt/env/bin/python3.12 -u -X dev train.py x.py", "train.py"),
        ("python -m package.train cfg.yaml", ""),
        ("python -c print(1) a.py", ""),
        ("bash run.sh a", "run.sh"),
        ("bash -c ls", ""),
        ("torchrun --nproc_per_node 8 train.py --config a.yaml", "train.py"),
        ("accelerate launch --config_file a.yaml src/train.py", "src/train.py"),
        ("uv run https://example.org/train.py", ""),
        ("./run.sh train.py", ""),
        ("python", ""),
    ],
)
def test_the_file_that_a_command_starts_is_found(command: str, file: str) -> None:
    assert started_file(command.split()) == file


def test_words_that_name_files_are_found() -> None:
    words = [
        "--config",
        "a.yaml",
        "--data=rows.jsonl",
        "--lr=1e-5",
        "https://x.org/a.json",
        "owner/name",
        "*.csv",
        "x.py",
    ]
    assert list(named_files(words)) == ["a.yaml", "rows.jsonl", "x.py"]


# ------------------------------------------------------------------------------------------------------ this machine


def spec(**changes: object) -> JobSpec:
    values = {"platform": "local", "outputs": ("out",), "timeout_s": 600, "estimate_s": 60, "name": "tiny"}
    return JobSpec.model_validate(values | changes)


async def refused(ctx: Context, job: JobSpec) -> dict[str, str]:
    """Return the messages of the findings that block a job, by rule."""
    with pytest.raises(Refused) as error:
        await check_spec(ctx, job)
    return {f.rule: f.message for f in error.value.findings if f.blocks}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return open_house(tmp_path / "home", FakeClock(), policy=WEALTHY)


async def test_the_gate_refuses_a_python_that_cannot_parse_the_script(here: Context) -> None:
    newer = "lazy import json\n"  # without a header that requires it
    assert "Python >=3.15" in (await refused(here, spec(script=newer)))["PF-PLACE-003"]
    pinned = await refused(here, spec(script=header(python=">=3.11,<3.14", body=newer)))
    assert "3.15" in pinned["PF-SRC-001"]


async def test_the_gate_refuses_missing_packages(here: Context) -> None:
    found = await refused(here, spec(script=header("no-such-thing>=1", body="import no_such_thing")))
    assert "no-such-thing>=1" in found["PF-PLACE-003"] and HERE in found["PF-PLACE-003"]
    assert "a b c" in (await refused(here, spec(script=header("a b c"))))["PF-PLACE-003"]
    assert "Python <3" in (await refused(here, spec(script=header(python="<3"))))["PF-PLACE-003"]
    checked = await check_spec(here, spec(script=header("pydantic", body="import pydantic")))
    assert not [f for f in checked.findings if f.rule.startswith("PF-PLACE")]


async def test_the_gate_refuses_imports_missing_from_the_commands_python(here: Context, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, no_such_module\n")
    job = spec(command=(sys.executable, "train.py"), inputs=("train.py",))
    found = await refused(here, job)
    assert set(found) == {"PF-PLACE-003"} and "no_such_module" in found["PF-PLACE-003"]


@pytest.mark.parametrize("name", ["nvidia-smi", "python3", "uv"])
async def test_a_check_never_runs_the_jobs_programs_unconfined(
    here: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "key-of-an-account")
    (tmp_path / "train.py").write_text("import no_such_module\n")
    left = tmp_path / "earlier"  # as an earlier job may leave in its working folder
    left.mkdir()
    (left / name).write_text(f"#!/bin/sh\nexport -p > {tmp_path}/seen\n")
    (left / name).chmod(0o755)
    job = spec(command=("python3", "train.py"), inputs=("train.py",), gpu="H100", env={"PATH": f"{left}:/usr/bin:/bin"})
    await refused(here, job)
    assert not (tmp_path / "seen").exists()


async def test_checking_the_commands_python_does_not_run_the_jobs_code(here: Context, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import a_module\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w').write('x')\n")
    job = spec(command=(sys.executable, "train.py"), inputs=("train.py",), env={"PYTHONPATH": str(tmp_path / "b")})
    assert set(await refused(here, job)) == {"PF-PLACE-003"}
    assert not (tmp_path / "seen").exists()


async def test_the_gate_refuses_a_missing_gpu(here: Context, tmp_path: Path) -> None:
    smi(tmp_path / "bin", "echo 'NVIDIA L4'")
    job = spec(script=header(), gpu="H100")
    lacks = (await refused(here, job))["PF-PLACE-004"]
    assert "H100" in lacks and "NVIDIA L4" in lacks
    await check_spec(here, job.model_copy(update={"gpu": "L4"}))


async def test_a_job_refused_for_a_secret_is_sent_to_no_place(here: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Needs] = []
    engine: list[JobSpec] = []

    async def record(self: LocalBackend, place: Place, needs: Needs) -> Readiness:
        asked.append(needs)
        return Readiness(gpus=("NVIDIA L4",))

    async def limits(self: LocalBackend, job: JobSpec, place: Place) -> None:
        engine.append(job)
        raise BadReply("not an engine")

    monkeypatch.setattr(LocalBackend, "readiness", record)
    monkeypatch.setattr(LocalBackend, "limits", limits, raising=False)
    job = spec(script=header(), gpu="L4", env={"MODE": "hf_" + "a" * 34})
    await refused(here, job)
    assert not asked and not engine
    plain = job.model_copy(update={"env": {"MODE": "fast", "PYTHONPATH": "/a"}})
    assert set(await refused(here, plain)) == {"PF-ENG-001"}
    assert [needs.env for needs in asked] == [{"PYTHONPATH": "/a"}] and len(engine) == 1


async def test_the_gate_refuses_missing_programs_and_files(here: Context, tmp_path: Path) -> None:
    found = await refused(here, spec(command=("no-such-program",)))
    assert set(found) == {"PF-PLACE-005"} and "no-such-program" in found["PF-PLACE-005"]
    assert set(await refused(here, spec(command=("python3", "/no/such/train.py")))) == {"PF-PLACE-005"}
    (tmp_path / "train.py").write_text("print(1)\n")
    job = spec(command=("python3", "train.py"))
    assert set(await refused(here, job)) == {"PF-IN-004"}
    await check_spec(here, job.model_copy(update={"inputs": ("train.py",)}))


# ------------------------------------------------------------------------------------------------------ over SSH


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    monkeypatch.chdir(tmp_path)
    server = Sshd(tmp_path / "sshd").start()
    yield server
    server.stop()


@pytest.fixture
def ctx(tmp_path: Path, far: Sshd) -> Iterator[Context]:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    text = (data_dir("profiles") / "ssh.md").read_text("utf-8")
    runs = "run_root: ~/.local/share/gpuwarden/runs"
    (profiles / "ssh.md").write_text(text.replace(runs, f"run_root: {tmp_path}/far"), "utf-8")
    ctx = open_house(tmp_path / "home", SystemClock())
    ctx.own_profiles = profiles
    backend = ctx._backends["ssh"] = SshBackend(ctx.clock, config=far.config)
    yield ctx
    anyio.run(backend.aclose)


def far_spec(**changes: object) -> JobSpec:
    return spec(**({"platform": "ssh/box", "script": header(), "outputs": ()} | changes))


async def without_uv(ctx: Context) -> SshBackend:
    """Return the backend, with uv removed from the known tools of its machine."""
    backend = ctx.backend("ssh")
    assert isinstance(backend, SshBackend)
    (await backend.host_info(ctx.owned_place("ssh/box"))).tools.pop("uv", None)
    return backend


@pytest.mark.slow
async def test_a_header_is_never_ignored_over_ssh(ctx: Context) -> None:
    backend = await without_uv(ctx)
    lacking = far_spec(script=header("no-such-thing>=1", body="import no_such_thing"))
    assert "no-such-thing>=1" in (await refused(ctx, lacking))["PF-PLACE-003"]
    with pytest.raises(
        BadRequest, match="no-such-thing>=1"
    ):  # also without the gate, because a rented machine isn't checked earlier
        await backend.prepare(lacking, ctx.owned_place("ssh/box"), "t1")
    assert (await refused(ctx, far_spec(gpu="H100")))["PF-PLACE-004"]
    assert set(await refused(ctx, far_spec(script=None, command=("no-such-program",)))) == {"PF-PLACE-005"}
    await check_spec(ctx, far_spec())


@pytest.mark.slow
async def test_a_job_for_an_unreachable_place_is_refused(ctx: Context, far: Sshd) -> None:
    far.stop()
    found = await refused(ctx, far_spec(script=header("torch>=2", body="import torch")))
    assert set(found) == {"PF-PLACE-001"}


FAKE_UV = """#!/bin/sh
echo "brought: $*"
shift 3
exec python3 "$@"
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake wheel that replaces the real one on every architecture, without a download by pip."""
    file = tmp_path / "wheels" / "uv.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"uv-{uv_wheel.VERSION}.data/scripts/uv", FAKE_UV)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(uv_wheel, "_fetched", lambda wheel, folder: file)
    for name in uv_wheel.WHEELS:
        monkeypatch.setitem(uv_wheel.WHEELS, name, uv_wheel.Wheel("any", digest))
    return file


async def ended(ctx: Context, job: str) -> CheckedJob:
    async def over() -> CheckedJob | None:
        seen = await check(ctx, job)
        return seen if seen.job.state in TERMINAL_JOBS else None

    return await soon(over, within=60, every=0.15)  # an agent and a program are sent over SSH first


@pytest.mark.slow
async def test_uv_is_uploaded_where_the_policy_allows_it(ctx: Context, wheel: Path, tmp_path: Path) -> None:
    backend = await without_uv(ctx)
    job = far_spec(script=header("no-such-thing>=1"))
    assert "PF-PLACE-003" in await refused(ctx, job)
    backend.supply(lambda: Hosts(bring_uv=True), tmp_path / "tools")
    done = await submit(ctx, job)
    (brought,) = [f for f in done.findings if f.rule == "PF-PLACE-003"]
    assert brought.severity is Severity.INFO and "no-such-thing>=1" in brought.message
    assert done.job is not None
    seen = await ended(ctx, done.job.id)
    assert seen.job.state is Job.SUCCEEDED and seen.log is not None
    assert "brought: run --quiet --script" in seen.log.text and "started" in seen.log.text
    [program] = (tmp_path / "far").glob(".gpuwarden/uv-*/uv")
    assert program.read_text() == FAKE_UV and program.stat().st_mode & 0o777 == 0o700


def test_a_wheel_with_the_wrong_digest_is_never_used(wheel: Path, tmp_path: Path, wording: Wording) -> None:
    kept = uv_wheel.uv_program("x86_64", tmp_path / "tools")
    assert kept.read_text() == FAKE_UV and kept.stat().st_mode & 0o077 == 0
    wheel.write_bytes(wheel.read_bytes() + b"x")
    assert uv_wheel.uv_program("x86_64", tmp_path / "tools") == kept, "it is fetched once"
    with pytest.raises(NotSupported) as refused:
        uv_wheel.uv_program("aarch64", tmp_path / "tools")
    wording(refused)


def test_a_failed_pip_download_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, b"", b"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr("shutil.which", lambda _: None)
    for pip, kind in ((object(), Unreachable), (None, NotSupported)):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, pip=pip: pip)
        with pytest.raises(kind):
            uv_wheel.uv_program("x86_64", tmp_path / "tools")
    assert not (tmp_path / "tools").exists()


def test_uv_supplies_pip_where_an_environment_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wording: Wording
) -> None:
    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert argv[:7] == ["/bin/uv", "run", "--no-project", "--no-config", "--quiet", "--with", "pip"]
        (Path(argv[argv.index("--dest") + 1]) / "uv-1.whl").write_bytes(b"other bytes")
        return subprocess.CompletedProcess(argv, 0, b"", b"")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/uv")
    with pytest.raises(NotSupported) as refused:  # its digest is checked all the same
        uv_wheel.uv_program("x86_64", tmp_path / "tools")
    wording(refused)


@pytest.mark.prove
def test_the_real_wheel_is_fetched_without_pip_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    need("uv", uv is not None)
    monkeypatch.setenv("PATH", f"{Path(str(uv)).parent}:{os.environ['PATH']}")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    try:
        program = uv_wheel.uv_program("x86_64", tmp_path / "tools")
    except Unreachable as error:
        pytest.skip(f"the package index: {error.message}")
    assert program.stat().st_size > 1 << 20


@pytest.mark.prove
async def test_the_real_wheel_runs_a_script_on_a_machine_without_uv(ctx: Context, tmp_path: Path) -> None:
    try:
        uv_wheel.uv_program(os.uname().machine, tmp_path / "tools")
    except (Unreachable, NotSupported) as error:
        pytest.skip(f"the package index: {error.message}")
    backend = await without_uv(ctx)
    backend.supply(lambda: Hosts(bring_uv=True), tmp_path / "tools")
    argv = await (await backend._start(ctx.owned_place("ssh/box"))).interpreter(
        far_spec(script=header("no-such-thing>=1"))
    )
    done = subprocess.run([argv[0], "--version"], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith(f"uv {uv_wheel.VERSION}")
