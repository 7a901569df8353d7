"""Approve on the command line: at a real terminal, with a PIN, and never from a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anyio import to_thread

from cli_kit import OPTIONS, Cli, Life, metering, proven
from doors import answer, at_terminal, gpuwarden
from gpuwarden.core.policy import hash_pin
from gpuwarden.lifecycle.context import Context
from terminal import typed
from wording import Wording

YES = {"yes": "yes"}


@pytest.mark.slow
@pytest.mark.attack("person", "approves through a pipe")
def test_a_pipe_is_no_person(home: Path, ctx: Context, run: Cli, train: Path) -> None:
    job_id = proven(run, train)
    ticket = run("teardown", job_id)[1]["ticket"]
    for words in (["approve", ticket], ["approve", "--set-pin"]):
        done = gpuwarden(home, *words, "--json", stdin="yes\nyes\ntrain\n")
        assert done.returncode == 1 and answer(done)["code"] == "refused", done.stdout
    assert metering(ctx) and not ctx.ledger.events(kind="approval.granted")


@pytest.mark.prove
@pytest.mark.anyio
async def test_only_yes_approves_and_stops_the_meter(home: Path, ctx: Context, train: Path, life: Life) -> None:
    ticket = await life.waiting()
    for no in ("no", "", "y", "YES"):
        code, shown = await typed(ctx, ticket, no)
        assert code == "refused" and "out/model.safetensors" in shown and metering(ctx)
    exit_code, shown = await to_thread.run_sync(lambda: at_terminal(home, "approve", ticket, says=YES))
    assert exit_code == 0 and not metering(ctx), shown
    code, shown = await typed(ctx, ticket)
    assert code == "verified_stopped" and shown == "", "a used ticket is not asked about again"
    assert len(ctx.ledger.events(kind="approval.used")) == 1
    assert [e.body["policy"] for e in ctx.ledger.events(kind="approval.granted")] == [ctx.active_policy.digest]


@pytest.mark.slow
@pytest.mark.anyio
async def test_teardown_without_proof_needs_the_typed_job_name(
    home: Path, ctx: Context, life: Life, wording: Wording
) -> None:
    ticket = await life.blocked()
    code, shown = await typed(ctx, ticket)
    assert code == "refused" and "TD-COPY-001" in shown and not ctx.ledger.events(kind="approval.granted")
    instance = ctx.ledger.events(kind="lease.created")[0].body["instance"]["id"]
    wording(shown, ticket, instance)
    for name in ("yes", "Tiny", ""):
        code, shown = await typed(ctx, ticket, name, without_proof=True)
        assert code == "refused" and metering(ctx) and not ctx.ledger.events(kind="approval.granted")
    wording(shown.splitlines()[-1].partition(": ")[2])
    words = ("approve", ticket, "--without-proof")
    exit_code, shown = await to_thread.run_sync(lambda: at_terminal(home, *words, says={"(tiny)": "tiny"}))
    assert exit_code == 0 and "out/model.safetensors" in shown and not metering(ctx), shown
    assert [e.body["without_proof"] for e in ctx.ledger.events(kind="approval.granted")] == [True]


@pytest.mark.slow
def test_pin_is_set_at_a_terminal(home: Path, ctx: Context) -> None:
    policy, elsewhere = home.parent / "policy.toml", home.parent / "dotfiles.toml"
    elsewhere.write_text("# mine\nreceipt_ttl_s = 600\n")
    policy.unlink()
    policy.symlink_to(elsewhere)
    code, shown = at_terminal(home, "approve", "--set-pin", says=[("PIN: ", "2468"), (": ", "2468")])
    assert code == 0 and "2468" not in shown, shown
    text = policy.read_text()
    assert "# mine" in text and "receipt_ttl_s = 600" in text and "2468" not in text and "scrypt$" in text
    assert policy.stat().st_mode & 0o077 == 0 and policy.is_symlink()
    code, shown = at_terminal(home, "approve", "--set-pin", says=[("PIN: ", "0000")])
    assert code == 1 and policy.read_text() == text, shown
    assert len(ctx.ledger.events(kind="pin.wrong")) == 1


@pytest.mark.slow
@pytest.mark.attack("person", "tries out PINs")
@pytest.mark.anyio
async def test_five_wrong_pins_block_the_right_pin(ctx: Context, life: Life, wording: Wording) -> None:
    approval = ctx.policy.approval.model_copy(update={"pin_hash": hash_pin("2468")})
    ctx.policy = ctx.policy.model_copy(update={"approval": approval})
    ticket = await life.waiting()
    for tried in range(5):
        code, shown = await typed(ctx, ticket, "yes", "1111")
        assert code == "refused" and len(ctx.ledger.events(kind="pin.wrong")) == tried + 1
    wording(shown.splitlines()[-1])
    code, shown = await typed(ctx, ticket, "yes", "2468")
    assert code == "refused" and metering(ctx), "the right one comes too late"
    wording(shown.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_right_pin_approves(home: Path, ctx: Context, life: Life) -> None:
    (home.parent / "policy.toml").write_text(f'[approval]\npin_hash = "{hash_pin("2468")}"\n')
    ticket = await life.waiting()
    says = [*YES.items(), ("PIN: ", "2468")]
    code, shown = await to_thread.run_sync(lambda: at_terminal(home, "approve", ticket, says=says))
    assert code == 0 and "2468" not in shown and not metering(ctx), shown


@pytest.mark.slow
def test_spending_above_the_caps_needs_approval(home: Path, ctx: Context, run: Cli, train: Path) -> None:
    (home.parent / "policy.toml").write_text("[rehearsal_caps]\nper_job_usd = 0\n")
    code, body = run("submit", *OPTIONS, str(train))
    assert (code, body["code"]) == (0, "approval_required")
    again = ("submit", *OPTIONS, "--receipt", body["receipt"], str(train))
    assert run(*again)[1]["code"] == "approval_required" and not ctx.ledger.events(kind="job.accepted")
    code, shown = at_terminal(home, "approve", body["receipt"], says=YES)
    assert code == 0 and re.search(r"\$[\d.]+/h\b", shown), shown
    assert run(*again)[1]["code"] == "accepted"
