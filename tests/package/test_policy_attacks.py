"""Attacks by an agent that can set a process's environment variables, as a client's configuration does."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from mcp import Client

from doors import JOB, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.app import open_context
from gpuwarden.config import load_config
from gpuwarden.core.errors import LedgerError, Refused
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import hash_pin
from gpuwarden.interfaces.cli.approval import PIN_TRIES, check_pin
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.ledger.events import PinWrong
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.policy_record import RECORD, digest_of, read_record, usual_homes
from terminal import Typed, typed
from wording import Wording

pytestmark = pytest.mark.anyio
PIN, THEIRS = "2468", "1111"
STRICT = f"""platforms = ["rehearsal/*"]
[rehearsal_caps]
per_job_usd = 0.5
[secrets]
allowed = []
[approval]
channels = ["terminal"]
pin_hash = "{hash_pin(PIN)}"
"""
GENEROUS = f"""[rehearsal_caps]
per_job_usd = 1000
per_day_usd = 1000
per_instance_usd = 1000
[secrets]
allowed = ["*"]
[approval]
channels = ["terminal", "elicitation", "rehearsal"]
pin_hash = "{hash_pin(THEIRS)}"
"""


def need_xdg(attack: str) -> None:
    if "config" in attack and sys.platform != "linux":
        pytest.skip("the account's folders do not follow the XDG variables here")


@pytest.fixture(name="account")
def account_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an account that has used gpuwarden before, with a strict policy in the usual place."""
    home = tmp_path / "account"
    for name in [n for n in os.environ if n.startswith(("GPUWARDEN_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("gpuwarden.policy_record.account_home", lambda: home)
    config = load_config()
    config.policy_file.parent.mkdir(parents=True)
    config.policy_file.write_text(STRICT)
    open_context("cli").ledger.close()
    assert read_record(config.home) is not None and config.home in usual_homes()
    return home


@pytest.fixture(name="theirs")
def theirs_fixture(tmp_path: Path) -> Path:
    """An agent's own policy file, in a folder where a client would look for one."""
    file = tmp_path / "theirs" / "gpuwarden" / "policy.toml"
    file.parent.mkdir(parents=True)
    file.write_text(GENEROUS)
    return file


async def called(ctx: Context, tool: str, **arguments: Any) -> dict[str, Any]:
    async with Client(make_server(ctx)) as client:
        body = (await client.call_tool(tool, arguments)).structured_content
    assert body is not None
    return body


ATTACKS: dict[str, Callable[[Path], dict[str, str]]] = {
    "caps": lambda file: {
        f"GPUWARDEN_{table}CAPS_{name}_USD": "1000"
        for table in ("", "REHEARSAL_")
        for name in ("PER_JOB", "PER_DAY", "PER_INSTANCE")
    },
    "channel and PIN": lambda file: {
        "GPUWARDEN_APPROVAL_CHANNELS": "terminal,elicitation,rehearsal",
        "GPUWARDEN_APPROVAL_PIN_HASH": hash_pin(THEIRS),
    },
    "secrets and platforms": lambda file: {"GPUWARDEN_SECRETS_ALLOWED": "*", "GPUWARDEN_PLATFORMS": "*"},
    "policy": lambda file: {"GPUWARDEN_POLICY": str(file)},
    "config home": lambda file: {"XDG_CONFIG_HOME": str(file.parents[1])},
    "policy and a fresh ledger": lambda file: {
        "GPUWARDEN_POLICY": str(file), "GPUWARDEN_HOME": str(file.parents[1] / "ledger"),
    },
    "config and data home": lambda file: {
        "XDG_CONFIG_HOME": str(file.parents[1]), "XDG_DATA_HOME": str(file.parents[1] / "data"),
    },
    "home": lambda file: {"HOME": str(file.parents[1]), "XDG_CONFIG_HOME": str(file.parents[1])},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.attack("person", "raises a cap by an environment variable")
@pytest.mark.parametrize("name", ATTACKS)
async def test_variables_never_allow_spending_above_the_file(
    name: str, account: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_xdg(name)
    before = load_config()
    for variable, value in ATTACKS[name](theirs).items():
        monkeypatch.setenv(variable, value)
    ctx = open_context("mcp")
    assert ctx.policy == before.policy and ctx.active_policy.digest == before.digest, "the user's file stays active"
    first = await called(ctx, "submit_job", **JOB)
    assert first["code"] == "approval_required" and first["warnings"], first
    if name not in {"caps", "channel and PIN", "secrets and platforms"}:
        assert [n for n in ctx.notices if n.question and n.question in first["message"]], first
    again = await called(ctx, "submit_job", **JOB, receipt=first["receipt"])
    assert again["code"] == "approval_required" and not ctx.ledger.events(kind="job.accepted")
    assert (await called(ctx, "list_instances"))["warnings"] == first["warnings"]
    assert read_record(before.home) == before.recorded, "the record stays as it was"


@pytest.mark.attack("person", "names another policy file")
@pytest.mark.parametrize("name", ["policy", "config home", "policy and a fresh ledger"])
async def test_another_policy_needs_approval_even_below_every_cap(
    name: str, account: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_xdg(name)
    load_config().policy_file.write_text(GENEROUS)
    assert (await submit(open_context("cli"), build(JobSpec, JOB), dry_run=True)).ask == ""
    for variable, value in ATTACKS[name](theirs).items():
        monkeypatch.setenv(variable, value)
    ctx = open_context("mcp")
    asked = (await submit(ctx, build(JobSpec, JOB), dry_run=True)).ask
    assert asked == "; ".join(n.question for n in ctx.notices if n.question) != ""


@pytest.mark.attack("person", "links to the recorded policy file beside profiles of its own")
async def test_a_link_to_the_recorded_file_brings_no_profiles_of_its_own(
    account: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs.unlink()
    theirs.symlink_to(load_config().policy_file)
    (theirs.parent / "profiles").mkdir()
    monkeypatch.setenv("GPUWARDEN_POLICY", str(theirs))
    ctx = open_context("mcp")
    assert [n.kind for n in ctx.notices] == ["other_policy"] and ctx.own_profiles is None
    assert ctx.notes_file is not None and ctx.notes_file.parent != theirs.parent


@pytest.mark.attack("person", "tries each PIN with a fresh ledger")
async def test_a_fresh_ledger_allows_no_more_pin_attempts(
    account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(PIN_TRIES):
        monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / f"ledger-{n}"))
        with pytest.raises(Refused):
            await check_pin(open_context("cli"), Typed(THEIRS))
    for home in (tmp_path / "one-more", load_config({}).home):
        monkeypatch.setenv("GPUWARDEN_HOME", str(home))
        ctx = open_context("cli")
        with pytest.raises(Refused):
            await check_pin(ctx, Typed(PIN))
        assert not ctx.ledger.events(kind=PinWrong.kind())


@pytest.mark.parametrize("name", ["wrong_pins", "wrong_pins.lock"])
async def test_a_pin_list_owned_by_another_user_leaves_the_ledger_count(
    name: str, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = load_config().policy_file.with_name(name)
    theirs.write_text("")
    writable = os.access  # the tests may run as root, which can write to every file
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != theirs and writable(path, mode))
    for pin in [*[THEIRS] * PIN_TRIES, PIN]:
        with pytest.raises(Refused):
            await check_pin(open_context("cli"), Typed(pin))
    assert len(open_context("cli").ledger.events(kind=PinWrong.kind())) == PIN_TRIES
    assert (theirs.read_text(), theirs.with_name("wrong_pins").exists()) == ("", name == "wrong_pins")


@pytest.mark.attack("person", "damages the list of wrong PINs")
@pytest.mark.parametrize("line", [b"1.2.3", b"abc", b"nan", b".", b"\xff\xfe", b"\0" * 8, b"9" * 400, b""])
async def test_a_damaged_wrong_pin_list_counts_as_full_for_a_while(line: bytes, account: Path) -> None:
    file, ctx = load_config().policy_file.with_name("wrong_pins"), open_context("cli")
    file.write_bytes(line)
    with pytest.raises(Refused):
        await check_pin(ctx, Typed(PIN))
    os.utime(file, (0, 0))
    await check_pin(ctx, Typed(PIN))


# ------------------------------------------------------------------------------------------ accepting another file


@pytest.fixture(name="home")
def home_fixture(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (tmp_path / "policy.toml").write_text(STRICT)
    return home


@pytest.fixture(name="ctx")
def w_fixture(home: Path) -> Context:
    return quick_warden(home)


async def spending(ctx: Context) -> str:
    receipt = (await submit(ctx, build(JobSpec, JOB))).receipt
    assert receipt is not None
    return receipt


@pytest.mark.slow
@pytest.mark.attack("person", "replaces the PIN by one that it knows")
async def test_an_attackers_pin_approves_nothing(home: Path, ctx: Context, theirs: Path) -> None:
    receipt = await spending(ctx)
    says = [("yes", "yes"), ("PIN: ", THEIRS)]
    env = {"GPUWARDEN_POLICY": str(theirs), "GPUWARDEN_APPROVAL_PIN_HASH": hash_pin(THEIRS)}
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "approve", receipt, says=says, **env))
    assert code == 1 and str(theirs) in "".join(shown.split()), "the file in force is not the named one"
    assert len(ctx.ledger.events(kind=PinWrong.kind())) == 1 and not ctx.ledger.events(kind="approval.granted")


@pytest.mark.slow
@pytest.mark.attack("person", "accepts a policy file with another PIN")
async def test_accepting_a_file_needs_the_pin_of_the_policy_in_force(home: Path, ctx: Context, theirs: Path) -> None:
    says = [("yes", "yes"), ("PIN: ", THEIRS)]
    env = {"GPUWARDEN_POLICY": str(theirs)}
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "policy", "use", str(theirs), says=says, **env))
    assert code == 1 and len(ctx.ledger.events(kind=PinWrong.kind())) == 1, shown
    piped = gpuwarden(home, "policy", "use", str(theirs), "--json", stdin=f"yes\n{PIN}\n", **env)
    assert piped.returncode == 1 and json.loads(piped.stdout)["code"] == "refused"
    record = read_record(home)
    assert record is not None and record.path == str(home.parent / "policy.toml")
    assert not ctx.ledger.events(kind="policy.accepted")


@pytest.mark.slow
async def test_the_user_accepts_another_policy_file(home: Path, ctx: Context, theirs: Path) -> None:
    env = environment(home, GPUWARDEN_POLICY=str(theirs))
    doubted = open_context("mcp", env=env)
    assert [n.kind for n in doubted.notices] == ["other_policy"]
    assert (await submit(doubted, build(JobSpec, JOB), dry_run=True)).ask.startswith(doubted.notices[0].question)
    says = [("yes", "yes"), ("PIN: ", PIN)]
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "policy", "use", str(theirs), says=says))
    assert code == 0 and "rehearsal_caps.per_job_usd: 0.5 -> 1000" in shown and "scrypt" not in shown, shown
    assert "approval.pin_hash: set -> " in shown
    record = read_record(home)
    assert record is not None and (record.path, record.digest) == (str(theirs), digest_of(theirs.read_bytes()))
    assert stat.S_IMODE((home / RECORD).stat().st_mode) == 0o600
    [event] = ctx.ledger.events(kind="policy.accepted")
    assert event.body["path"] == str(theirs) and event.body["channel"] == "terminal"
    accepted = open_context("mcp", env=env)
    assert not accepted.notices and (await submit(accepted, build(JobSpec, JOB), dry_run=True)).ask == ""
    unnamed = {k: v for k, v in env.items() if k != "GPUWARDEN_POLICY"}
    assert open_context("cli", env=unnamed).policy == accepted.policy, "a chosen file needs no variable"


@pytest.mark.slow
async def test_the_policy_can_be_shown(home: Path, ctx: Context, theirs: Path) -> None:
    env = {"GPUWARDEN_POLICY": str(theirs)}
    body = json.loads(gpuwarden(home, "policy", "show", "--json", **env).stdout)
    assert (
        body["file"] == str(home.parent / "policy.toml")
        and body["digest"] == ctx.active_policy.digest
        and body["since"]
    )
    assert {"setting": "approval.pin_hash", "value": "set", "origin": "file"} in body["settings"]
    shown = gpuwarden(home, "policy", "show", **env).stdout
    assert "warning" in shown and str(theirs) in shown.replace("\n", "") and "scrypt" not in shown
    assert ctx.active_policy.file in ctx.protected_paths, "it goes to no machine as an input"


@pytest.mark.slow
async def test_a_file_with_a_mistake_is_not_accepted(home: Path, ctx: Context, theirs: Path) -> None:
    theirs.write_text("[caps]\nper_jobb = 3\n")
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "policy", "use", str(theirs), says=[]))
    assert code == 2 and "per_jobb" in shown, shown


@pytest.mark.attack("person", "accepts a policy file where no terminal may approve")
async def test_a_file_is_not_accepted_where_terminals_may_not_approve(
    home: Path, theirs: Path, wording: Wording
) -> None:
    from gpuwarden.interfaces.cli.policy_choice import use_policy

    (home.parent / "policy.toml").write_text('[approval]\nchannels = ["elicitation"]\n')
    with pytest.raises(Refused) as refused:
        await use_policy(quick_warden(home), theirs)
    wording(refused)


# -------------------------------------------------------------------------------------------------- recorded policies


async def test_every_approval_records_its_policy(home: Path, ctx: Context) -> None:
    assert ctx.active_policy.digest == digest_of(STRICT.encode())
    assert (await typed(ctx, await spending(ctx), "yes", PIN))[0] == "approved"
    [granted] = ctx.ledger.events(kind="approval.granted")
    assert granted.body["policy"] == ctx.active_policy.digest


async def test_an_edit_of_the_recorded_file_is_followed(home: Path, ctx: Context) -> None:
    before, strict = read_record(home), ctx.active_policy.digest
    (home.parent / "policy.toml").write_text(GENEROUS)
    fresh = quick_warden(home)
    after = read_record(home)
    assert before is not None and after is not None and (before.path, fresh.notices) == (after.path, ())
    assert before.digest == strict != after.digest == fresh.active_policy.digest == ctx.active_policy.digest


@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 5, "digest": "", "at": 0}', "\xff"])
async def test_a_broken_record_stops_everything(home: Path, ctx: Context, text: str) -> None:
    (home / RECORD).write_bytes(text.encode("latin-1"))
    with pytest.raises(LedgerError, match=RECORD):
        quick_warden(home)


async def test_the_doctor_and_the_command_line_report_another_policy(
    account: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuwarden.interfaces.cli.doctor import examine

    monkeypatch.setenv("GPUWARDEN_HOME", str(theirs.parent / "ledger"))
    monkeypatch.setenv("GPUWARDEN_POLICY", str(theirs))
    monkeypatch.setenv("GPUWARDEN_CAPS_PER_JOB_USD", "7")
    found = await examine()
    checks = {check.what: check for check in found.checks}
    assert str(usual_homes()[0]) in checks["ledger"].found and not checks["policy"].ok
    said = " ".join(found.warnings)
    assert all(word in said for word in ("GPUWARDEN_CAPS_PER_JOB_USD", str(theirs), "gpuwarden policy use"))
    assert not (theirs.parent / "ledger" / RECORD).exists(), "looking accepts nothing"
