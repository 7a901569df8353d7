"""The sandbox for jobs on this machine: an attack gets nothing, and an ordinary job notices nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from contract_backend import ended, shell, until
from doors import JOB, answer, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.app import open_context
from gpuwarden.backends.base import Backend, SandboxBackend, load_backend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec, Place, StopResult
from gpuwarden.core.policy import Local
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.remote.sandbox import detect, first
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from paths import KITS, ROOT
from real_parts import need
from waiting import eventually, soon
from wording import Wording

pytestmark = pytest.mark.anyio

ATTACK = KITS / "sandbox_attack.py"
SOURCE = ROOT / "server"
KEY = "rpa_ThisIsTheKeyOfAnAccount0123456789"
ABSENT = Sandbox(Kind.NONE, why="it was taken away for a test")


@pytest.fixture(name="real")
def real_fixture() -> Sandbox:
    """The sandbox on this machine, which must be bubblewrap."""
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    return detect.detect()


@pytest.fixture(name="backend")
def backend_fixture() -> Backend:
    return load_backend("local", SystemClock())


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path) -> Place:
    return Place(platform="local", run_root=str(tmp_path / "runs"))


class Victims:
    """An attack's targets outside its sandbox: a key in a home, sockets, a policy, and a pending approval."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
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
        """Return a receipt whose spending waits for approval."""
        self.policy.write_text("[rehearsal_caps]\nper_job_usd = 0\n")
        asked = await submit(open_context("test", env=environment(self.home)), build(JobSpec, {**JOB, "name": "asked"}))
        assert asked.receipt and asked.ask
        self.policy.write_text("# the user's own\n")
        return asked.receipt

    def env(self, **more: str) -> dict[str, str]:
        """Return the environment of a process whose home folder contains a key."""
        return environment(self.home, HOME=str(self.folder / "user"), **more)

    def unharmed(self) -> None:
        """Assert that an attack left no trace."""
        assert self.policy.read_text() == "# the user's own\n"
        assert not self.ledger.events(kind="approval.granted")

    def given(self, pid: int, ticket: str, *, kill: bool) -> str:
        """Return the attack's argument."""
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
    """Run a job, and return its log."""
    handle = await backend.submit(spec, place, token, secrets={})
    seen = await ended(backend, handle)
    log = (await backend.logs(handle)).text
    assert seen.state is Job.SUCCEEDED, (seen, log)
    return log


# --------------------------------------------------------------------------------------------------------- attacks


@pytest.mark.prove
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
    words = ["submit", "--platform", "local", "--output", "out", "--timeout", "600", "--estimate", "60", "--json"]
    words += [str(file), victims.given(os.getpid(), ticket, kill=False)]
    code, shown = at_terminal(victims.home, *words, says={}, **victims.env(RUNPOD_API_KEY=KEY))
    assert code == 0, shown
    job_id = json.loads(shown.strip().splitlines()[-1])["job_id"]
    seen = eventually(
        lambda: answer(gpuwarden(victims.home, "check", job_id, "--json", **victims.env())),
        within=100,  # each poll starts a process
        good=lambda now: now["state"] != "running",
    )
    assert seen["state"] == "succeeded", seen
    assert answer(gpuwarden(victims.home, "pull", job_id, "--dest", str(tmp_path / "got"), "--json", **victims.env()))[
        "ok"
    ]
    assert json.loads((tmp_path / "got/out/got.json").read_text()) == {}
    victims.unharmed()


@pytest.mark.slow
async def test_the_same_attack_succeeds_without_a_sandbox(
    victims: Victims, backend: Backend, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = await victims.ticket()
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: ABSENT)
    assert isinstance(backend, SandboxBackend)
    backend.confine(lambda: Local(unsandboxed=True), [])
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
    """Run the attack as a job over MCP, and return the results of its successful steps."""
    job = {**JOB, "platform": platform, "script": ATTACK.read_text(), "args": [argument], "name": "attack"}
    body = await _call(client, "submit_job", **job)
    if not body.get("job_id"):
        body = await _call(client, "submit_job", **job, receipt=body["receipt"])
    job_id = body["job_id"]
    body = await soon(
        lambda: _call(client, "check_job", job_id=job_id, log_bytes=16_000),
        every=0.05,
        good=lambda seen: seen["state"] in {"succeeded", "failed"},
    )
    assert body["state"] == "succeeded", body
    await _call(client, "pull_artifacts", job_id=job_id, dest=str(dest))
    got: dict[str, str] = json.loads((dest / "out/got.json").read_text())
    return got


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    body: dict[str, Any] = result.structured_content or {}
    assert body.get("ok"), body
    return body


# ------------------------------------------------------------------------------------------ effects on ordinary jobs


@pytest.mark.slow
async def test_an_ordinary_job_runs_normally(real: Sandbox, backend: Backend, place: Place) -> None:
    text = "echo $0 $HOME; cd; touch mine; ls; test -w /tmp; test -c /dev/null; cat /proc/self/comm; exit 7"
    handle = await backend.submit(shell(text), place, "t-plain", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.exit_code, seen.signal) == (Job.FAILED, 7, None)
    assert (await backend.logs(handle)).text == f"sh {Path.home()}\nmine\ncat\n"


@pytest.mark.slow
@pytest.mark.parametrize(("line", "number"), [("kill -9 $$", 9), ("kill -SEGV $$", 11), ("exit 137", None)])
async def test_signal_and_exit_code_are_reported_exactly(
    real: Sandbox, backend: Backend, place: Place, line: str, number: int | None
) -> None:
    handle = await backend.submit(shell(line), place, "t-end", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.signal, seen.exit_code) == (Job.FAILED, number, None if number else 137)


@pytest.mark.slow
async def test_a_missing_command_is_reported_as_not_started(real: Sandbox, backend: Backend, place: Place) -> None:
    spec = JobSpec(platform="local", command=("no-such-program", "x"), timeout_s=60)
    handle = await backend.submit(spec, place, "t-none", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.reason) == (Job.FAILED, Code.NOT_STARTED) and "No such file" in seen.why


@pytest.mark.slow
async def test_sigterm_lets_the_job_save(real: Sandbox, backend: Backend, place: Place) -> None:
    text = "trap 'sleep 0.3; echo saved > saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    handle = await backend.submit(shell(text), place, "t-term", secrets={})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    assert await backend.stop(handle, grace_s=10) is StopResult.STOPPED
    assert Path(handle.run_dir, "work/saved").read_text() == "saved\n"
    assert (await ended(backend, handle)).state is Job.CANCELED


@pytest.mark.slow
async def test_processes_outside_the_group_end_with_the_job(real: Sandbox, backend: Backend, place: Place) -> None:
    left = "trap 'echo asked >> said; exit' TERM; echo on > said; while :; do sleep 0.05; done"
    text = f"setsid sh -c '{left.replace(chr(39), chr(34))}' & while ! test -s said; do sleep 0.02; done"
    handle = await backend.submit(shell(text), place, "t-left", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert Path(handle.run_dir, "work/said").read_text() == "on\nasked\n"


@pytest.mark.slow
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
    await soon(lambda: not processes_of(handle.run_dir))
    await backend.submit(shell(text), place, "t-kill", secrets={}, attempt=2)
    await until(backend, handle, lambda o: o.attempt == 2 and o.state is Job.SUCCEEDED)
    assert Path(handle.run_dir, "work/at").read_text() == "1\n2\n"
    assert Path(handle.run_dir, "home/cached").read_text() == "2\n"


def processes_of(run_dir: str) -> list[int]:
    """Return the processes with the run folder in their environment or command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            told = Path("/proc", pid, "environ").read_bytes() + Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if run_dir.encode() in told and int(pid) != os.getpid():
            found.append(int(pid))
    return found


@pytest.mark.slow
@pytest.mark.attack("boundary", "loads code into the sandbox's own start by a variable")
async def test_job_variables_never_reach_the_sandbox_setup(real: Sandbox, backend: Backend, place: Place) -> None:
    spec = shell("exec true", env={"LD_PRELOAD": "/no/such/library.so", "PYTHONSTARTUP": "/x", "PYTHONINSPECT": "1"})
    log = await run_to_the_end(backend, spec, place, "t-preload")
    assert log.count("/no/such/library.so") == 2, "sh and true; neither bwrap nor the first process inside"


@pytest.mark.slow
@pytest.mark.attack("secrets", "reads a job's secrets from argument lists")
async def test_secrets_are_in_no_argument_list_or_first_process(real: Sandbox, backend: Backend, place: Place) -> None:
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


@pytest.mark.prove
async def test_torch_trains_with_workers(real: Sandbox, backend: Backend, place: Place) -> None:
    pytest.importorskip("torch")
    spec = JobSpec(platform="local", script=TORCH, outputs=("model.pt",), timeout_s=120)
    handle = await backend.submit(spec, place, "t-torch", secrets={})
    seen = await until(backend, handle, lambda o: o.state is not Job.RUNNING)
    assert seen.state is Job.SUCCEEDED, (await backend.logs(handle)).text
    assert [f.path for f in (await backend.manifest(handle, ["model.pt"])).files] == ["model.pt"]


# ---------------------------------------------------------------------------------------------- what users can allow


@pytest.mark.slow
async def test_an_allowed_folder_is_writable_except_for_hidden_paths(
    real: Sandbox, backend: Backend, place: Place, tmp_path: Path, wording: Wording
) -> None:
    open_, hidden = tmp_path / "data", tmp_path / "data" / "gpuwarden"
    hidden.mkdir(parents=True)
    (hidden / "policy.toml").write_text("mine")
    spec = shell(
        f"echo x > {open_}/new; cat {hidden}/policy.toml; echo y > {hidden}/policy.toml; :", outputs=[f"{open_}/new"]
    )
    with pytest.raises(BadRequest) as refused:
        await backend.submit(spec, place, "t-paths", secrets={})
    wording(refused)
    assert isinstance(backend, SandboxBackend)
    backend.confine(lambda: Local(paths=(str(open_),)), [hidden])
    handle = await backend.submit(spec, place, "t-paths", secrets={})
    await ended(backend, handle)
    assert (open_ / "new").read_text() == "x\n" and (hidden / "policy.toml").read_text() == "mine"
    assert [f.path for f in (await backend.manifest(handle, spec.outputs)).files] == [str((open_ / "new").resolve())]


@pytest.mark.slow
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
    assert isinstance(backend, SandboxBackend)
    backend.confine(lambda: Local(caches=False), [])
    assert "weights\n" not in await run_to_the_end(backend, shell("ls $HF_HOME; :"), place, "t-none")


@pytest.mark.slow
async def test_the_network_is_available_if_allowed(real: Sandbox, backend: Backend, place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ask = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
        spec = JobSpec(platform="local", command=(sys.executable, "-c", ask), timeout_s=60)
        handle = await backend.submit(spec, place, "t-net", secrets={})
        assert (await ended(backend, handle)).state is Job.FAILED
        assert isinstance(backend, SandboxBackend)
        backend.confine(lambda: Local(network=True), [])
        assert await run_to_the_end(backend, spec, place, "t-net-2") == "in\n"


@pytest.mark.slow
async def test_a_job_gets_a_metrics_address_only_with_a_network(real: Sandbox, backend: Backend, place: Place) -> None:
    post = (
        "import json, os, urllib.request as u; url = os.environ.get('METRICS_API_URL'); print(bool(url), flush=True)\n"
        "body = json.dumps({'job_id': os.environ['JOB_ID'], 'metrics': [{'step': 1}]}).encode()\n"
        "proof = {'Authorization': 'Bearer ' + os.environ.get('JOB_TOKEN', '')}\n"
        "print(u.urlopen(u.Request(url, body, proof)).status if url else '')"
    )
    spec = JobSpec(platform="local", command=(sys.executable, "-c", post), timeout_s=60)
    keys = {"GPUWARDEN_REPORT_TOKEN": "gwj_token", "GPUWARDEN_REPORT_KEY": "gwk_key"}
    assert isinstance(backend, SandboxBackend)
    for token, network, said in (("t-dark", False, "False\n\n"), ("t-lit", True, "True\n200\n")):
        backend.confine(partial(Local, network=network), [])
        handle = await backend.submit(spec, place, token, secrets=keys)
        assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert (await backend.logs(handle)).text == said


async def test_missing_packages_need_the_network(
    real: Sandbox, backend: Backend, place: Place, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("gpuwarden.backends.local.interpreter_for", lambda _: ("/bin/uv", "run", "--script"))
    with pytest.raises(BadRequest) as refused:
        await backend.submit(JobSpec(platform="local", script="print(1)"), place, "t-uv", secrets={})
    wording(refused)


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
async def test_a_program_made_by_a_job_reveals_nothing(
    real: Sandbox, victims: Victims, backend: Backend, place: Place, program: str
) -> None:
    assert isinstance(backend, SandboxBackend)
    backend.confine(Local, [victims.home])
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
    real: Sandbox, victims: Victims, backend: Backend, place: Place, tmp_path: Path, wording: Wording
) -> None:
    shared, user = tmp_path / "shared", victims.folder / "user"
    shared.mkdir()
    assert isinstance(backend, SandboxBackend)
    backend.confine(lambda: Local(paths=(str(shared),)), [victims.home])
    text = f"mkdir -p {shared}/fine; echo x > {shared}/fine/x; ln -s {user} {shared}/out"
    spec = shell(text, outputs=(f"{shared}/out", f"{shared}/fine"))
    handle = await backend.submit(spec, place, "t-linked", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    listed = await backend.manifest(handle, spec.outputs)
    assert [file.path for file in listed.files] == [f"{shared}/fine/x"]
    assert b"".join([block async for block in backend.read(handle, listed.files[0])]) == b"x\n"
    for path in (f"{user}/id_ed25519", f"{shared}/out/id_ed25519"):
        with pytest.raises(BadRequest) as refused:
            [block async for block in backend.read(handle, listed.files[0].model_copy(update={"path": path}))]
        wording(refused)


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


@pytest.mark.slow
@pytest.mark.attack("boundary", "reads a login's tickets from the kernel, and calls the hypervisor")
async def test_system_calls_not_isolated_by_namespaces_are_refused(
    real: Sandbox, backend: Backend, place: Place
) -> None:
    if os.uname().machine not in first.SYSTEM_CALLS:
        pytest.skip("the numbers of this machine's calls are not known")
    spec = JobSpec(platform="local", script=CALLS, timeout_s=60)
    handle = await backend.submit(spec, place, "t-calls", secrets={})
    assert (await ended(backend, handle)).state is Job.FAILED
    log = (await backend.logs(handle)).text
    assert log.startswith("[]\n") and "in <module>\n    socket.socket(socket.AF_VSOCK)" in log, log
    assert "Function not implemented" in log
