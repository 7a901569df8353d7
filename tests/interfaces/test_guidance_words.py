"""Each interface words next steps and leaves other text alone: a path may be named after any tool and option."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.core.errors import Refused
from gpuwarden.core.guidance import OF_A_JOB, Action, NextStep, do, for_job, read_steps, steps
from gpuwarden.core.rules import Finding
from gpuwarden.interfaces.cli import console
from gpuwarden.interfaces.cli import wording as command_words
from gpuwarden.interfaces.cli.base import answer
from gpuwarden.interfaces.cli.main import cli
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.mcp.tools.base import answer as call_result
from gpuwarden.interfaces.mcp.wording import TOOLS, in_calls
from gpuwarden.interfaces.results import CheckReply, PullReply, RefusalReply, Result, error_reply, worded
from lifecycle_kit import open_house
from wording import Wording

NAMES = sorted(
    {
        *TOOLS.values(),
        *command_words.OPTIONS,
        *command_words.OPTIONS.values(),
        *(f"gpuwarden {c}" for c in cli.commands),
    }
    | {"job_id", "receipt", "`outputs`", "Call this again", "call again", "dry_run", "call check_job with this job_id"}
)
EVERY = "/data/" + "/".join(NAMES).replace(" ", "_")
FOREIGN = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8).map(" ".join) | st.just(EVERY)
"""Text with names of tools, commands, and options, as in a path, a metric, or a log."""


STEPS: dict[str, tuple[NextStep, tuple[str, ...], str]] = {
    "check": (do(Action.CHECK, job_id="j1"), ("check_job", "job_id=j1"), "`gpuwarden check j1`"),
    "check, with a purpose": (
        do(Action.CHECK, "; it does not wait", job_id="j1"), ("check_job", "; it does not wait."), "; it does not wait."
    ),
    "cancel instead": (
        do(Action.CANCEL, "to end it", alternative=True, job_id="j1"),
        ("cancel_job", "job_id=j1", "to end it"), "`gpuwarden cancel j1` to end it",
    ),
    "pull": (do(Action.PULL), ("pull_artifacts",), "`gpuwarden pull JOB`"),
    "verify a path": (
        do(Action.VERIFY, path="/a b/job_id", level="structure"),
        ("verify_checkpoint", 'path="/a b/job_id"', "level=structure"),
        "`gpuwarden verify --level structure '/a b/job_id'`",
    ),
    "verify a path like an option": (do(Action.VERIFY, path="-x"), ("path=-x",), "`gpuwarden verify -- -x`"),
    "teardown": (
        do(Action.TEARDOWN, job_id="j1", verb="stop"), ("teardown_request", "job_id=j1", "verb=stop"),
        "`gpuwarden teardown --verb stop j1`",
    ),
    "approve": (do(Action.APPROVE, ticket="t1"), ("gpuwarden approve t1",), "`gpuwarden approve t1`"),
    "submit": (
        do(Action.SUBMIT, "to launch", receipt="r1"), ("submit_job", "receipt=r1"), "`gpuwarden submit --receipt r1`"
    ),
    "submit without a receipt": (do(Action.SUBMIT, receipt=""), ("submit_job",), "--receipt"),
    "submit with inputs": (
        do(Action.SUBMIT, inputs=("a", "b c")), ("submit_job", 'inputs=["a", "b c"]'), "`--input a --input 'b c'`"
    ),
    "an argument's least": (do(Action.SET_ARGUMENT, name="timeout_s", at_least=60), ("timeout_s",), "`--timeout 60`"),
    "an argument": (do(Action.SET_ARGUMENT, name="max_cost_usd"), ("max_cost_usd",), "--max-cost"),
    "one more of an argument": (
        do(Action.SET_ARGUMENT, name="outputs", add="out"), ("out", "outputs"), "`--output out`"
    ),
    "no argument": (do(Action.LEAVE_OUT_ARGUMENT, name="disk_gb"), ("disk_gb",), "--disk"),
    "a repo": (do(Action.LOOK_AT_REPO), ("hub_repo_details",), "huggingface.co"),
    "machines": (do(Action.LIST_INSTANCES), ("list_instances",), "`gpuwarden instances`"),
    "again": (do(Action.RETRY), (), ""),
    "doctor": (do(Action.DOCTOR), ("gpuwarden doctor",), "`gpuwarden doctor`"),
    "watch": (do(Action.WATCH), ("gpuwarden watch",), "`gpuwarden watch`"),
    "setup": (do(Action.SETUP), ("gpuwarden setup",), "`gpuwarden setup`"),
    "passkey": (do(Action.ADD_PASSKEY), ("gpuwarden passkey add NAME",), "`gpuwarden passkey add NAME`"),
    "policy": (
        do(Action.USE_POLICY, file="/p.toml"), ("gpuwarden policy use /p.toml",), "`gpuwarden policy use /p.toml`"
    ),
    "local": (do(Action.ALLOW_LOCAL), ("gpuwarden policy allow local",), "`gpuwarden policy allow local`"),
    "pull for each": (
        do(Action.PULL, "for each", also=("a", "b")), ('also=["a", "b"]',), "`gpuwarden pull --also a --also b JOB`"
    ),
    "profile": (
        do(Action.SHOW_PROFILE, name="runpod"), ("gpuwarden://profiles/runpod.md",), "`gpuwarden profiles runpod`"
    ),
    "by hand": (
        do(Action.MANUAL, text="Look at the console."), ("Look at the console.",), "Look at the console."
    ),
}  # fmt: skip
"""Steps by name, each with its expected wording in a tool's reply and in a command's."""


@pytest.mark.parametrize("name", STEPS)
def test_step_is_worded_for_both_interfaces(name: str, wording: Wording) -> None:
    step, call, command = STEPS[name]
    assert all(part in in_calls([step]) for part in call) and command in in_commands([step])
    wording(f"{in_calls([step])}\n{in_commands([step])}")
    assert read_steps(json.loads(json.dumps([step.as_dict()]))) == read_steps([step.as_dict()])


PLAIN: dict[str, Any] = {"job_id": "j1", "ticket": "t1", "name": "gpu", "file": "f", "query": "q", "text": "Do it."}


@pytest.mark.parametrize("action", Action)
def test_every_action_is_worded_by_both_interfaces(action: Action) -> None:
    for given_parameters in ({"text": "Do it.", "name": "gpu", "ticket": "t1"}, PLAIN):
        step = NextStep(action, given_parameters)
        assert in_calls([step]).strip() and in_commands([step]).strip()


def test_a_step_names_the_job_of_its_reply() -> None:
    bare, other = do(Action.PULL), do(Action.VERIFY, path="/x")
    assert for_job([bare, other], "j1") == (do(Action.PULL, job_id="j1"), other)
    reply = worded(CheckReply(job_id="j1", state="failed", next=(bare,)), in_commands)
    assert "`gpuwarden pull j1`" in reply.hint and reply.next == (do(Action.PULL, job_id="j1"),)


def test_plain_sentence_or_old_ledger_fix_is_one_manual_step() -> None:
    assert steps("") == () and steps(["a", do(Action.RETRY), "a"]) == (*steps("a"), do(Action.RETRY))
    old = Finding.model_validate(
        {"rule": "TD-COPY-001", "severity": "error", "message": "m", "fix": "Call pull_artifacts."}
    )
    assert old.fix == steps("Call pull_artifacts.")
    new = Finding(rule="TD-COPY-001", severity="error", message="m", fix=(do(Action.PULL, job_id="j1"),))
    assert Finding.model_validate(json.loads(new.model_dump_json())) == new


@given(FOREIGN)
@settings(deadline=None)
def test_pasted_path_arrives_unchanged(text: str) -> None:
    words = shlex.split(in_commands([do(Action.VERIFY, path=text)]).split("`", 1)[1].rpartition("`")[0])
    assert words[:2] == ["gpuwarden", "verify"] and words[-1] == text
    if text[0] == "-":
        assert words[-2] == "--"
    called = (
        in_calls([do(Action.VERIFY, path=text)]).removeprefix("Call verify_checkpoint with path=").removesuffix(".")
    )
    assert text == (json.loads(called) if called.startswith('"') else called)


def replies(text: str) -> list[Result]:
    """Return replies with `text` wherever foreign text may occur, next to worded next steps."""
    step = do(Action.PULL, job_id="j1")
    found = [Finding(rule="TD-COPY-001", severity="error", message=text, fix=(step,))]
    refusal = error_reply(Refused(text, step, found))
    assert isinstance(refusal, RefusalReply)
    return [
        CheckReply(
            job_id="j1", state="failed", why=text, metrics={text: 1.0}, alerts=[text], message=text, next=(step,),
            log=f"<<<\n{text}\n>>>",
        ),
        PullReply(
            job_id="j1", dest=text, files=1, bytes=1, bytes_sent=1, manifest="m", missing=[text], problems=[text],
            next=(step,),
        ),
        refusal,
    ]  # fmt: skip


SHOWN = {CheckReply: console.checked, PullReply: console.pulled, RefusalReply: console.failed}


def texts(body: Any) -> list[str]:
    if isinstance(body, dict):
        return [text for key, value in body.items() for text in (key, *texts(value))]
    return [text for item in body for text in texts(item)] if isinstance(body, list) else [str(body)]


@given(FOREIGN)
@settings(deadline=None, max_examples=40)
def test_foreign_text_survives_every_interface(text: str) -> None:
    import io

    from rich.console import Console

    for reply in replies(text):
        before = reply.model_dump_json().count(json.dumps(text)[1:-1])
        for words in (in_calls, in_commands):
            left = worded(reply, words)
            assert left.model_dump_json().count(json.dumps(text)[1:-1]) >= before
            assert "gpuwarden pull j1" in left.hint or {"pull_artifacts", "job_id=j1"} <= set(
                re.split(r"[ .]", left.hint)
            )
        screen = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            wide = Console(file=screen, width=100_000, highlight=False)
            patch.setattr(console, "out", wide)
            patch.setattr(console, "err", wide)
            SHOWN[type(reply)](worded(reply, in_commands))  # type: ignore[operator]
        assert text in screen.getvalue()


@given(FOREIGN)
@settings(deadline=None, max_examples=15)
def test_foreign_text_survives_tool_results_and_command_json(
    text: str,
) -> None:
    import contextlib
    import io
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        from gpuwarden.core.clock import SystemClock

        ctx = open_house(Path(folder), SystemClock())
        for reply in replies(text):
            result = call_result(ctx, reply)
            for told in (result.structured_content, json.loads(result.content[0].text)):  # type: ignore[union-attr]
                assert any(text in found for found in texts(told))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                answer(reply, True, "message")
            body = json.loads(out.getvalue())
            assert any(text in found for found in texts(body))
            assert body["next"] == [{"action": "pull", "parameters": {"job_id": "j1"}}]
            assert "`gpuwarden pull j1`" in body["hint"]


def test_every_command_and_option_that_is_named_exists() -> None:
    assert set(TOOLS) >= OF_A_JOB and {name.split()[0] for name in command_words.COMMANDS.values()} <= set(cli.commands)
    options = {name for p in cli.commands["submit"].params for name in p.opts}
    assert set(command_words.OPTIONS.values()) <= options
    from gpuwarden.core.models import JobSpec

    ends = {"script", "command", "args"}  # positional, at the end of a command line
    plain = set(JobSpec.model_fields) - ends - {"cells", "cell_timeout_s"}  # the parts of a fan-out
    assert {command_words.option(name) for name in plain} <= options


def test_help_truncates_no_sentence() -> None:
    import click

    from gpuwarden.interfaces.cli.base import GroupedCommands

    shown = {name: command for name, command in cli.commands.items() if not command.hidden}
    context = click.Context(cli, info_name="gpuwarden", terminal_width=80)
    text = cli.get_help(context)
    assert "..." not in text.replace("t...", "").replace("r...", "").replace("[ARGS]...", "")
    assert all(f"  {name} " in text for name in shown), "every command is listed below a heading"
    assert all(f"{heading}:" in text for heading in GroupedCommands.rooms.values())
    bare = [
        (name, option.opts) for name, command in shown.items()
        for option in command.params if isinstance(option, click.Option) and not option.help
    ]  # fmt: skip
    assert not bare, "every option says what it is for"
