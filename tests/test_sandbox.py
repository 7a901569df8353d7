"""Jobs on this machine are kept in: an attack run as a job gets nothing, an ordinary job notices nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult

from cli_kit import Cli, home_fixture, run_fixture, w_fixture  # noqa: F401
from conftest import need
from contract_backend import ended, shell, until
from doors import JOB, answer, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.app import open_context
from gpuwarden.backends.base import Backend, Confining, load_backend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, NoSandbox
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec, Place, StopResult
from gpuwarden.core.policy import Local
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.remote.sandbox import boxes, detect, first
from gpuwarden.remote.sandbox.words import Box, Kind, Sandbox, System, bubblewrap, landlock, seatbelt

pytestmark = pytest.mark.anyio

ATTACK = Path(__file__).with_name("sandbox_attack.py")
SOURCE = Path(__file__).parents[1] / "server"
KEY = "rpa_ThisIsTheKeyOfAnAccount0123456789"
ABSENT = Sandbox(Kind.NONE, why="it was taken away for a test")


@pytest.fixture(name="real")
def real_fixture() -> Sandbox:
    """The sandbox that works here, bubblewrap for choice."""
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    return detect.detect()


@pytest.fixture(name="backend")
def backend_fixture() -> Backend:
    return load_backend("local", SystemClock())


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path) -> Place:
    return Place(platform="local", run_root=str(tmp_path / "runs"))


class Victims:
    """What an attack is after, outside of its sandbox: a key in a home, sockets, a policy, a question that waits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.connected: list[str] = []
        self.listeners = [
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.create_server(("127.0.0.1", 0)),
        ]
        self.path = tempfile.mkdtemp(prefix="gw-victim-") + "/s"
        self.abstract = f"gpuwarden-victim-{os.getpid()}-{id(self)}"
        self.listeners[0].bind(self.path)
        self.listeners[1].bind("\0" + self.abstract)
        for listener in self.listeners:
            listener.listen()
        (folder / "user").mkdir(exist_ok=True)
        (folder / "user" / "id_ed25519").write_text(KEY)
        self.policy = folder / "policy.toml"
        self.ledger = quick_warden(self.home).ledger

    async def ticket(self) -> str:
        """A receipt whose spending waits for a person."""
        self.policy.write_text("[rehearsal_caps]\nper_job_usd = 0\n")
        asked = await submit(open_context("test", env=environment(self.home)), build(JobSpec, {**JOB, "name": "asked"}))
        assert asked.receipt and asked.ask
        self.policy.write_text("# the user's own\n")
        return asked.receipt

    def env(self, **more: str) -> dict[str, str]:
        """The variables of a process whose user lives in a folder with a key."""
        return environment(self.home, HOME=str(self.folder / "user"), **more)

    def unharmed(self) -> None:
        """Fail where an attack left a trace."""
        assert self.policy.read_text() == "# the user's own\n"
        assert not self.ledger.events(kind="approval.granted")

    def given(self, pid: int, ticket: str, *, kill: bool) -> str:
        """The attack's argument."""
        return json.dumps({
            "pid": pid, "mark": KEY[4:20], "home": str(self.home), "policy": str(self.policy), "ticket": ticket,
            "secret_file": str(self.folder / "user" / "id_ed25519"), "socket": self.path, "abstract": self.abstract,
            "port": self.listeners[2].getsockname()[1], "source": str(SOURCE), "kill": kill,
        })  # fmt: skip

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        shutil.rmtree(Path(self.path).parent)


@pytest.fixture(name="victims")
def victims_fixture(tmp_path: Path) -> Iterator[Victims]:
    made = Victims(tmp_path)
    yield made
    made.close()


async def run_to_the_end(backend: Backend, spec: JobSpec, place: Place, token: str) -> str:
    """Run a job; its log."""
    handle = await backend.submit(spec, place, token, secrets={})
    seen = await ended(backend, handle)
    log = (await backend.logs(handle)).text
    assert seen.state is Job.SUCCEEDED, (seen, log)
    return log


# --------------------------------------------------------------------------------------------------------- attacks


@pytest.mark.slow
@pytest.mark.attack("boundary", "reads keys, signals the server and approves from a job, over MCP")
@pytest.mark.parametrize("platform", ["local", "rehearsal/vastai"])
async def test_an_attack_over_mcp_gets_nothing(real: Sandbox, victims: Victims, tmp_path: Path, platform: str) -> None:
    ticket = await victims.ticket()
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "gpuwarden", "mcp"], env=victims.env(RUNPOD_API_KEY=KEY), cwd=str(tmp_path)
    )
    async with Client(command) as client:
        pid = _pid_of_the_server(victims.home)
        got = await _attacked(client, platform, victims.given(pid, ticket, kill=True), tmp_path / "got")
        assert got == {}
        assert Path(f"/proc/{pid}").exists()
    victims.unharmed()


@pytest.mark.slow
@pytest.mark.attack("boundary", "does the same from a job that was started at a terminal")
def test_an_attack_from_a_terminal_gets_nothing(real: Sandbox, victims: Victims, tmp_path: Path) -> None:
    ticket = anyio.run(victims.ticket)
    file = tmp_path / "attack.py"
    file.write_text(ATTACK.read_text())
    words = ["submit", str(file), victims.given(os.getpid(), ticket, kill=False), "--platform", "local"]
    words += ["--output", "out", "--timeout", "600", "--estimate", "60", "--json"]
    code, shown = at_terminal(victims.home, *words, says={}, **victims.env(RUNPOD_API_KEY=KEY))
    assert code == 0, shown
    job_id = json.loads(shown.strip().splitlines()[-1])["job_id"]
    for _ in range(600):
        seen = answer(gpuwarden(victims.home, "check", job_id, "--json", **victims.env()))
        if seen["state"] != "running":
            break
    assert seen["state"] == "succeeded", seen
    assert answer(gpuwarden(victims.home, "pull", job_id, "--dest", str(tmp_path / "got"), "--json", **victims.env()))[
        "ok"
    ]
    assert json.loads((tmp_path / "got/out/got.json").read_text()) == {}
    victims.unharmed()


async def test_the_same_attack_succeeds_without_a_sandbox(
    victims: Victims, backend: Backend, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = await victims.ticket()
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: ABSENT)
    assert isinstance(backend, Confining)
    backend.confine(Local(unsandboxed=True), [])
    with subprocess.Popen(["sleep", "600"], env={"KEY": KEY}) as server:
        try:
            argument = victims.given(server.pid, ticket, kill=False)
            spec = JobSpec(platform="local", script=ATTACK.read_text(), args=(argument,), timeout_s=60)
            handle = await backend.submit(spec, place, "t-attack", secrets={})
            assert (await ended(backend, handle)).state is Job.SUCCEEDED, (await backend.logs(handle)).text
        finally:
            server.kill()
    got = set(json.loads(Path(handle.run_dir, "work/out/got.json").read_text()))
    assert got >= {
        "environment_of_every_process", "signal_the_server", "read_the_policy", "write_the_policy", "read_the_ledger",
        "list_gpuwardens_home", "read_a_key_in_the_users_home", "connect_to_a_socket_with_a_path",
        "connect_to_an_abstract_socket", "connect_to_loopback", "change_what_the_runner_reads",
        "approve_on_a_terminal_of_its_own",
    }  # fmt: skip
    assert victims.ledger.events(kind="approval.granted"), "a job approved its own spending"


def _pid_of_the_server(home: Path) -> int:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            if words[-2:-1] == [b"mcp"] and str(home).encode() in Path("/proc", pid, "environ").read_bytes():
                return int(pid)
        except OSError:
            continue
    raise AssertionError("there is no server")


async def _attacked(client: Client, platform: str, argument: str, dest: Path) -> dict[str, str]:
    """Run the attack as a job over MCP; what it got."""
    job = {**JOB, "platform": platform, "script": ATTACK.read_text(), "args": [argument], "name": "attack"}
    body = await _call(client, "submit_job", **job)
    if not body.get("job_id"):
        body = await _call(client, "submit_job", **job, receipt=body["receipt"])
    job_id = body["job_id"]
    with anyio.fail_after(90):
        while body.get("state") not in {"succeeded", "failed"}:
            body = await _call(client, "check_job", job_id=job_id, log_bytes=16_000)
            await anyio.sleep(0.05)
    assert body["state"] == "succeeded", body
    await _call(client, "pull_artifacts", job_id=job_id, dest=str(dest))
    got: dict[str, str] = json.loads((dest / "out/got.json").read_text())
    return got


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    body: dict[str, Any] = result.structured_content or {}
    assert body.get("ok"), body
    return body


# ------------------------------------------------------------------------------------------------ what a job notices


async def test_an_ordinary_job_works_as_ever(real: Sandbox, backend: Backend, place: Place) -> None:
    text = "echo $0 $HOME; cd; touch mine; ls; test -w /tmp; test -c /dev/null; cat /proc/self/comm; exit 7"
    handle = await backend.submit(shell(text), place, "t-plain", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.exit_code, seen.signal) == (Job.FAILED, 7, None)
    assert (await backend.logs(handle)).text == f"sh {Path.home()}\nmine\ncat\n"


@pytest.mark.parametrize(("line", "number"), [("kill -9 $$", 9), ("kill -SEGV $$", 11), ("exit 137", None)])
async def test_how_a_command_ended_is_told_exactly(
    real: Sandbox, backend: Backend, place: Place, line: str, number: int | None
) -> None:
    handle = await backend.submit(shell(line), place, "t-end", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.signal, seen.exit_code) == (Job.FAILED, number, None if number else 137)


async def test_a_command_that_is_not_there_is_named(real: Sandbox, backend: Backend, place: Place) -> None:
    spec = JobSpec(platform="local", command=("no-such-program", "x"), timeout_s=60)
    handle = await backend.submit(spec, place, "t-none", secrets={})
    seen = await ended(backend, handle)
    assert seen.state is Job.FAILED and "could not be started" in seen.why and "No such file" in seen.why


async def test_sigterm_reaches_the_job_which_may_save(real: Sandbox, backend: Backend, place: Place) -> None:
    text = "trap 'sleep 0.3; echo saved > saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    handle = await backend.submit(shell(text), place, "t-term", secrets={})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    assert await backend.stop(handle, grace_s=10) is StopResult.STOPPED
    assert Path(handle.run_dir, "work/saved").read_text() == "saved\n"
    assert (await ended(backend, handle)).state is Job.CANCELED


async def test_what_left_the_group_ends_with_the_job(real: Sandbox, backend: Backend, place: Place) -> None:
    left = "trap 'echo asked >> said; exit' TERM; echo on > said; while :; do sleep 0.05; done"
    text = f"setsid sh -c '{left.replace(chr(39), chr(34))}' & while ! test -s said; do sleep 0.02; done"
    handle = await backend.submit(shell(text), place, "t-left", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert Path(handle.run_dir, "work/said").read_text() == "on\nasked\n"


async def test_kill_9_ends_everything_and_the_next_attempt_goes_on(
    real: Sandbox, backend: Backend, place: Place
) -> None:
    text = "echo $GPUWARDEN_ATTEMPT >> at; echo $GPUWARDEN_ATTEMPT > ~/cached; setsid sleep 61 & sleep 61 & "
    text += "test $GPUWARDEN_ATTEMPT = 2 && exit 0; echo ready; wait"
    handle = await backend.submit(shell(text), place, "t-kill", secrets={})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    status = json.loads(Path(handle.run_dir, "status.json").read_text())
    mine = processes_of(handle.run_dir)
    assert len(mine) >= 4, "the supervisor, the sandbox, its first process, the job"
    os.kill(status["pid"], signal.SIGKILL)
    os.kill(status["child_pid"], signal.SIGKILL)
    seen = await until(backend, handle, lambda o: o.state is Job.FAILED)
    assert seen.reason is Code.VANISHED
    with anyio.fail_after(20):
        while processes_of(handle.run_dir):
            await anyio.sleep(0.02)
    await backend.submit(shell(text), place, "t-kill", secrets={}, attempt=2)
    await until(backend, handle, lambda o: o.attempt == 2 and o.state is Job.SUCCEEDED)
    assert Path(handle.run_dir, "work/at").read_text() == "1\n2\n"
    assert Path(handle.run_dir, "home/cached").read_text() == "2\n"


def processes_of(run_dir: str) -> list[int]:
    """Living processes that a run folder is in the environment or the command line of."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            told = Path("/proc", pid, "environ").read_bytes() + Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if run_dir.encode() in told and int(pid) != os.getpid():
            found.append(int(pid))
    return found


@pytest.mark.attack("boundary", "loads code into the sandbox's own start by a variable")
async def test_no_variable_of_a_job_reaches_what_makes_its_sandbox(
    real: Sandbox, backend: Backend, place: Place
) -> None:
    spec = shell("exec true", env={"LD_PRELOAD": "/no/such/library.so", "PYTHONSTARTUP": "/x", "PYTHONINSPECT": "1"})
    log = await run_to_the_end(backend, spec, place, "t-preload")
    assert log.count("/no/such/library.so") == 2, "sh and true; neither bwrap nor the first process inside"


@pytest.mark.attack("secrets", "reads a job's secrets from argument lists")
async def test_secrets_are_in_no_argument_list_and_not_with_the_first_process(
    real: Sandbox, backend: Backend, place: Place
) -> None:
    text = 'test -n "$TOKEN" && grep -c "$TOKEN" /proc/1/environ /proc/[0-9]*/cmdline; :'
    handle = await backend.submit(shell(text, secrets=["TOKEN"]), place, "t-sec", secrets={"TOKEN": "s3cret-value-9"})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    log = (await backend.logs(handle)).text
    counts = dict(line.rsplit(":", 1) for line in log.splitlines() if line.startswith("/proc/"))
    assert counts.pop("/proc/1/cmdline") == "0" and "Permission denied" in log, log
    assert set(counts.values()) == {"0"}, counts


TORCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=16, num_workers=2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    print(float(loss))
"""


@pytest.mark.slow
async def test_torch_trains_with_workers(real: Sandbox, backend: Backend, place: Place) -> None:
    pytest.importorskip("torch")
    spec = JobSpec(platform="local", script=TORCH, outputs=("model.pt",), timeout_s=120)
    handle = await backend.submit(spec, place, "t-torch", secrets={})
    seen = await until(backend, handle, lambda o: o.state is not Job.RUNNING, seconds=120)
    assert seen.state is Job.SUCCEEDED, (await backend.logs(handle)).text
    assert [f.path for f in (await backend.manifest(handle, ["model.pt"])).files] == ["model.pt"]


# ------------------------------------------------------------------------------------------- what a person can allow


async def test_a_folder_that_a_person_names_can_be_written_but_for_what_is_hidden(
    real: Sandbox, backend: Backend, place: Place, tmp_path: Path
) -> None:
    open_, hidden = tmp_path / "data", tmp_path / "data" / "gpuwarden"
    hidden.mkdir(parents=True)
    (hidden / "policy.toml").write_text("mine")
    spec = shell(
        f"echo x > {open_}/new; cat {hidden}/policy.toml; echo y > {hidden}/policy.toml; :", outputs=[f"{open_}/new"]
    )
    with pytest.raises(BadRequest, match="can't write to"):
        await backend.submit(spec, place, "t-paths", secrets={})
    assert isinstance(backend, Confining)
    backend.confine(Local(paths=(str(open_),)), [hidden])
    handle = await backend.submit(spec, place, "t-paths", secrets={})
    await ended(backend, handle)
    assert (open_ / "new").read_text() == "x\n" and (hidden / "policy.toml").read_text() == "mine"
    assert [f.path for f in (await backend.manifest(handle, spec.outputs)).files] == [str((open_ / "new").resolve())]


async def test_the_hubs_cache_can_be_read_and_its_token_can_not(
    real: Sandbox, backend: Backend, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hf" / "hub"
    hub.mkdir(parents=True)
    (hub / "weights").write_text("weights")
    (tmp_path / "hf" / "token").write_text(KEY)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    look = shell("cat $HF_HOME/hub/weights; echo x > $HF_HOME/hub/weights; cat $HF_HOME/token; echo $HF_HUB_OFFLINE")
    log = await run_to_the_end(backend, look, place, "t-cache")
    assert log.startswith("weights") and "Read-only" in log and log.endswith("1\n") and KEY not in log
    assert isinstance(backend, Confining)
    backend.confine(Local(caches=False), [])
    assert "weights\n" not in await run_to_the_end(backend, shell("ls $HF_HOME; :"), place, "t-none")


async def test_the_network_is_there_when_a_person_allows_it(real: Sandbox, backend: Backend, place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ask = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
        spec = JobSpec(platform="local", command=(sys.executable, "-c", ask), timeout_s=60)
        handle = await backend.submit(spec, place, "t-net", secrets={})
        assert (await ended(backend, handle)).state is Job.FAILED
        assert isinstance(backend, Confining)
        backend.confine(Local(network=True), [])
        assert await run_to_the_end(backend, spec, place, "t-net-2") == "in\n"


async def test_packages_that_are_not_here_need_the_network(
    real: Sandbox, backend: Backend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.backends.local.interpreter_for", lambda _: ("/bin/uv", "run", "--script"))
    with pytest.raises(BadRequest, match="no network"):
        await backend.submit(JobSpec(platform="local", script="print(1)"), place, "t-uv", secrets={})


# ------------------------------------------------------------------------------------------------ where there is none


@pytest.fixture(name="none")
def none_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds no sandbox."""
    for user in ("backends.local", "interfaces.cli.approval", "interfaces.cli.doctor", "interfaces.cli.demo"):
        monkeypatch.setattr(f"gpuwarden.{user}.detect", lambda: ABSENT)


@pytest.mark.attack("boundary", "asks for a local job where no sandbox exists")
@pytest.mark.parametrize("platform", ["local", "rehearsal/vastai"])
def test_without_a_sandbox_no_job_runs_until_a_person_allows_it(
    none: None, home: Path, run: Cli, tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_warden(home)
    policy = home.parent / "policy.toml"
    policy.write_text("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["submit", str(script), "--platform", platform, "--output", "out", "--timeout", "600", "--estimate", "60"]
    monkeypatch.setenv("GPUWARDEN_LOCAL_UNSANDBOXED", "true")
    code, refused = run(*words)
    assert (code, refused["code"]) == (1, "no_sandbox") and "gpuwarden policy allow local" in refused["hint"]
    code, nobody = run("policy", "allow", "local")
    assert (code, nobody["code"]) == (1, "refused") and "terminal" in nobody["message"]
    assert "# mine" in policy.read_text() and "unsandboxed" not in policy.read_text()
    no = doctor_of(run)
    assert no["ok"] is False and "no job runs here" in no["found"]


def doctor_of(run: Cli) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in run("doctor")[1]["checks"] if c["what"] == "sandbox")
    return found


def bare(folder: Path) -> str:
    """A PATH on which no bubblewrap is."""
    (folder / "bin").mkdir(exist_ok=True)
    return str(folder / "bin")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="as a user, Landlock may be there")
def test_a_person_allows_it_at_a_terminal(home: Path, tmp_path: Path) -> None:
    quick_warden(home)
    policy = home.parent / "policy.toml"
    policy.write_text("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["submit", str(script), "--platform", "local", "--output", "out", "--timeout", "600", "--estimate", "60"]
    refused = answer(gpuwarden(home, *words, "--json", PATH=bare(tmp_path)))
    assert refused["code"] == "no_sandbox"
    code, shown = at_terminal(
        home, "policy", "allow", "local", says={"Type yes to allow it: ": "no"}, PATH=bare(tmp_path)
    )
    assert code == 1 and "unsandboxed" not in policy.read_text(), shown
    code, shown = at_terminal(
        home, "policy", "allow", "local", says={"Type yes to allow it: ": "yes"}, PATH=bare(tmp_path)
    )
    assert code == 0, shown
    assert policy.read_text().startswith("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    assert "unsandboxed = true" in policy.read_text() and policy.stat().st_mode & 0o077 == 0
    taken = answer(gpuwarden(home, *words, "--json", PATH=bare(tmp_path), HOME=str(tmp_path)))
    assert taken["ok"] is True, taken


@pytest.mark.attack("boundary", "looks for a local platform over MCP where no sandbox exists")
async def test_the_mcp_server_offers_neither(none: None, home: Path, w_bare: Any) -> None:
    for platform in ("local", "rehearsal/vastai"):
        with pytest.raises(NoSandbox):
            await submit(w_bare, build(JobSpec, {**JOB, "platform": platform}))
        result = await make_server(w_bare).call_tool("submit_job", {**JOB, "platform": platform})
        assert isinstance(result, CallToolResult) and result.is_error and result.structured_content
        body = result.structured_content
        assert body["code"] == "no_sandbox" and "\n" not in body["message"] and "in a terminal" in body["hint"]
    assert not w_bare.ledger.events(kind="job.accepted")


@pytest.mark.prove
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="as a user, Landlock may be there")
def test_the_demo_says_that_its_own_script_runs_without_one(tmp_path: Path) -> None:
    env = environment(tmp_path / "home", PATH=bare(tmp_path), HOME=str(tmp_path))
    words = [sys.executable, "-m", "gpuwarden", "demo", "--yes"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the demo's own script runs without one" in " ".join(done.stdout.split())


@pytest.fixture(name="w_bare")
def w_bare_fixture(home: Path) -> Any:
    ctx = quick_warden(home)
    (home.parent / "policy.toml").write_text("")
    return open_context("mcp", env=environment(home)) if ctx else ctx


# ----------------------------------------------------------------------------------------------------------- the words

PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30).map(
    lambda text: "/" + text.strip("/")
).filter(lambda path: ".." not in path.split("/"))  # fmt: skip
MANY = st.lists(PATHS, max_size=4).map(tuple)
MACHINE = System((("usr/bin", "/bin"),), ("/usr",))
TWO = {"--symlink", "--ro-bind", "--ro-bind-try", "--bind", "--bind-try", "--dev-bind-try"}
ONE = {"--proc", "--dev", "--tmpfs", "--cap-drop", "--chdir"}


@pytest.mark.attack("boundary", "names a folder so that it becomes an option of the sandbox")
@given(run_dir=PATHS, home=PATHS, read=MANY, write=MANY, hidden=MANY, machine=MANY, network=st.booleans())
def test_no_path_becomes_an_option(
    run_dir: str, home: str, read: Any, write: Any, hidden: Any, machine: Any, network: bool
) -> None:
    box = Box(run_dir, home, read, write, hidden, machine, network=network)
    words = bubblewrap(Sandbox(Kind.BUBBLEWRAP, "/usr/bin/bwrap", ("--disable-userns",)), box, MACHINE)[1:]
    options = list(parsed(words))
    flags = {o for o, *rest in options if not rest}
    assert flags - {"--share-net"} == {"--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"}
    assert ("--share-net" in flags) is network
    writable = {rest[-1] for o, *rest in options if o in {"--bind", "--bind-try", "--dev-bind-try"}}
    assert writable == {home, *write, *machine, box.work, box.metrics, box.own_home}
    order = [(o, *rest) for o, *rest in options]
    last = max(i for i, (o, *rest) in enumerate(order) if rest[-1:] == [run_dir])
    assert order[last][0] == "--ro-bind" or run_dir == box.home, "the run folder itself stays as it is"


def parsed(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Options with their operands, as bwrap reads them."""
    rest = iter(words)
    for word in rest:
        assert word.startswith("--"), word
        yield (word, *(next(rest) for _ in range(2 if word in TWO else 1 if word in ONE else 0)))


@given(read=MANY, hidden=MANY)
def test_landlock_shows_nothing_with_something_hidden_in_it(read: Any, hidden: Any) -> None:
    rules = landlock(Box("/r", "/h", read=read, write=read, hidden=hidden), MACHINE)
    shown = [*rules["read"], *rules["write"]]  # type: ignore[misc]
    tops = {p.rstrip("/") for p in shown} - {"/r", "/proc", "/usr", "/bin"}
    assert not [h for h in hidden for top in tops if (h + "/").startswith(top + "/") and top in read]


@pytest.mark.attack("boundary", "names a folder so that it ends a string of the sandbox's profile")
@given(paths=MANY)
def test_a_path_ends_no_string_of_a_profile(paths: Any) -> None:
    profile, texts, i = seatbelt(Box("/r", "/h", read=paths)), [], 0
    while (i := profile.find('"', i)) >= 0:
        text, i = "", i + 1
        while profile[i] != '"':
            i += profile[i] == "\\"
            text, i = text + profile[i], i + 1
        texts.append(text)
        i += 1
    assert set(paths) <= set(texts)
    assert profile.count("(version 1)") >= 1 and profile.index("(deny default)") < 40


@pytest.mark.parametrize("path", ["relative", "", "/a/../b", "/a\0b", "--bind"])
def test_a_path_that_is_not_absolute_is_refused(path: str) -> None:
    for box in (lambda: Box(path, "/h"), lambda: Box("/r", "/h", write=(path,))):
        with pytest.raises(ValueError, match="not an absolute path"):
            box()


def test_only_a_programs_own_environment_is_shown(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("bin", "lib"):
        (project / name).mkdir(parents=True)
    (project / ".env").write_text(KEY)
    program = project / "bin" / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert boxes.interpreters(str(program)) == (str(program),)
    (project / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert boxes.interpreters(str(program)) == tuple(str(project / n) for n in ("bin", "lib", "pyvenv.cfg"))
    (tmp_path / "id_ed25519").write_text(KEY)
    assert boxes.interpreters(str(tmp_path / "id_ed25519"), "/bin/sh", str(tmp_path / "none")) == ()


def test_a_link_out_of_an_environment_is_not_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "share").symlink_to(tmp_path / "keys")
    (venv / "lib").mkdir()
    (venv / "lib64").symlink_to("lib")
    (venv / "pyvenv.cfg").write_text(f"home = {tmp_path}/keys/bin\n")
    (tmp_path / "keys" / "lib").mkdir()
    assert boxes.interpreters(str(venv / "bin" / "python")) == tuple(
        str(venv / n) for n in ("bin", "lib", "lib64", "pyvenv.cfg")
    ), "and a folder is a Python's only where its library is"


LINKS = """
import os, sys
os.makedirs("venv/bin")
open("venv/pyvenv.cfg", "w").write("home = " + sys.argv[1] + "/bin")
for name in ("lib", "share"):
    os.symlink(sys.argv[1], "venv/" + name)
os.symlink("/bin/sh", "venv/bin/python")
"""


@pytest.mark.slow
@pytest.mark.attack("boundary", "makes an environment of links to what it wants to read, and runs its program")
@pytest.mark.parametrize("program", ["venv/bin/python", "venv/bin/own"])
async def test_a_program_that_a_job_made_shows_nothing(
    real: Sandbox, victims: Victims, backend: Backend, place: Place, program: str
) -> None:
    assert isinstance(backend, Confining)
    backend.confine(Local(), [victims.home])
    makes = (
        LINKS + "open('venv/bin/own', 'w').write('#!/bin/sh\\nexec /bin/sh \"$@\"'); os.chmod('venv/bin/own', 0o755)"
    )
    for number, folder in enumerate((victims.folder / "user", victims.home)):
        spec = JobSpec(platform="local", script=makes, args=(str(folder),), timeout_s=60)
        first = await backend.submit(spec, place, f"t-one-{number}", secrets={})
        assert (await ended(backend, first)).state is Job.SUCCEEDED, (await backend.logs(first)).text
        made = Path(first.run_dir, "work")
        reads = f"cat {made}/venv/lib/id_*; ls {made}/venv/share"
        second = JobSpec(platform="local", command=(str(made / program), "-c", reads), timeout_s=60)
        handle = await backend.submit(second, place, f"t-two-{number}", secrets={})
        await ended(backend, handle)
        log = (await backend.logs(handle)).text
        assert KEY not in log and "ledger.db" not in log, log


@pytest.mark.slow
@pytest.mark.attack("boundary", "makes a link to a key of an output in a folder that a person allowed")
async def test_a_linked_output_leads_nowhere(
    real: Sandbox, victims: Victims, backend: Backend, place: Place, tmp_path: Path
) -> None:
    shared, user = tmp_path / "shared", victims.folder / "user"
    shared.mkdir()
    assert isinstance(backend, Confining)
    backend.confine(Local(paths=(str(shared),)), [victims.home])
    text = f"mkdir -p {shared}/fine; echo x > {shared}/fine/x; ln -s {user} {shared}/out"
    spec = shell(text, outputs=(f"{shared}/out", f"{shared}/fine"))
    handle = await backend.submit(spec, place, "t-linked", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    listed = await backend.manifest(handle, spec.outputs)
    assert [file.path for file in listed.files] == [f"{shared}/fine/x"]
    assert b"".join([block async for block in backend.read(handle, listed.files[0])]) == b"x\n"
    for path in (f"{user}/id_ed25519", f"{shared}/out/id_ed25519"):
        with pytest.raises(BadRequest, match="outside"):
            [block async for block in backend.read(handle, listed.files[0].model_copy(update={"path": path}))]


CALLS = """
import ctypes, errno, os, socket
numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
def refused(number):
    ctypes.set_errno(0)
    return libc.syscall(number, b"user", b"gpuwarden", b"x", 1, -3) == -1 and ctypes.get_errno() == errno.ENOSYS
print([n for n in (*numbers, 425, *(n + 0x40000000 for n in (*numbers, 39))) if not refused(n)])
socket.socket(), socket.socketpair(), os.getpid()
socket.socket(socket.AF_VSOCK)
"""


@pytest.mark.attack("boundary", "reads a login's tickets from the kernel, and calls the hypervisor")
async def test_what_no_namespace_keeps_apart_is_refused(real: Sandbox, backend: Backend, place: Place) -> None:
    if os.uname().machine not in first.SYSTEM_CALLS:
        pytest.skip("the numbers of this machine's calls are not known")
    spec = JobSpec(platform="local", script=CALLS, timeout_s=60)
    handle = await backend.submit(spec, place, "t-calls", secrets={})
    assert (await ended(backend, handle)).state is Job.FAILED
    log = (await backend.logs(handle)).text
    assert log.startswith("[]\n") and "in <module>\n    socket.socket(socket.AF_VSOCK)" in log, log
    assert "Function not implemented" in log


def test_no_private_key_of_this_machine_is_shown() -> None:
    assert not {p for p in boxes.system().read if p in {"/etc/ssl", "/etc/pki", "/etc/pki/tls"} or "private" in p}


# ---------------------------------------------------------------------------------------------------------- Landlock

TRIED = """
import json, os, socket, sys
got = []
def tries(name, do):
    try:
        do()
        got.append(name)
    except OSError:
        pass
tries("home", lambda: open(sys.argv[1]).read())
tries("write", lambda: open(sys.argv[1], "a"))
tries("signal", lambda: os.kill(int(sys.argv[2]), 0))
tries("environ", lambda: open(f"/proc/{sys.argv[2]}/environ").read())
tries("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[3]))
tries("tcp", lambda: socket.create_connection(("127.0.0.1", int(sys.argv[4])), 5))
tries("own", lambda: open("work/mine", "w"))
print(json.dumps(got))
"""


@pytest.mark.parametrize("restricted", [True, False])
def test_landlock_keeps_a_user_in(restricted: bool, need_program: Callable[[str], str]) -> None:
    python = "/usr/bin/python3"
    need("a system Python", os.path.exists(python))
    folder = Path(tempfile.mkdtemp(prefix="gw-landlock-"))
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    uid = 65534 if user else os.getuid()
    abstract = f"gw-landlock-{os.getpid()}-{restricted}"
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as tcp:
        listener.bind("\0" + abstract)
        listener.listen()
        try:
            run = folder / "run"
            for name in ("away", "run/work", "run/home"):
                (folder / name).mkdir(parents=True)
            (folder / "away/key").write_text(KEY)
            (run / "metrics.jsonl").touch()
            (run / "first.py").write_bytes(boxes.init_source()[1])
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, uid, -1)
            rules = landlock(Box(str(run), "/nowhere"), boxes.system())
            other = subprocess.Popen(["sleep", "60"], env={"KEY": KEY}, **user)
            words = [python, "-I", "-S", "-c", TRIED, str(folder / "away/key"), str(other.pid), abstract]
            words.append(str(tcp.getsockname()[1]))
            before = [python, "-I", "-S", str(run / "first.py"), json.dumps(rules), "1"] if restricted else []
            done = boxed(before, words, run, user)
        finally:
            other.kill()
            other.wait()
            shutil.rmtree(folder)
    if restricted and b"Landlock is older" in done.stderr + done.stdout:
        need("a kernel with Landlock ABI 6", False)
    got = set(json.loads(done.stdout))
    assert got == ({"own"} if restricted else {"home", "write", "signal", "environ", "abstract", "tcp", "own"}), done


def boxed(
    before: list[str], words: list[str], folder: Path, user: dict[str, Any]
) -> subprocess.CompletedProcess[bytes]:
    """Run a command behind the words of a sandbox, or as it is."""
    if not before:
        return subprocess.run(words, cwd=folder, capture_output=True, timeout=60, check=True, **user)
    env, feed = os.pipe()
    report, told = os.pipe()
    threading.Thread(target=lambda: (os.write(feed, b"A=1\0"), os.close(feed))).start()
    try:
        given = [*before, str(env), str(told), *words]
        return subprocess.run(
            given, cwd=folder, capture_output=True, timeout=60, check=False, pass_fds=(env, told), **user
        )
    finally:
        for fd in (env, report, told):
            os.close(fd)


def test_sockets_that_lead_out_are_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert str(tmp_path / "s") not in detect.open_sockets(), "nobody listens yet"
        listener.listen()
        assert str(tmp_path / "s") in detect.open_sockets()
    assert str(tmp_path / "s") not in detect.open_sockets()
    assert detect.open_sockets(lambda: "") == []
