"""The command line: one JSON object whatever happens, exit codes, a damaged home, and a person at a real terminal."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import click
import pytest
from anyio import to_thread
from rich.console import Console

from doors import JOB, PLATFORM, TRAIN, answer, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden import cli
from gpuwarden.core.errors import WardenError
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import hash_pin
from gpuwarden.lifecycle.check import check
from gpuwarden.lifecycle.pull import pull
from gpuwarden.lifecycle.submit import submit
from gpuwarden.lifecycle.teardown import request
from gpuwarden.lifecycle.verify import verify_job
from gpuwarden.lifecycle.warden import Warden
from gpuwarden.serve import replies, terminal
from gpuwarden.serve.approval import Terminal, ask

YES = {"Type yes to approve: ": "yes"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def w(home: Path) -> Warden:
    return quick_warden(home)


def metering(w: Warden) -> bool:
    return any(t.meter for t in w.provider(PLATFORM).cloud.truths().values())  # type: ignore[attr-defined]


class Cli:
    """Runs commands in this process, which is quicker; what a process of its own shows is tested apart."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        for name in [n for n in os.environ if n.startswith("GPUWARDEN_")]:
            monkeypatch.delenv(name)
        for name, value in environment(home).items():
            monkeypatch.setenv(name, value)

    def __call__(self, *words: str) -> tuple[int, dict[str, Any]]:
        code = cli.run([*words, "--json"])
        out, err = self.capsys.readouterr()
        assert out.count("\n") == 1 and err == "", out + err
        body = json.loads(out)
        assert isinstance(body, dict) and isinstance(body["ok"], bool) and body["code"]
        if code:
            assert body["ok"] is False and body["message"] and body["hint"], body
        assert (code == 0) is body["ok"], (code, body)
        return code, body

    def shown(self, *words: str) -> tuple[int, str]:
        code = cli.run(list(words))
        out, err = self.capsys.readouterr()
        return code, out + err


@pytest.fixture
def run(w: Warden, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(home, monkeypatch, capsys)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


OPTIONS = ("--platform", PLATFORM, "--output", "out", "--timeout", "600", "--estimate", "60", "--max-cost", "1")


def launched(run: Cli, train: Path, *more: str) -> str:
    code, checked = run("submit", str(train), *OPTIONS, *more)
    assert (code, checked["code"]) == (0, "checked")
    return str(run("submit", str(train), *OPTIONS, *more, "--receipt", checked["receipt"])[1]["job_id"])


def ended(run: Cli, job_id: str, *states: str) -> dict[str, Any]:
    for _ in range(200):
        body = run("check", job_id)[1]
        if body["state"] in (states or ("succeeded",)):
            return body
        time.sleep(0.05)
    raise AssertionError(body)


def proven(run: Cli, train: Path) -> str:
    job_id = launched(run, train)
    ended(run, job_id)
    assert run("pull", job_id)[0] == 0 and run("verify", job_id)[0] == 0
    return job_id


class Life:
    """Brings a job to where a person is needed, without going through a door."""

    def __init__(self, w: Warden) -> None:
        self.w = w

    async def blocked(self) -> str:
        """The ticket of a job that has ended; nothing of it is copied yet."""
        spec = build(JobSpec, JOB)
        job = (await submit(self.w, spec, receipt=(await submit(self.w, spec)).receipt)).job
        assert job is not None
        while (await check(self.w, job.id)).job.state != "succeeded":
            await anyio.sleep(0.05)
        self.job_id = job.id
        return (await request(self.w, job.id, "terminate")).record.id

    async def waiting(self) -> str:
        """The ticket of one whose copy is proven: only a yes is missing."""
        ticket = await self.blocked()
        await pull(self.w, self.job_id)
        await verify_job(self.w, self.job_id)
        return ticket


@pytest.fixture
def life(w: Warden) -> Life:
    return Life(w)


# ------------------------------------------------------------------------------------------------- JSON and exits


def test_a_job_goes_its_whole_way_with_json_alone(run: Cli, train: Path, home: Path, w: Warden) -> None:
    job_id = launched(run, train)
    assert ended(run, job_id)["meter"]["billing"] is True
    assert run("teardown", job_id)[0] == 1, "nothing was pulled"
    code, body = run("verify", job_id)
    assert (code, body["code"]) == (0, "claimed"), "the machine's own word, and no more"
    assert run("teardown", job_id)[0] == 1, "it counts as no copy"
    code, body = run("verify", job_id, "--where", "here")
    assert (code, body["code"]) == (2, "conflict")
    assert run("pull", job_id)[1]["files"] == 1
    copy = home / "artifacts" / job_id / "out/model.safetensors"
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1] + b"\xff")
    code, body = run("verify", job_id)
    assert (code, body["verdict"]) == (1, "refuted")
    assert run("verify", str(home / "nothing"))[1]["code"] == "not_found"
    copy.write_bytes(whole)
    code, body = run("verify", str(copy), "--level", "structure")
    assert (code, body["verdict"]) == (0, "proven")
    assert run("verify", job_id)[0] == 0
    code, body = run("teardown", job_id)
    assert (code, body["code"]) == (0, "approval_required")
    assert run("approve", body["ticket"])[1]["code"] == "refused", "there is no terminal here"
    assert run("teardown", job_id, "--withdraw")[1]["code"] == "withdrawn"
    assert len(run("instances")[1]["instances"]) == 1
    assert run("cancel", job_id)[1]["state"] == "succeeded"
    events = run("history", job_id)[1]["events"]
    assert {"job.accepted", "artifacts.pulled", "teardown.withdrawn"} <= {e["kind"] for e in events}
    assert metering(w)


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "told"),
    [
        (["nonsense"], 2, "bad_request", "nonsense"),
        (["check"], 2, "bad_request", "JOB_ID"),
        (["check", "j1", "--colour"], 2, "bad_request", "--colour"),
        (["check", "j1", "--log-bytes", "much"], 2, "bad_request", "much"),
        (["check", "j1"], 1, "not_found", "j1"),
        (["cancel", "j1"], 1, "not_found", "j1"),
        (["pull", "j1"], 1, "not_found", "j1"),
        (["teardown", "j1"], 1, "not_found", "j1"),
        (["approve"], 2, "bad_request", "ticket"),
        (["submit", "none.py", "--platform", PLATFORM], 2, "bad_request", "none.py"),
        (["submit", "/", "--platform", PLATFORM], 1, "refused", "PF-TIME-001"),
        (["submit", "true", "--platform", PLATFORM, "--env", "A"], 2, "bad_request", "NAME=VALUE"),
        (["submit", "true", "--platform", "x y"], 2, "bad_request", "platform"),
        (["submit", "true", "--platform", "moonbase"], 1, "refused", "PF-PLT-001"),
        (["submit", "true", "--platform", PLATFORM, "--max-cost", "nan"], 2, "bad_request", "--max-cost"),
        (["submit", "true", "--platform", PLATFORM, "--output", "../x"], 2, "bad_request", "climbs out"),
        (["rules", "PF-NONE-001"], 1, "not_found", "PF-NONE-001"),
        (["profiles", "moonbase"], 1, "not_found", "moonbase"),
        (["profiles", "../../etc/passwd"], 1, "not_found", "passwd"),
        (["verify", "no/such/file"], 2, "not_found", "no/such/file"),
    ],
)
def test_every_error_is_one_object_with_its_exit_code(
    run: Cli, words: list[str], exit_code: int, code: str, told: str
) -> None:
    found, body = run(*words)
    assert (found, body["code"]) == (exit_code, code), body
    assert told in json.dumps(body)


@pytest.mark.parametrize(
    "words",
    [
        ["rules"],
        ["profiles"],
        ["profiles", "vastai"],
        ["profiles", "ssh"],
        ["profiles", "ssh/box"],
        ["doctor"],
        ["history"],
        ["instances"],
    ],
)
def test_what_only_shows_something_ends_well(run: Cli, words: list[str]) -> None:
    assert run(*words)[0] == 0
    code, text = run.shown(*words)
    assert code == 0 and "Traceback" not in text


def test_scripts_that_are_none(run: Cli, tmp_path: Path) -> None:
    for name, content, told in (
        ("empty.py", b"", "empty"),
        ("big.py", b"#" * 50_000_000, "larger than"),
        ("latin.py", b"x = '\xff'", "UTF-8"),
        ("broken.py", b"def f(:", "PF-SRC-001"),
    ):
        (tmp_path / name).write_bytes(content)
        code, body = run("submit", str(tmp_path / name), *OPTIONS)
        assert code and told in json.dumps(body), name
    (tmp_path / "folder.py").mkdir()
    assert "folder.py" in run("submit", str(tmp_path / "folder.py"), *OPTIONS)[1]["message"]


def test_json_behind_two_dashes_is_the_jobs_word(run: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["submit", "--platform", "moonbase", "--", "true", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "PF-PLT-001" in err


def test_follow_with_json_prints_only_the_end(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    assert run("check", job_id, "--follow")[1]["state"] == "succeeded"


# ------------------------------------------------------------------------------------------------ our own mistakes


def test_a_mistake_of_ours_is_one_error(
    run: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr("gpuwarden.app.open_warden", explode)
    code, body = run("instances")
    assert (code, body["code"]) == (1, "internal") and "secret inside" not in json.dumps(body)
    code, text = run.shown("instances")
    assert code == 1 and "internal" in text and "Traceback" not in text
    monkeypatch.setenv("GPUWARDEN_DEBUG", "1")
    assert cli.run(["instances", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["code"] == "internal" and "secret inside" in err


def test_an_interruption_is_said_plainly(
    run: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (KeyboardInterrupt(), click.exceptions.Abort()):

        def stop(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("gpuwarden.app.open_warden", stop)
        assert cli.run(["instances", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["message"] == "interrupted"


def test_a_closed_pipe_is_no_crash(home: Path, w: Warden) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "rules"],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        said = stderr.read()
    assert process.wait(30) == 1 and said == b"", said.decode()


# ---------------------------------------------------------------------------------------------------- a bad home


def test_a_ledger_that_is_no_ledger(run: Cli, home: Path) -> None:
    file = home / "ledger.db"
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (home / name).unlink(missing_ok=True)
    file.write_bytes(b"this is no database at all, and long enough to be read as one" * 40)
    before = file.read_bytes()
    code, body = run("instances")
    assert (code, body["code"]) == (1, "ledger_error") and "damaged" in body["message"]
    assert file.read_bytes() == before
    code, body = run("doctor")
    assert code == 1 and body["checks"][0] == {"what": "ledger", "ok": False, "found": body["checks"][0]["found"]}


def test_a_ledger_of_a_newer_version(run: Cli, w: Warden, home: Path) -> None:
    w.ledger.close()
    with sqlite3.connect(home / "ledger.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    code, body = run("check", "j1")
    assert (code, body["code"]) == (1, "ledger_error") and "version 99" in body["message"] and "Update" in body["hint"]


def test_a_home_that_cant_be_made(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "file/home"))
    code, body = run("instances")
    assert (code, body["code"]) == (1, "ledger_error") and "GPUWARDEN_HOME" in body["hint"]


def test_a_read_only_home(run: Cli, w: Warden, home: Path, train: Path) -> None:
    if os.geteuid() == 0:
        need_mount()
        subprocess.run(["mount", "--bind", "-o", "ro", home, home], check=True)
        undo = ["umount", "--lazy", str(home)]
        subprocess.run(["mount", "-o", "remount,ro,bind", home], check=True)
    else:
        home.chmod(0o500)
        (home / "ledger.db").chmod(0o400)
        undo = ["chmod", "700", str(home)]
    try:
        code, body = run("submit", str(train), *OPTIONS)
        assert code == 1 and body["code"] in {"ledger_error", "disk_error"}, body
    finally:
        subprocess.run(undo, check=True)
    assert not w.ledger.events(kind="job.accepted")


def need_mount() -> None:
    """Root is not held back by permissions, so a read-only home takes a mount; a container may not allow one."""
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("mounts are not allowed here")


def test_a_full_disk(home: Path, w: Warden, train: Path) -> None:
    """A limit on the size of files stands for the disk: the ledger can't grow any more."""
    size = (home / "ledger.db").stat().st_size
    code = "import resource, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
    code += "from gpuwarden.cli import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(size), "submit", str(train), *OPTIONS, "--json"],
        env=environment(home), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    body = answer(done)
    assert done.returncode == 1 and body["code"] in {"ledger_error", "disk_error"} and body["hint"], body
    assert gpuwarden(home, "instances", "--json").returncode == 0, "with room again, it goes on"


@pytest.mark.parametrize(
    ("text", "told"),
    [("caps = [", "no TOML"), (f"caps = {'[' * 50_000}", "no TOML"), (f"caps.per_job_usd = {'9' * 5000}", "no TOML"),
     ("[caps]\nper_job = 1", "no setting"), ("[approval]\nttl_s = 0", "approval.ttl_s")],
)  # fmt: skip
def test_a_broken_policy(run: Cli, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    for words in (["instances"], ["doctor"]):
        code, body = run(*words)
        assert (
            (code, body["code"]) == (2, "bad_request") and told in body["message"] and "policy.toml" in body["message"]
        )


def test_a_profile_of_the_users_with_an_unknown_key(run: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    from gpuwarden.data import data_dir

    text = (data_dir("profiles") / "vastai.md").read_text("utf-8").replace("id: vastai", "id: mine\ncolour: red", 1)
    (folder / "mine.md").write_text(text, "utf-8")
    code, body = run("submit", "true", "--platform", "mine")
    assert code == 2 and "colour" in body["message"] and "mine.md" in body["message"], body
    (folder / "mine.md").write_text(text.replace("colour: red\n", ""), "utf-8")
    assert "mine" in run("profiles")[1]["platforms"]


# ------------------------------------------------------------------------------------------------ a person's yes


class Typed(Terminal):
    """A terminal of this process, for the many answers that need no real one."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.shown = ""

    def say(self, text: str) -> None:
        self.shown += text + "\n"

    def ask(self, prompt: str) -> str:
        self.shown += prompt
        return self.answers.pop(0)

    secret = ask


async def typed(w: Warden, ticket: str, *answers: str, without_proof: bool = False) -> tuple[str, str]:
    """What came of answering like that, and what was shown."""
    person = Typed(*answers)
    try:
        return (await ask(w, ticket, person, without_proof=without_proof)).code, person.shown
    except WardenError as error:
        return error.code, person.shown + error.message


def test_a_pipe_is_no_person(home: Path, w: Warden, run: Cli, train: Path) -> None:
    job_id = proven(run, train)
    ticket = run("teardown", job_id)[1]["ticket"]
    for words in (["approve", ticket], ["approve", "--set-pin"]):
        done = gpuwarden(home, *words, "--json", stdin="yes\nyes\ntrain\n")
        assert done.returncode == 1 and answer(done)["code"] == "refused", done.stdout
    assert metering(w) and not w.ledger.events(kind="approval.granted")


@pytest.mark.anyio
async def test_a_person_approves_and_sees_the_meter_stop(home: Path, w: Warden, train: Path, life: Life) -> None:
    ticket = await life.waiting()
    for no in ("no", "", "y", "YES"):
        code, shown = await typed(w, ticket, no)
        assert code == "refused" and "out/model.safetensors" in shown and metering(w)
    exit_code, shown = await to_thread.run_sync(lambda: at_terminal(home, "approve", ticket, says=YES))
    assert exit_code == 0 and "meter was seen to have stopped" in shown, shown
    assert not metering(w)
    code, shown = await typed(w, ticket)
    assert code == "verified_stopped" and shown == "", "a used ticket is not asked about again"
    assert len(w.ledger.events(kind="approval.used")) == 1


@pytest.mark.anyio
async def test_giving_up_what_is_not_proven_takes_the_jobs_name(home: Path, w: Warden, life: Life) -> None:
    ticket = await life.blocked()
    code, shown = await typed(w, ticket)
    assert code == "refused" and "TD-COPY-001" in shown and "not everything is proven" in shown
    for name in ("yes", "Tiny", ""):
        code, shown = await typed(w, ticket, name, without_proof=True)
        assert code == "refused" and "nothing was touched" in shown and metering(w)
    words = ("approve", ticket, "--without-proof")
    exit_code, shown = await to_thread.run_sync(lambda: at_terminal(home, *words, says={"to give it up: ": "tiny"}))
    assert exit_code == 0 and "NOT COPIED" in shown and not metering(w), shown
    assert [e.body["without_proof"] for e in w.ledger.events(kind="approval.granted")] == [True]


def test_a_pin_is_chosen_at_a_terminal(home: Path) -> None:
    policy = home.parent / "policy.toml"
    policy.write_text("# mine\nreceipt_ttl_s = 600\n")
    code, shown = at_terminal(home, "approve", "--set-pin", says=[("New PIN: ", "2468"), ("Again: ", "2468")])
    assert code == 0 and "2468" not in shown, shown
    text = policy.read_text()
    assert "# mine" in text and "receipt_ttl_s = 600" in text and "2468" not in text and "scrypt$" in text
    assert policy.stat().st_mode & 0o077 == 0
    code, shown = at_terminal(home, "approve", "--set-pin", says=[("Old PIN: ", "0000")])
    assert code == 1 and "nothing was changed" in shown and policy.read_text() == text


@pytest.mark.anyio
async def test_a_pin_can_not_be_tried_out(w: Warden, life: Life) -> None:
    approval = w.policy.approval.model_copy(update={"pin_hash": hash_pin("2468")})
    w.policy = w.policy.model_copy(update={"approval": approval})
    ticket = await life.waiting()
    for _ in range(5):
        code, shown = await typed(w, ticket, "yes", "1111")
        assert code == "refused" and "not the PIN" in shown
    code, shown = await typed(w, ticket, "yes", "2468")
    assert code == "refused" and "5 wrong PINs" in shown and metering(w), "the right one comes too late"


@pytest.mark.anyio
async def test_the_right_pin_approves(home: Path, w: Warden, life: Life) -> None:
    (home.parent / "policy.toml").write_text(f'[approval]\npin_hash = "{hash_pin("2468")}"\n')
    ticket = await life.waiting()
    says = [*YES.items(), ("PIN: ", "2468")]
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "approve", ticket, says=says))
    assert code == 0 and "2468" not in shown and not metering(w), shown


def test_a_spending_above_the_caps_takes_a_person(home: Path, w: Warden, run: Cli, train: Path) -> None:
    (home.parent / "policy.toml").write_text("[rehearsal_caps]\nper_job_usd = 0\n")
    code, body = run("submit", str(train), *OPTIONS)
    assert (code, body["code"]) == (0, "approval_required")
    again = ("submit", str(train), *OPTIONS, "--receipt", body["receipt"])
    assert run(*again)[1]["code"] == "approval_required" and not w.ledger.events(kind="job.accepted")
    code, shown = at_terminal(home, "approve", body["receipt"], says=YES)
    assert code == 0 and "price $" in shown and "/h" in shown, shown
    assert run(*again)[1]["code"] == "accepted"


# ------------------------------------------------------------------------------------------------------ what is seen


def test_tables_fit_80_columns_and_break_no_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "out", Console(width=80, highlight=False))
    machine = {
        "platform": "rehearsal/prime_intellect", "instance_id": "r23243ea3-17", "ours": True, "state": "terminating",
        "billing": None, "price_usd_per_hour": 28.8, "cost_usd": 1234.5678, "since": 1.8e9, "job_id": "j0123456789",
        "job_state": "provisioning", "note": "unverified: counts as billing; the job is failed and the meter runs",
    }  # fmt: skip
    terminal.listed(replies.InstancesReply(instances=[replies.InstanceReply.model_validate(machine)]))
    event = {"seq": 1, "at": 1.8e9, "subject": "receipt/r0123456789abcdef", "kind": "lease.created"}
    terminal.history([{**event, "state": "metering", "body": {"why": "seen \x1b[2J " + "gone " * 40}}])
    shown = capsys.readouterr().out
    assert all(len(text) <= 80 for text in shown.splitlines())
    for whole in ("rehearsal/prime_intellect", "r23243ea3-17", "$1,234.57", "$28.80/h", "j0123456789", "unknown"):
        assert whole in shown
    assert "receipt/r0123456789abcdef" in shown and "lease.created -> metering" in shown and "\x1b" not in shown


def test_a_person_is_told_commands_and_sees_the_log_bare(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    ended(run, job_id)
    _, shown = run.shown("check", job_id)
    assert f"`gpuwarden pull {job_id}`" in shown and "pull_artifacts" not in shown
    assert f"`gpuwarden pull {job_id}`" in run("check", job_id)[1]["hint"]
    assert "step 1 loss 0.5" in shown and "<<<DATA" not in shown


# ---------------------------------------------------------------------------------------------------- quick starts

HEAVY = {"mcp", "numpy", "paramiko", "huggingface_hub", "torch", "safetensors"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["check", "j1"], ["rules"], ["instances"]])
def test_a_command_brings_nothing_heavy(home: Path, words: list[str]) -> None:
    code = "import sys; from gpuwarden.cli import run; run(sys.argv[1:]); print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in re.search(r"MODULES (.*)", done.stdout)[1].split()}  # type: ignore[index]
    assert not loaded & HEAVY
    if words[0].startswith("--"):
        assert not loaded & {"pydantic", "rich", "anyio", "yaml"}
